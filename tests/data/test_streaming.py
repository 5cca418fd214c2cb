"""Streams against the slow reference: nothing lost or doubled, in every format and share."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from streams import (
    KINDS,
    Bytes,
    documents_in,
    make_texts,
    reference,
    stream,
    tokens_of,
    write,
    write_files,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtune.data import padded_collate_packed

from hestia_tune.data.packing import batch_encoder, encoded, pack
from hestia_tune.data.shares import stream_counts
from hestia_tune.data.sources import TextSource
from hestia_tune.data.stream_errors import DataStreamError
from hestia_tune.models.tokenizers import HuggingFaceTokenizer


@pytest.mark.parametrize("seq_len", [1, 2, 5, 16, 1000])
def test_pack_holds_every_token_in_order(seq_len):
    texts = ["ab", "", "cdefg" * 9, "h"]
    generator = pack(((list(t.encode()), t, 0) for t in texts), seq_len, 0)
    sequences, lengths = [], []
    while True:
        try:
            tokens, pieces, _, _ = next(generator)
        except StopIteration as end:
            dropped = end.value
            break
        sequences.append(tokens)
        lengths.append(pieces)
    assert (sequences, dropped) == reference(texts, seq_len)
    assert all(sum(pieces) == seq_len and min(pieces) > 0 for pieces in lengths)


def test_encoding_in_batches_keeps_order_and_passes_ids_through():
    documents = [("ab", 0), (np.array([7]), 1), ("c" * 200_000, 2), (None, 3), ("d", 4)]
    out = [
        (None if ids is None else list(ids), key)
        for ids, key in encoded(documents, batch_encoder(Bytes()))
    ]
    assert out == [([97, 98], 0), ([7], 1), ([99] * 200_000, 2), (None, 3), ([100], 4)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_files", [1, 3])
def test_one_share_in_order_is_the_reference(tmp_path, kind, num_files):
    texts = make_texts(100) + ["", "x" * 300]
    files = [list(part) for part in np.array_split(np.array(texts, object), num_files)]
    arguments = write_files(tmp_path / "d", files, kind)
    dataset = stream(arguments, shuffle_buffer=0)
    found = tokens_of(dataset)
    expected, dropped = reference(texts, 16)
    if "." in kind:  # a part of a compressed file is every eighth line
        expected, _ = reference([t for f in files for p in range(8) for t in f[p::8]], 16)
    assert found == expected
    counts = stream_counts(dataset.state_dict())
    assert counts["dropped_tokens"] == dropped and counts["sequences"] == len(expected)
    assert dataset.num_sequences is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world_size", "num_files"), [(1, 2), (2, 1), (3, 5), (7, 1)])
def test_shares_hold_each_document_once(tmp_path, kind, world_size, num_files):
    texts = make_texts(150, seed=world_size)
    arguments = write_files(tmp_path / "d", [texts[i::num_files] for i in range(num_files)], kind)
    seen = Counter()
    for rank in range(world_size):
        dataset = stream(arguments, seq_len=1, shuffle_buffer=10, rank=rank, world_size=world_size)
        share = documents_in(tokens_of(dataset))
        seen.update(share)
        # With seq_len 1 nothing is dropped.
        assert stream_counts(dataset.state_dict())["dropped_tokens"] == 0
    assert seen == Counter(range(150))


def test_more_files_than_units_are_shared_by_files(tmp_path):
    files = [[f"{2 * n}:", f"{2 * n + 1}:"] for n in range(150)]
    arguments = write_files(tmp_path / "d", files, "text")
    shares = [
        documents_in(tokens_of(stream(arguments, seq_len=1, rank=rank, world_size=4)))
        for rank in range(4)
    ]
    assert sorted(sum(shares, [])) == list(range(300))
    assert all({n ^ 1 for n in share} == set(share) for share in shares)
    assert max(map(len, shares)) - min(map(len, shares)) <= 2


def test_shuffle_depends_on_seed_and_epoch_alone(tmp_path):
    texts = make_texts(200)
    arguments = write_files(tmp_path / "d", [texts[i::4] for i in range(4)], "json")

    def order(seed, epoch, buffer=50):
        dataset = stream(arguments, seq_len=1, shuffle_buffer=buffer, seed=seed)
        dataset.set_epoch(epoch)
        return documents_in(tokens_of(dataset))

    assert order(0, 0) == order(0, 0)
    orders = [order(0, 0), order(1, 0), order(0, 1)]
    for first in orders:
        assert sorted(first) == list(range(200))
        assert sum(first == other for other in orders) == 1
    # Documents mix within a block, and blocks hold what the file order brings.
    assert sorted(order(0, 0, 200)) == list(range(200)) != order(0, 0, 200)


@pytest.mark.parametrize("num_workers", [0, 2, 3])
def test_max_tokens_gives_every_rank_the_same_whole_batches(tmp_path, num_workers):
    texts = make_texts(40)
    arguments = write_files(tmp_path / "d", [texts], "json")
    # About four times as many tokens as there are; the files are read again.
    max_tokens = 16 * 203 + 5
    for rank in range(2):
        dataset = stream(
            arguments, epochs=None, max_tokens=max_tokens, batch_size=4, rank=rank, world_size=2
        )
        assert dataset.num_sequences == 101
        loader = StatefulDataLoader(
            dataset, batch_size=4, num_workers=num_workers, collate_fn=tokens_of
        )
        batches = list(loader)
        assert [len(batch) for batch in batches] == [4] * 25
        counts = stream_counts(loader.state_dict())
        assert counts["sequences"] == 100 and counts["dropped_tokens"] == 0


def test_epochs_end_the_stream_and_join_without_loss(tmp_path):
    texts = make_texts(30)
    arguments = write_files(tmp_path / "d", [texts], "json")
    once, dropped = reference(texts, 16)
    total = 3 * (len(once) * 16 + dropped)
    dataset = stream(arguments, epochs=3)
    assert len(tokens_of(dataset)) == total // 16
    assert stream_counts(dataset.state_dict()) == {
        "sequences": total // 16,
        "skipped_rows": 0,
        "dropped_tokens": total % 16,
        "epoch": 3,
    }
    assert Counter(documents_in(tokens_of(stream(arguments, seq_len=1, epochs=3)))) == Counter(
        list(range(30)) * 3
    )


def test_document_masks_collate_and_keep_documents_apart(tmp_path):
    texts = make_texts(20)
    arguments = write_files(tmp_path / "d", [texts], "text")
    plain = tokens_of(stream(arguments, shuffle_buffer=0))
    items = list(stream(arguments, shuffle_buffer=0, document_masks=True))
    assert tokens_of(items) == plain
    batch = padded_collate_packed(items)
    assert torch.equal(batch["labels"], batch["tokens"])
    for row, tokens in enumerate(plain):
        document, position = 0, 0
        where = []
        for token in tokens:
            where.append((document, position))
            document, position = (document + 1, 0) if token == 0 else (document, position + 1)
        assert batch["input_pos"][row].tolist() == [p for _, p in where]
        expected = [[i >= j and where[i][0] == where[j][0] for j in range(16)] for i in range(16)]
        assert batch["mask"][row].tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_reader_goes_on_from_any_cursor(tmp_path, kind):
    texts = make_texts(60, longest=20)
    arguments = write_files(tmp_path / "d", [texts], kind)
    source = TextSource(arguments["data_files"], arguments["source"], "text")
    for unit in range(source.num_units):
        items = list(source.read(unit, None))
        for index, (cursor, _, _) in enumerate(items):
            assert list(source.fresh().read(unit, cursor)) == items[index + 1 :]


def test_formats_without_a_reader_go_through_datasets(tmp_path):
    texts = [f"{n}:" for n in range(40)]
    (tmp_path / "a.csv").write_text("text,n\n" + "".join(f"{text},1\n" for text in texts))
    arguments = {"source": "csv", "data_files": str(tmp_path / "a.csv")}
    seen = []
    for rank in range(2):
        dataset = stream(arguments, seq_len=1, shuffle_buffer=5, rank=rank, world_size=2)
        seen += documents_in(tokens_of(dataset))
    assert sorted(seen) == list(range(40))
    with pytest.raises(ValueError, match="no column 'body'; it has text, n"):
        stream(arguments, column="body")


def test_too_many_shares_and_empty_shares_are_errors(tmp_path):
    write(tmp_path / "a.txt", ["one"], "text")
    arguments = {"source": "text", "data_files": str(tmp_path / "a.txt")}
    with pytest.raises(ValueError, match="200 ranks x workers cannot share 128 units"):
        list(stream(arguments, rank=0, world_size=200))
    with pytest.raises(DataStreamError, match="share 0 of 2 .* holds no documents"):
        list(stream(arguments, epochs=None, max_tokens=1000, rank=0, world_size=2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_len": 0}, "seq_len must be an integer of at least 1; got 0"),
        ({"shuffle_buffer": -1}, "shuffle_buffer must be"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"epochs": 0}, "epochs must be"),
        ({"batch_size": 1.5}, "batch_size must be"),
        ({"rank": 1}, "rank and world_size go together"),
        ({"rank": 2, "world_size": 2}, "rank must be 0 to world_size - 1"),
        ({"column": "body"}, "no column 'body'; it has text, n"),
        ({"split": "test"}, "no split 'test'; it has train"),
        ({"data_files": None}, "needs data_files"),
        ({"data_files": "nowhere/*.jsonl"}, "could not be loaded"),
    ],
)
def test_wrong_arguments(tmp_path, arguments, message):
    write(tmp_path / "a.jsonl", ["one"], "json")
    with pytest.raises(ValueError, match=message):
        stream({"source": "json", "data_files": str(tmp_path / "a.jsonl")}, **arguments)


def test_named_split(tmp_path):
    write(tmp_path / "a.jsonl", ["train me"], "json")
    write(tmp_path / "b.jsonl", ["hold out"], "json")
    files = {"train": str(tmp_path / "a.jsonl"), "validation": str(tmp_path / "b.jsonl")}
    dataset = stream({"source": "json", "data_files": files, "split": "validation"}, seq_len=9)
    assert [bytes(tokens) for tokens in tokens_of(dataset)] == [b"hold out\0"]
    assert json.loads((tmp_path / "a.jsonl").read_text())["text"] == "train me"


def test_repository_with_named_splits(tmp_path):
    """A folder with a dataset card resolves as a hub repository does."""
    for language in ("en", "zh"):
        arguments = write_files(tmp_path / "r", [[f"{language}{n}" for n in range(9)]], "parquet")
        folder = tmp_path / "r" / language
        folder.mkdir()
        (tmp_path / "r" / "f00.parquet").rename(folder / "a.parquet")
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n"
    card += "".join(f"  - split: {s}\n    path: {s}/*\n" for s in ("en", "zh"))
    (tmp_path / "r" / "README.md").write_text(card + "---\n")
    arguments = {"source": str(tmp_path / "r"), "split": "zh", "seq_len": 4, "shuffle_buffer": 0}
    assert [bytes(t) for t in tokens_of(stream(arguments))] == [b"zh%d\0" % n for n in range(9)]
    with pytest.raises(ValueError, match="no split 'train'; it has en, zh"):
        stream(arguments | {"split": "train"})


@pytest.mark.parametrize("kind", KINDS)
def test_remote_files_read_as_local_ones(tmp_path, kind):
    from fsspec.implementations.memory import MemoryFileSystem

    local = write_files(tmp_path / "d", [make_texts(80), make_texts(30, seed=1)], kind)
    urls = []
    for path in local["data_files"]:
        urls.append(f"memory://streams/{kind}/{path.rpartition('/')[2]}")
        with MemoryFileSystem().open(urls[-1], "wb") as file, open(path, "rb") as source:
            file.write(source.read())
    near = TextSource(local["data_files"], local["source"], "text")
    far = TextSource(urls, local["source"], "text")
    far.check()
    assert far.num_units == near.num_units
    for unit in range(near.num_units):
        items = list(near.read(unit, None))
        assert list(far.read(unit, None)) == items
        for index, (cursor, _, _) in enumerate(items):
            assert list(far.read(unit, cursor)) == items[index + 1 :]


def test_rank_comes_from_torch_distributed(tmp_path, monkeypatch):
    arguments = write_files(tmp_path / "d", [make_texts(50)], "text")
    expected = [tokens_of(stream(arguments, rank=rank, world_size=2)) for rank in range(2)]
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        assert tokens_of(stream(arguments)) == expected[rank]


def test_real_tokenizer_in_batches_gives_the_same_ids():
    folder = Path(__file__).parents[2] / "hestia_tune" / "assets" / "demo"
    tokenizer = HuggingFaceTokenizer(str(folder))
    texts = ["One text.", "", "Ünï\n\n  code 1234", "z" * 5000]
    encode = batch_encoder(tokenizer)
    assert encode.__name__ == "at_once"
    assert encode(texts) == [tokenizer.encode(t, add_bos=False, add_eos=False) for t in texts]
