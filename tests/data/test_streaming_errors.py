"""Errors name the bad file, column or value, and a server that hangs up is asked again."""

import gc
import gzip
import http.server
import multiprocessing
import re
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist
from streams import documents_in, find_all, make_texts, stream, tokens_of, write, write_files
from torchdata.stateful_dataloader import StatefulDataLoader

from hestia_tune.data import DataStreamError
from hestia_tune.training import loader

BAD_LINES = {
    b"\xff\xfe broken": "cannot be read",
    b"bin\0ary": "cannot be read",
    b"{not json": "cannot be read",
    b"[1, 2]": "cannot be read",
    b'{"body": "x", "n": 1}': "column 'text' .*holds NoneType, not text",
    b'{"text": null}': "column 'text' .*holds NoneType, not text",
    b'{"text": 7}': "a.jsonl",
}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("line", BAD_LINES)
def test_the_error_names_the_file_of_a_bad_line(tmp_path, line, compressed):
    path = tmp_path / ("a.jsonl.gz" if compressed else "a.jsonl")
    write(path, make_texts(40), "json")
    lines = path.read_bytes().splitlines()
    lines.insert(23, line)
    data = b"\n".join(lines)  # No newline at the end.
    path.write_bytes(gzip.compress(data) if compressed else data)
    with pytest.raises(DataStreamError, match="a.jsonl") as caught:
        for rank in range(2):
            arguments = {"source": "json", "data_files": str(path), "shuffle_buffer": 3}
            list(stream(arguments, rank=rank, world_size=2))
    assert re.search(BAD_LINES[line], str(caught.value)) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["json", "text", "json.gz"])
def test_an_empty_file_counts_only_if_it_is_the_only_file(tmp_path, kind):
    arguments = write_files(tmp_path / "d", [["0:", "1:"], [], ["2:"]], kind)
    assert sorted(documents_in(tokens_of(stream(arguments, seq_len=1)))) == [0, 1, 2]
    with pytest.raises(ValueError, match="f01.* (could not be loaded|holds no rows)"):
        stream(arguments | {"data_files": arguments["data_files"][1:2]})


def test_the_error_names_a_file_that_is_not_parquet(tmp_path):
    for data in (b"", b"no parquet" * 50):
        (tmp_path / "a.parquet").write_bytes(data)
        with pytest.raises(ValueError, match="a.parquet"):
            stream({"source": "parquet", "data_files": str(tmp_path / "a.parquet")})


@pytest.mark.parametrize("num_workers", [0, 1])
def test_corrupt_parquet_is_an_error_when_it_is_reached(tmp_path, num_workers):
    texts = make_texts(200, longest=200)
    arguments = write_files(tmp_path / "d", [texts[i::4] for i in range(4)], "parquet")
    path = tmp_path / "d" / "f02.parquet"
    data = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(5).column(0).data_page_offset
    data[start : start + 40] = b"\xff" * 40
    path.write_bytes(data)
    dataset = stream(arguments, shuffle_buffer=5)
    loader = StatefulDataLoader(
        dataset, batch_size=2, num_workers=num_workers, collate_fn=tokens_of
    )
    given = 0
    with pytest.raises(DataStreamError, match="f02.parquet.* cannot be read"):
        for _ in loader:
            given += 1
            state = loader.state_dict()
    assert given > 10 and sum(find_all(state, "sequences")) == 2 * given
    # A worker that raised is slow to end. Let it end here, and not in the middle of a later test.
    del loader
    gc.collect()


@pytest.mark.parametrize("kind", ["json.gz", "json.zst", "text.bz2"])
def test_the_error_names_a_file_with_corrupt_compression(tmp_path, kind):
    arguments = write_files(tmp_path / "d", [make_texts(900, longest=200)], kind)
    path = next((tmp_path / "d").iterdir())
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = b"\xaa" * (len(data) - len(data) // 2)
    path.write_bytes(data)
    # Some formats load if only the start of the file is good.
    with pytest.raises(
        (DataStreamError, ValueError), match=f"{path.name}.*(cannot be read|could not be loaded)"
    ):
        list(stream(arguments))


def test_bad_rows_of_parquet_are_errors(tmp_path):
    path = tmp_path / "a.parquet"
    arguments = {"source": "parquet", "data_files": str(path)}
    column = pa.array([b"0:", b"\xff", b"1:"]).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"text": column}), path)
    with pytest.raises(DataStreamError, match="a.parquet"):
        list(stream(arguments))
    pq.write_table(pa.table({"text": ["0:", None]}), path)
    with pytest.raises(DataStreamError, match="a.parquet .*'text' holds NoneType"):
        list(stream(arguments))
    pq.write_table(pa.table({"text": [1, 2]}), path)
    with pytest.raises(DataStreamError, match="a.parquet .*column 'text' holds int, not text"):
        stream(arguments)


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_a_later_file_without_the_column_is_an_error(tmp_path, kind):
    arguments = write_files(tmp_path / "d", [["a"] * 9, ["b"] * 9], kind)
    write(tmp_path / "d" / arguments["data_files"][1], ["b"], kind, column="body")
    with pytest.raises(DataStreamError, match="text") as caught:
        list(stream(arguments))
    assert "f01" in str(caught.value) and "body" in str(caught.value)


def test_a_file_that_has_vanished_is_an_error(tmp_path):
    arguments = write_files(tmp_path / "d", [["a"], ["b"]], "text")
    dataset = stream(arguments)
    (tmp_path / "d" / "f01.txt").unlink()
    with pytest.raises(DataStreamError, match="cannot be read .*FileNotFoundError.*f01.txt"):
        list(dataset)


class Server:
    """A server of one file that hangs up on the requests that ``refuses`` picks by number."""

    def __init__(self, content, refuses):
        self.requests, self.refuses = 0, refuses
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self):
                self._head(200, len(content))

            def do_GET(self):
                server.requests += 1
                if server.refuses(server.requests):
                    self.close_connection = True
                    return
                asked = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "bytes=0-"))
                first, last = int(asked[1]), int(asked[2] or len(content) - 1)
                part = content[first : last + 1]
                self._head(206, len(part), f"bytes {first}-{first + len(part) - 1}/{len(content)}")
                self.wfile.write(part)

            def _head(self, code, length, content_range=None):
                self.send_response(code)
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("Content-Length", str(length))
                if content_range:
                    self.send_header("Content-Range", content_range)
                self.end_headers()

            def log_message(self, *args):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/a.parquet"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()


def test_reading_goes_on_after_the_network_failed(tmp_path, monkeypatch):
    for name in ("READ", "OPEN"):
        monkeypatch.setattr(f"datasets.config.STREAMING_{name}_RETRY_INTERVAL", 0.01)
    local = write_files(tmp_path / "d", [make_texts(400, longest=4000)], "parquet")
    expected = tokens_of(stream(local, shuffle_buffer=0))
    with open(local["data_files"][0], "rb") as file:
        content = file.read()
    refused = set(range(3, 10**6, 4)) | set(range(4, 10**6, 4))
    with Server(content, refused.__contains__) as server:
        dataset = stream(local | {"data_files": server.url}, shuffle_buffer=0)
        assert tokens_of(dataset) == expected
        assert server.requests > 8
    with Server(content, lambda number: False) as server:
        dataset = stream(local | {"data_files": server.url}, shuffle_buffer=0)
        server.refuses = lambda number: True
        for name in ("READ", "OPEN"):
            monkeypatch.setattr(f"datasets.config.STREAMING_{name}_MAX_RETRIES", 2)
        with pytest.raises(DataStreamError, match="a.parquet cannot be read"):
            list(dataset)


def test_a_worker_that_dies_while_it_sends_a_batch(end_process_group):
    """The connection breaks before the data loader sees that the process has ended."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    batches = (ours.recv() for _ in range(2))
    remedy = "a data worker exited unexpectedly .*; lower num_workers, or look at the source"
    with pytest.raises(DataStreamError, match=remedy):
        loader._take_together(batches, 2)


def test_a_connection_of_the_source_keeps_its_own_message(end_process_group):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def batches():
        raise ConnectionResetError("the hub hung up")
        yield

    with pytest.raises(DataStreamError, match="^the hub hung up$"):
        loader._take_together(batches(), 2)
