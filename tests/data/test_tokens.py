"""Tokenized sets hold the same tokens as the stream, survive kills, and detect damage."""

from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from streams import Bytes, make_texts, stream, tokens_of, write_files
from torchdata.stateful_dataloader import StatefulDataLoader
from tqdm import tqdm

from hestia_tune import distributed
from hestia_tune.data import (
    PositionSampler,
    StreamConfig,
    TokenizedSet,
    tokens,
    verify_token_shards,
    write_token_shards,
)


class Wide(Bytes):
    """A tokenizer whose ids need 4 bytes."""

    vocab_size = 100_000

    def encode(self, text, add_bos, add_eos):
        return [byte + 70_000 for byte in text.encode()]


def cached(folder):
    return {"source": "token_shards", "data_files": str(folder), "epochs": None}


def sampler(dataset, rank=0, world_size=1):
    return PositionSampler(len(dataset), rank=rank, world_size=world_size, **dataset.order)


def all_of(dataset):
    """Return the sequences of one pass, or of the passes that the options give."""
    numbers = sampler(dataset) if dataset.order["length"] else range(len(dataset))
    return tokens_of(map(dataset.__getitem__, numbers))


@pytest.mark.parametrize("kind", ["parquet", "json", "json.gz"])
@pytest.mark.parametrize("shuffle_buffer", [0, 9])
def test_unshuffled_sequences_equal_the_sequences_of_the_text(tmp_path, kind, shuffle_buffer):
    texts = make_texts(120, longest=90) + [""]
    arguments = write_files(tmp_path / "d", [texts[:30], texts[30:]], kind)
    arguments |= {"shuffle_buffer": shuffle_buffer, "seed": 5}
    index = write_token_shards(Bytes(), tmp_path / "t", **arguments)
    assert index["num_documents"] == 120
    assert index["num_tokens"] == sum(len(text.encode()) + 1 for text in texts if text)
    verify_token_shards(tmp_path / "t")
    found = stream(cached(tmp_path / "t"), shuffle_buffer=0)
    assert len(found) == index["num_tokens"] // 16 and found.order["length"] is None
    endless = iter(sampler(found))
    assert [next(endless) for _ in range(2 * len(found))] == [*range(len(found))] * 2
    assert all_of(found) == tokens_of(stream(arguments))


def test_each_pass_holds_each_sequence_once_in_an_order_of_its_own(tmp_path):
    arguments = write_files(tmp_path / "d", [make_texts(200)], "json")
    index = write_token_shards(Bytes(), tmp_path / "t", shuffle_buffer=0, **arguments)
    once = index["num_tokens"] // 16
    ordered = all_of(stream(cached(tmp_path / "t"), shuffle_buffer=0))
    for more in ({"epochs": 3}, {"max_tokens": 3 * once * 16 + 15}):
        dataset = stream(cached(tmp_path / "t") | more)
        assert (len(dataset), dataset.order["length"]) == (once, 3 * once)
        found = all_of(dataset)
        passes = [found[k * once : (k + 1) * once] for k in range(3)]
        assert all(Counter(map(tuple, p)) == Counter(map(tuple, ordered)) for p in passes)
        assert all(
            one != other for one in passes for other in [ordered, *passes] if one is not other
        )
    assert found != all_of(stream(cached(tmp_path / "t") | more, seed=1))
    assert found == all_of(stream(cached(tmp_path / "t") | more))
    few = stream(cached(tmp_path / "t") | {"max_tokens": 16 * 7, "epochs": 1})
    assert all_of(few) == found[:7]


def test_document_masks_equal_the_masks_of_the_text(tmp_path):
    arguments = write_files(tmp_path / "d", [make_texts(20)], "text") | {"shuffle_buffer": 0}
    write_token_shards(Bytes(), tmp_path / "t", document_masks=True, **arguments)
    masked = stream(cached(tmp_path / "t"), document_masks=True, shuffle_buffer=0)
    text = list(stream(arguments, document_masks=True))
    assert len(text) == len(masked) > 10
    for number, item in enumerate(text):
        assert {k: v.tolist() for k, v in masked[number].items()} == {
            k: v.tolist() for k, v in item.items()
        }


@pytest.mark.parametrize("worlds", [(1, 2, 4), (4, 1, 2), (2, 4, 1)])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_resumes_exactly_on_any_number_of_ranks_and_workers(tmp_path, worlds, num_workers):
    """Compare each global batch of 8, on a changing number of ranks, with the batch on one rank."""
    arguments = write_files(tmp_path / "d", [make_texts(200)], "json")
    write_token_shards(Bytes(), tmp_path / "t", **arguments)
    dataset = stream(cached(tmp_path / "t") | {"max_tokens": 16 * 8 * 60})
    whole = all_of(dataset)
    assert len(dataset) < len(whole) == 480  # More than one pass.
    expected = [sorted(whole[start : start + 8]) for start in range(0, 480, 8)]
    taken, found = 0, []
    for world_size in worlds:
        steps = [[] for _ in range(20)]
        for rank in range(world_size):
            numbers = sampler(dataset, rank, world_size)
            numbers.start = taken
            loader = StatefulDataLoader(
                dataset,
                batch_size=8 // world_size,
                sampler=numbers,
                num_workers=num_workers,
                collate_fn=tokens_of,
            )
            for step, batch in zip(steps, loader, strict=False):
                step.extend(batch)
        found += map(sorted, steps)
        taken += 20 * 8
    assert found == expected


@pytest.mark.parametrize("tokenizer", [Bytes, Wide])
def test_ids_take_as_few_bytes_as_the_vocabulary_allows(tmp_path, tokenizer):
    arguments = write_files(tmp_path / "d", [["ab", "c"]], "text")
    write_token_shards(tokenizer(), tmp_path / "t", shuffle_buffer=0, **arguments)
    dtype = np.uint16 if tokenizer is Bytes else np.uint32
    found = np.fromfile(tmp_path / "t" / "tokens.bin", dtype).tolist()
    encode = tokenizer().encode
    assert found == [*encode("ab", False, False), 0, *encode("c", False, False), 0]


def test_a_killed_writer_leaves_nothing_and_a_complete_set_is_kept(tmp_path, monkeypatch):
    arguments = write_files(tmp_path / "d", [make_texts(90)], "json") | {"shuffle_buffer": 11}
    whole = write_token_shards(Bytes(), tmp_path / "whole", **arguments)
    content = (tmp_path / "whole" / "tokens.bin").read_bytes()

    class Killed(BaseException):
        pass

    class Deadly(Bytes):
        def encode(self, text, add_bos, add_eos):
            if text.startswith("7:"):
                raise Killed
            return super().encode(text, add_bos, add_eos)

    folder = tmp_path / "t"
    with pytest.raises(Killed):
        write_token_shards(Deadly(), folder, **arguments)
    assert not folder.exists()
    folder.mkdir()
    assert write_token_shards(Bytes(), folder, **arguments) == whole
    assert (folder / "tokens.bin").read_bytes() == content
    assert sorted(p.name for p in folder.iterdir()) == ["index.json", "tokens.bin"]
    monkeypatch.delattr(tokens, "staged")  # Nothing is written again.
    assert write_token_shards(Bytes(), folder, **arguments) == whole
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="other holds no tokenized set"):
        write_token_shards(Bytes(), other, **arguments)
    assert (other / "mine.txt").read_text() == "mine"


def test_max_tokens_takes_the_first_tokens_of_the_stream(tmp_path):
    texts = make_texts(90)
    arguments = write_files(tmp_path / "d", [texts[i::5] for i in range(5)], "json")
    index = write_token_shards(Bytes(), tmp_path / "t", seed=3, max_tokens=600, **arguments)
    assert index["num_tokens"] == 600
    found = all_of(stream(cached(tmp_path / "t"), shuffle_buffer=0))
    assert found == tokens_of(stream(arguments, seed=3))[: len(found)] and len(found) == 37


def test_damage_and_misuse_are_refused(tmp_path):
    arguments = write_files(tmp_path / "d", [make_texts(30)], "json")
    folder = tmp_path / "t"
    with pytest.raises(ValueError, match="holds no tokenized set: no index.json"):
        stream(cached(folder))
    write_token_shards(Bytes(), folder, **arguments)
    config = StreamConfig(seq_len=16, **cached(folder))
    with pytest.raises(ValueError, match="made with another tokenizer"):
        TokenizedSet(Wide(), config)
    with pytest.raises(ValueError, match=r"made with other settings \(source\); choose another"):
        write_token_shards(Bytes(), folder, seed=1, **arguments)
    with pytest.raises(ValueError, match="does not fill one sequence of 5000 tokens"):
        stream(cached(folder), seq_len=5000)
    dataset = TokenizedSet(Bytes(), config)
    path = folder / "tokens.bin"
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    for look in (lambda: verify_token_shards(folder), lambda: TokenizedSet(Bytes(), config)):
        with pytest.raises(ValueError, match="tokens.bin differs from its checksum"):
            look()
    path.write_bytes(data[:-1])
    with pytest.raises(ValueError, match="tokens.bin does not have its"):
        TokenizedSet(Bytes(), config)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="tokens.bin"):
        dataset[0]
    (folder / "index.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no tokenized set"):
        TokenizedSet(Bytes(), config)
    with pytest.raises(ValueError, match="token_shards holds no tokenized set"):
        stream({"source": "token_shards", "data_files": None})


class Bar(tqdm):
    """A progress bar that records the totals that it shows."""

    made: ClassVar[list] = []

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.totals = []
        self.made.append(self)

    def update(self, n=1):
        self.totals.append(self.total)
        return super().update(n)


@pytest.mark.parametrize("kind", ["parquet", "json", "text", "json.gz"])
@pytest.mark.parametrize("max_tokens", [None, 10**10, 30_000])
def test_the_progress_bar_counts_the_tokens_of_the_source(tmp_path, monkeypatch, kind, max_tokens):
    texts = [text.replace("\n", " ").strip() or "." for text in make_texts(900, longest=180)]
    arguments = write_files(tmp_path / "d", [texts[:700], texts[700:]], kind)
    monkeypatch.setattr(distributed, "tqdm", Bar)
    index = write_token_shards(Bytes(), tmp_path / "t", max_tokens=max_tokens, **arguments)
    (bar, *_), Bar.made[:] = Bar.made[::-1], []
    all_tokens = sum(len(text.encode()) + 1 for text in texts if text)
    assert index["num_tokens"] == min(all_tokens, max_tokens or all_tokens) > 3 * 8192
    if kind == "json.gz":  # Only reading everything would give the number of documents.
        assert set(bar.totals) == {None}
        assert bar.desc == ("" if max_tokens is None else f"at most {max_tokens:,}")
        return
    assert bar.desc == "" and bar.n == index["num_tokens"] == bar.totals[-1]
    assert all(abs(total / index["num_tokens"] - 1) < 0.2 for total in bar.totals)
