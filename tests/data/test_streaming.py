"""Streams against a slow reference: no document is lost or doubled, in any format or share."""

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from streams import (
    KINDS,
    documents_in,
    find_all,
    make_texts,
    reference,
    stream,
    tokens_of,
    write,
    write_files,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtune.data import padded_collate_packed

from hestia_tune.data import DataStreamError
from hestia_tune.data import stream as module
from hestia_tune.data.sequences import encode_each
from hestia_tune.models.tokenizers import HuggingFaceTokenizer
from hestia_tune.training.loader import collate_packed


def test_lots_and_blocks_do_not_change_an_unshuffled_stream(tmp_path, monkeypatch):
    texts = make_texts(100) + ["x" * 300, "", "y" * 90]
    arguments = write_files(tmp_path / "d", [texts], "json")
    expected, dropped = reference(texts, 16)
    for documents, characters in ((1, 1 << 20), (7, 1 << 20), (64, 50), (1000, 1)):
        monkeypatch.setattr(module, "LOT", documents)
        monkeypatch.setattr(module, "BLOCK_CHARACTERS", characters)
        dataset = stream(arguments, shuffle_buffer=0)
        assert tokens_of(dataset) == expected
        assert len(dataset.state_dict()["carry"]) == dropped


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_files", [1, 3])
def test_one_unshuffled_share_equals_the_reference(tmp_path, kind, num_files):
    texts = make_texts(100) + ["", "x" * 300]
    files = [list(part) for part in np.array_split(np.array(texts, object), num_files)]
    arguments = write_files(tmp_path / "d", files, kind)
    dataset = stream(arguments, shuffle_buffer=0)
    sequences = tokens_of(dataset)
    expected, dropped = reference(texts, 16)
    assert sequences == expected
    state = dataset.state_dict()
    assert len(state["carry"]) == dropped and state["sequences"] == len(expected)
    assert dataset.num_sequences is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world_size", "num_files"), [(1, 2), (2, 1), (2, 4), (3, 5), (7, 1)])
def test_all_shares_together_hold_each_document_once(tmp_path, kind, world_size, num_files):
    texts = make_texts(150, seed=world_size)
    arguments = write_files(tmp_path / "d", [texts[i::num_files] for i in range(num_files)], kind)
    seen = Counter()
    for rank in range(world_size):
        dataset = stream(arguments, seq_len=1, shuffle_buffer=10, rank=rank, world_size=world_size)
        share = documents_in(tokens_of(dataset))
        seen.update(share)
        # With seq_len 1 no token is dropped.
        assert dataset.state_dict()["carry"] == []
    assert seen == Counter(range(150))


def test_few_files_are_read_by_every_rank(tmp_path):
    """By file, one of two ranks would read the small one again and again."""
    files = [[f"{n}:" for n in range(100)], [f"{n}:" for n in range(100, 104)]]
    arguments = write_files(tmp_path / "d", files, "json")
    streams = [stream(arguments, seq_len=1, rank=rank, world_size=2) for rank in range(2)]
    shares = [documents_in(tokens_of(dataset)) for dataset in streams]
    assert sorted(sum(shares, [])) == list(range(104))
    assert {len(share) for share in shares} == {52}
    # Places that an earlier version saved are not those of this order.
    state = streams[0].state_dict()
    with pytest.raises(ValueError, match="divided the files among the readers"):
        streams[0].load_state_dict(state | {"stream": state["stream"][:-1]})


def test_many_files_are_split_among_ranks_by_file(tmp_path):
    files = [[f"{2 * n}:", f"{2 * n + 1}:"] for n in range(150)]
    arguments = write_files(tmp_path / "d", files, "text")
    shares = [
        documents_in(tokens_of(stream(arguments, seq_len=1, rank=rank, world_size=4)))
        for rank in range(4)
    ]
    assert sorted(sum(shares, [])) == list(range(300))
    assert all({n ^ 1 for n in share} == set(share) for share in shares)
    assert max(map(len, shares)) - min(map(len, shares)) <= 2


def test_the_order_depends_on_seed_and_epoch_alone(tmp_path):
    texts = make_texts(200)
    arguments = write_files(tmp_path / "d", [texts[i::4] for i in range(4)], "json")

    def order(seed, epoch, buffer=50):
        dataset = stream(arguments, seq_len=1, shuffle_buffer=buffer, seed=seed, epochs=epoch + 1)
        found = documents_in(tokens_of(dataset))
        assert len(found) == 200 * (epoch + 1)
        return found[200 * epoch :]

    assert order(0, 0) == order(0, 0)
    orders = [order(0, 0), order(1, 0), order(0, 1)]
    for first in orders:
        assert sorted(first) == list(range(200))
        assert sum(first == other for other in orders) == 1
    # Documents are mixed within a block. The order of the files decides what a block contains.
    assert sorted(order(0, 0, 200)) == list(range(200)) != order(0, 0, 200)


@pytest.mark.parametrize("num_workers", [0, 2, 3])
def test_max_tokens_gives_every_rank_the_same_whole_batches(tmp_path, num_workers):
    texts = make_texts(40)
    arguments = write_files(tmp_path / "d", [texts], "json")
    # About four times as many tokens as the files hold, so the files are read again.
    max_tokens = 16 * 203 + 5
    for rank in range(2):
        dataset = stream(arguments, epochs=None, max_tokens=max_tokens, rank=rank, world_size=2)
        dataset.batch_size = 4
        assert dataset.num_sequences == 101
        loader = StatefulDataLoader(
            dataset, batch_size=4, num_workers=num_workers, collate_fn=tokens_of
        )
        batches = list(loader)
        assert [len(batch) for batch in batches] == [4] * 25
        assert sum(find_all(loader.state_dict(), "sequences")) == 100


def test_a_stream_ends_after_its_epochs_and_loses_nothing_between_them(tmp_path):
    texts = make_texts(30)
    arguments = write_files(tmp_path / "d", [texts], "json")
    once, dropped = reference(texts, 16)
    total = 3 * (len(once) * 16 + dropped)
    dataset = stream(arguments, epochs=3)
    assert len(tokens_of(dataset)) == total // 16
    state = dataset.state_dict()
    assert (state["sequences"], len(state["carry"]), state["epoch"]) == (total // 16, total % 16, 3)
    assert Counter(documents_in(tokens_of(stream(arguments, seq_len=1, epochs=3)))) == Counter(
        list(range(30)) * 3
    )


def test_document_masks_collate_and_keep_documents_apart(tmp_path):
    texts = make_texts(20)
    arguments = write_files(tmp_path / "d", [texts], "text")
    plain = tokens_of(stream(arguments, shuffle_buffer=0))
    items = list(stream(arguments, shuffle_buffer=0, document_masks=True))
    assert tokens_of(items) == plain
    batch = collate_packed(items)
    theirs = padded_collate_packed(items) if not torch.cuda.is_available() else batch
    assert all(torch.equal(batch[key], theirs[key]) for key in theirs)
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


def test_a_csv_file_can_be_read(tmp_path):
    texts = [f"{n}:" for n in range(40)]
    (tmp_path / "a.csv").write_text("text,n\n" + "".join(f"{text},1\n" for text in texts))
    arguments = {"source": "csv", "data_files": str(tmp_path / "a.csv")}
    seen = []
    for rank in range(2):
        dataset = stream(arguments, seq_len=1, shuffle_buffer=5, rank=rank, world_size=2)
        seen += documents_in(tokens_of(dataset))
    assert sorted(seen) == list(range(40))
    with pytest.raises(DataStreamError, match="holds NoneType, not text; columns: text, n"):
        stream(arguments, column="body")


def test_an_empty_share_is_an_error(tmp_path):
    write(tmp_path / "a.txt", ["one"], "text")
    arguments = {"source": "text", "data_files": str(tmp_path / "a.txt")}
    assert len(list(stream(arguments, seq_len=4, rank=0, world_size=2))) == 1
    with pytest.raises(DataStreamError, match="share 1 of 2 .* holds no documents"):
        list(stream(arguments, epochs=None, max_tokens=1000, rank=1, world_size=2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_len": 0}, "dataset.seq_len must be at least 1; got 0"),
        ({"shuffle_buffer": -1}, "shuffle_buffer must be"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"epochs": 0}, "epochs must be"),
        ({"seq_length": 8}, "did you mean seq_len"),
        ({"column": "body"}, "'body' holds NoneType, not text; columns: text, n"),
        ({"split": "test"}, "Bad split: test. Available splits: .'train'"),
        ({"data_files": None}, "source json needs data_files"),
        ({"data_files": "nowhere/*.jsonl"}, "could not be loaded"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, arguments, message):
    write(tmp_path / "a.jsonl", ["one"], "json")
    with pytest.raises((ValueError, OSError), match=message):
        stream({"source": "json", "data_files": str(tmp_path / "a.jsonl")}, **arguments)


def test_a_split_can_be_named(tmp_path):
    write(tmp_path / "a.jsonl", ["train me"], "json")
    write(tmp_path / "b.jsonl", ["hold out"], "json")
    files = {"train": str(tmp_path / "a.jsonl"), "validation": str(tmp_path / "b.jsonl")}
    dataset = stream({"source": "json", "data_files": files, "split": "validation"}, seq_len=9)
    assert [bytes(tokens) for tokens in tokens_of(dataset)] == [b"hold out\0"]
    assert json.loads((tmp_path / "a.jsonl").read_text())["text"] == "train me"


def test_a_repository_with_named_splits_can_be_read(tmp_path):
    """Use a folder with a dataset card, which `datasets` reads like a repository of the hub."""
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
    with pytest.raises(ValueError, match="Bad split: train. Available splits: .'en', 'zh'"):
        stream(arguments | {"split": "train"})


@pytest.mark.parametrize("kind", KINDS)
def test_remote_files_give_the_same_sequences_as_local_files(tmp_path, kind):
    from fsspec.implementations.memory import MemoryFileSystem

    local = write_files(tmp_path / "d", [make_texts(80), make_texts(30, seed=1)], kind)
    urls = []
    for path in local["data_files"]:
        urls.append(f"memory://streams/{kind}/{path.rpartition('/')[2]}")
        with MemoryFileSystem().open(urls[-1], "wb") as file, open(path, "rb") as source:
            file.write(source.read())
    near = tokens_of(stream(local, shuffle_buffer=0))
    far = stream(local | {"data_files": urls}, shuffle_buffer=0)
    states = [far.state_dict() for _ in far]
    assert tokens_of(far) == near and len(near) > 100
    for step in range(0, len(near), 17):
        far.load_state_dict(states[step])
        assert tokens_of(itertools.islice(far, 3)) == near[step + 1 : step + 4]


def test_the_rank_comes_from_torch_distributed(tmp_path, monkeypatch):
    arguments = write_files(tmp_path / "d", [make_texts(50)], "text")
    expected = [tokens_of(stream(arguments, rank=rank, world_size=2)) for rank in range(2)]
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        assert tokens_of(stream(arguments)) == expected[rank]


def test_a_real_tokenizer_gives_the_same_ids_in_batches():
    folder = Path(__file__).parents[2] / "hestia_tune" / "assets" / "demo"
    tokenizer = HuggingFaceTokenizer(str(folder))
    texts = ["One text.", "", "Ünï\n\n  code 1234", "z" * 5000]
    assert tokenizer.encode_batch(texts) == list(encode_each(tokenizer, texts))
