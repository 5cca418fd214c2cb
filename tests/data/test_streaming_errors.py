"""Bad input is named (file, line, columns) or counted; a silent server is asked again."""

import gc
import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from streams import KINDS, documents_in, make_texts, stream, tokens_of, write, write_files
from torchdata.stateful_dataloader import StatefulDataLoader

from hestia_tune.data import sources, stream_errors
from hestia_tune.data.shares import stream_counts
from hestia_tune.data.stream_errors import DataConnectionError, DataStreamError, is_transient

BAD_LINES = {
    b"\xff\xfe broken": "is not UTF-8",
    b"bin\0ary": "holds zero bytes; the file looks binary",
    b"{not json": "is not JSON",
    b"[1, 2]": "holds a value of type list, not a JSON object",
    b'{"body": "x", "n": 1}': "has no column 'text'; it has body, n",
    b'{"text": null}': "column 'text' holds null, not text",
    b'{"text": 7}': "column 'text' holds a value of type int, not text",
}


@pytest.fixture
def waits(monkeypatch):
    waited = []
    monkeypatch.setattr(stream_errors.time, "sleep", waited.append)
    return waited


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("line", BAD_LINES)
def test_bad_line_is_named_or_skipped(tmp_path, line, compressed):
    texts = make_texts(40)
    path = tmp_path / ("a.jsonl.gz" if compressed else "a.jsonl")
    write(path, texts, "json")
    lines = path.read_bytes().splitlines()
    lines.insert(23, line)
    data = b"\n".join(lines)  # no newline at the end
    path.write_bytes(gzip.compress(data) if compressed else data)
    arguments = {"source": "json", "data_files": str(path)}
    with pytest.raises(DataStreamError, match=f"a.jsonl.*, line 24 {BAD_LINES[line]}"):
        for rank in range(2):
            list(stream(arguments, rank=rank, world_size=2, shuffle_buffer=3))
    dataset = stream(arguments, skip_bad_rows=True, seq_len=1, shuffle_buffer=3)
    assert sorted(documents_in(tokens_of(dataset))) == list(range(40))
    assert stream_counts(dataset.state_dict())["skipped_rows"] == 1


def test_skipped_rows_are_counted_once_over_a_resume(tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, make_texts(60), "json")
    lines = path.read_bytes().splitlines(keepends=True)
    for at in (50, 31, 30, 7):
        lines.insert(at, b"bad\n")
    path.write_bytes(b"".join(lines))
    arguments = {"source": "json", "data_files": str(path), "skip_bad_rows": True}
    dataset = stream(arguments, shuffle_buffer=8)
    states = [dataset.state_dict() for _ in dataset]
    counted = [stream_counts(state)["skipped_rows"] for state in states]
    assert counted == sorted(counted)
    for state in states[::9]:
        resumed = stream(arguments, shuffle_buffer=8)
        resumed.load_state_dict(state)
        list(resumed)
        assert stream_counts(resumed.state_dict())["skipped_rows"] == 4


@pytest.mark.parametrize("kind", ["json", "text", "json.gz"])
def test_empty_file(tmp_path, kind):
    arguments = write_files(tmp_path / "d", [["0:", "1:"], [], ["2:"]], kind)
    with pytest.raises(DataStreamError, match="f01.*the file is empty"):
        list(stream(arguments))
    dataset = stream(arguments, seq_len=1, skip_bad_rows=True)
    assert sorted(documents_in(tokens_of(dataset))) == [0, 1, 2]
    with pytest.raises(ValueError, match="the file is empty"):
        stream(arguments | {"data_files": arguments["data_files"][1:2]})
    with pytest.raises(ValueError, match="the file is empty"):
        stream(arguments | {"data_files": arguments["data_files"][1:2]}, skip_bad_rows=True)
    with pytest.raises(ValueError, match="no column 'body'; it has text, n"):
        write(tmp_path / "a.jsonl", ["x"] * 2000, "json")
        files = {"source": "json", "data_files": str(tmp_path / "a.jsonl")}
        stream(files, column="body", skip_bad_rows=True)


def test_parquet_of_other_bytes_is_named(tmp_path):
    for data in (b"", b"no parquet" * 50):
        (tmp_path / "a.parquet").write_bytes(data)
        with pytest.raises(ValueError, match="a.parquet cannot be read, it may be corrupt"):
            stream({"source": "parquet", "data_files": str(tmp_path / "a.parquet")})


@pytest.mark.parametrize("num_workers", [0, 1])
def test_corrupt_parquet_in_the_middle_of_a_run(tmp_path, num_workers):
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
    with pytest.raises(DataStreamError, match="f02.parquet cannot be read, it may be corrupt"):
        for _ in loader:
            given += 1
            state = loader.state_dict()
    assert given > 10 and stream_counts(state)["sequences"] == 2 * given
    # A worker that raised is slow to end; here, rather than in the midst of a later test.
    del loader
    gc.collect()


@pytest.mark.parametrize("kind", ["json.gz", "json.zst", "text.bz2"])
def test_corrupt_compression_is_named(tmp_path, kind):
    arguments = write_files(tmp_path / "d", [make_texts(900, longest=200)], kind)
    path = next((tmp_path / "d").iterdir())
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = b"\xaa" * (len(data) - len(data) // 2)
    path.write_bytes(data)
    with pytest.raises((DataStreamError, ValueError), match=f"{path.name} cannot be read"):
        list(stream(arguments))


def test_bad_rows_of_parquet(tmp_path):
    column = pa.array([b"0:", b"\xff", None, b"1:"]).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    arguments = {"source": "parquet", "data_files": str(tmp_path / "a.parquet")}
    with pytest.raises(DataStreamError, match="a.parquet, row 1 is not UTF-8"):
        list(stream(arguments))
    dataset = stream(arguments, skip_bad_rows=True, seq_len=1, shuffle_buffer=0)
    assert documents_in(tokens_of(dataset)) == [0, 1]
    assert stream_counts(dataset.state_dict())["skipped_rows"] == 2
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="row 0 column 'text' holds a value of type int"):
        stream(arguments)


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_later_file_without_the_column(tmp_path, kind):
    arguments = write_files(tmp_path / "d", [["a"] * 9, ["b"] * 9], kind)
    write(tmp_path / "d" / arguments["data_files"][1], ["b"], kind, column="body")
    with pytest.raises(DataStreamError, match="f01.* no column 'text'; it has body, n"):
        list(stream(arguments))


def test_vanished_file(tmp_path):
    arguments = write_files(tmp_path / "d", [["a"], ["b"]], "text")
    dataset = stream(arguments)
    (tmp_path / "d" / "f01.txt").unlink()
    with pytest.raises(DataStreamError, match="f01.txt cannot be read"):
        list(dataset)


@pytest.mark.parametrize("kind", KINDS)
def test_reading_goes_on_after_the_network_failed(tmp_path, monkeypatch, waits, kind):
    arguments = write_files(tmp_path / "d", [make_texts(100)], kind)
    expected = tokens_of(stream(arguments, shuffle_buffer=0))
    document, calls = sources.TextSource._document, []

    def flaky(self, file, value):
        calls.append(value)
        if len(calls) % 10 in (7, 8):
            raise ConnectionResetError("peer has gone")
        return document(self, file, value)

    dataset = stream(arguments, shuffle_buffer=0)
    monkeypatch.setattr(sources.TextSource, "_document", flaky)
    assert tokens_of(dataset) == expected
    assert len(waits) > 20 and set(waits) == {1.0, 2.0}


def test_silent_server_is_given_up(tmp_path, monkeypatch, waits):
    arguments = write_files(tmp_path / "d", [make_texts(10)], "json")
    dataset = stream(arguments, max_retries=8)

    def silent(self, file, value):
        raise TimeoutError("no answer")

    monkeypatch.setattr(sources.TextSource, "_document", silent)
    with pytest.raises(DataConnectionError, match="f00.jsonl did not answer in 9 tries") as caught:
        list(dataset)
    assert isinstance(caught.value, DataStreamError) and isinstance(caught.value, ConnectionError)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]


def test_silent_hub(monkeypatch, waits):
    def silent(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'some/name' on the Hub")

    monkeypatch.setattr("datasets.load_dataset_builder", silent)
    with pytest.raises(ConnectionError, match="dataset some/name did not answer in 4 tries"):
        stream({"source": "some/name"}, max_retries=3)
    assert waits == [1, 2, 4]


def test_refusals_are_not_asked_again():
    class Refused(ConnectionError):
        def __init__(self, status):
            self.status = status

    assert (
        is_transient(Refused(503)) and is_transient(Refused(429)) and is_transient(TimeoutError())
    )
    assert not is_transient(Refused(401)) and not is_transient(Refused(404))
    assert not is_transient(FileNotFoundError()) and not is_transient(ValueError())
