"""Token shards hold what the stream holds, survive kills, and know their own damage."""

import itertools
import json

import numpy as np
import pytest
from streams import Bytes, make_texts, stream, tokens_of, write, write_files
from torchdata.stateful_dataloader import StatefulDataLoader

from hestia_tune.data import token_shards
from hestia_tune.data.shares import stream_counts
from hestia_tune.data.token_shards import TokenShards, verify_token_shards, write_token_shards


class Wide(Bytes):
    """Ids that need 4 bytes."""

    vocab_size = 100_000

    def encode(self, text, add_bos, add_eos):
        return [byte + 70_000 for byte in text.encode()]


def cached(folder):
    return {"source": "token_shards", "data_files": str(folder)}


@pytest.mark.parametrize("kind", ["parquet", "json", "json.gz"])
@pytest.mark.parametrize("shuffle_buffer", [0, 9])
@pytest.mark.parametrize("world_size", [1, 3])
def test_batches_equal_those_of_the_text(tmp_path, kind, shuffle_buffer, world_size):
    texts = make_texts(120, longest=90) + [""]
    arguments = write_files(tmp_path / "d", [texts[:30], texts[30:]], kind)
    index = write_token_shards(Bytes(), tmp_path / "t", shard_tokens=500, **arguments)
    assert len(index["shards"]) > 5 and index["num_documents"] == 121
    assert index["num_tokens"] == sum(len(text.encode()) + 1 for text in texts)
    assert verify_token_shards(tmp_path / "t") == index["num_tokens"]
    more = {"shuffle_buffer": shuffle_buffer, "epochs": None, "max_tokens": 400 * 16, "seed": 5}
    for rank in range(world_size):
        more |= {"rank": rank, "world_size": world_size}
        text, tokens = stream(arguments, **more), stream(cached(tmp_path / "t"), **more)
        assert text.num_sequences == tokens.num_sequences == 400 // world_size
        assert tokens_of(tokens) == tokens_of(text)


def test_loader_resumes_from_shards(tmp_path):
    arguments = write_files(tmp_path / "d", [make_texts(100)], "json")
    write_token_shards(Bytes(), tmp_path / "t", shard_tokens=300, **arguments)
    more = {"max_tokens": 16 * 80, "epochs": None, "shuffle_buffer": 7}

    def loader():
        dataset = stream(cached(tmp_path / "t"), **more)
        return StatefulDataLoader(dataset, batch_size=4, num_workers=2, collate_fn=tokens_of)

    whole = loader()
    batches = []
    for batch in whole:
        batches.append(batch)
        if len(batches) == 7:
            state = whole.state_dict()
    resumed = loader()
    resumed.load_state_dict(state)
    assert list(resumed) == batches[7:] and len(batches) == 20


def test_epochs_end_together_on_all_ranks(tmp_path):
    arguments = write_files(tmp_path / "d", [make_texts(50)], "json")
    index = write_token_shards(Bytes(), tmp_path / "t", **arguments)
    for rank in range(3):
        dataset = stream(cached(tmp_path / "t"), epochs=2, rank=rank, world_size=3)
        assert len(list(dataset)) == dataset.num_sequences == 2 * index["num_tokens"] // 16 // 3


@pytest.mark.parametrize("tokenizer", [Bytes, Wide])
def test_ids_take_as_few_bytes_as_the_vocabulary_allows(tmp_path, tokenizer):
    arguments = write_files(tmp_path / "d", [["ab", "c"]], "text")
    write_token_shards(tokenizer(), tmp_path / "t", **arguments)
    dtype = np.uint16 if tokenizer is Bytes else np.uint32
    found = np.fromfile(tmp_path / "t" / "tokens_00000.bin", dtype).tolist()
    assert found == sum((tokenizer().encode(text, False, False) for text in ("ab", "c")), [])


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_writing_goes_on_after_a_kill(tmp_path, monkeypatch, kind):
    texts = make_texts(90)
    arguments = write_files(tmp_path / "d", [texts[:40], texts[40:]], kind)
    whole = write_token_shards(Bytes(), tmp_path / "whole", shard_tokens=300, **arguments)

    class Killed(BaseException):
        pass

    add, finish = token_shards._ShardWriter.add, token_shards._ShardWriter.finish
    calls = itertools.count(1)

    def deadly_add(self, *args):
        if next(calls) % 37 == 0:
            raise Killed
        add(self, *args)

    def deadly_finish(self):
        # Killed between the renaming of a shard and its entry in the index.
        if len(self.index["shards"]) == 4 and next(calls) % 2:
            monkeypatch.setattr(token_shards, "write_atomically", die)
        finish(self)

    def die(*args):
        monkeypatch.undo()
        monkeypatch.setattr(token_shards._ShardWriter, "add", deadly_add)
        raise Killed

    monkeypatch.setattr(token_shards._ShardWriter, "add", deadly_add)
    monkeypatch.setattr(token_shards._ShardWriter, "finish", deadly_finish)
    kills = 0
    while True:
        try:
            found = write_token_shards(Bytes(), tmp_path / "t", shard_tokens=300, **arguments)
            break
        except Killed:
            kills += 1
            if (tmp_path / "t" / "index.json").is_file():
                with pytest.raises(ValueError, match="is not complete"):
                    TokenShards(tmp_path / "t", Bytes())
    assert kills >= 2
    assert found == whole == json.loads((tmp_path / "t" / "index.json").read_text())
    assert sorted(p.name for p in (tmp_path / "t").iterdir()) == sorted(
        p.name for p in (tmp_path / "whole").iterdir()
    )
    verify_token_shards(tmp_path / "t")


def test_max_tokens_takes_the_first_documents_of_the_seeded_order(tmp_path):
    texts = make_texts(90)
    arguments = write_files(tmp_path / "d", [texts[i::5] for i in range(5)], "json")
    index = write_token_shards(Bytes(), tmp_path / "t", seed=3, max_tokens=600, **arguments)
    assert 600 <= index["num_tokens"] < 700
    # Files in the order of seed 3's first epoch, documents in order: what a block of one gives.
    text = tokens_of(stream(arguments, seed=3, shuffle_buffer=1))
    tokens = tokens_of(stream(cached(tmp_path / "t"), shuffle_buffer=0))
    assert tokens == text[: len(tokens)] and len(tokens) == index["num_tokens"] // 16


def test_skipped_rows_are_counted_to_the_last(tmp_path):
    write(tmp_path / "a.jsonl", make_texts(20), "json")
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write("{broken\n[1]\n")
    arguments = {"source": "json", "data_files": str(tmp_path / "a.jsonl"), "skip_bad_rows": True}
    index = write_token_shards(Bytes(), tmp_path / "t", **arguments)
    assert (index["skipped_rows"], index["num_documents"]) == (2, 20)
    dataset = stream(arguments)
    assert tokens_of(stream(cached(tmp_path / "t"))) == tokens_of(dataset)
    assert stream_counts(dataset.state_dict())["skipped_rows"] == 2


def test_damage_and_misuse(tmp_path):
    arguments = write_files(tmp_path / "d", [make_texts(30)], "json")
    folder = tmp_path / "t"
    with pytest.raises(ValueError, match="index.json is missing"):
        stream(cached(folder))
    write_token_shards(Bytes(), folder, shard_tokens=200, **arguments)
    with pytest.raises(ValueError, match="made with another tokenizer"):
        TokenShards(folder, Wide())
    with pytest.raises(ValueError, match="made otherwise .seed differ"):
        write_token_shards(Bytes(), folder, seed=1, **arguments)
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        write_token_shards(Bytes(), folder, max_tokens=0, **arguments)
    damaged = folder / "tokens_00001.bin"
    data = damaged.read_bytes()
    damaged.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(ValueError, match="tokens_00001.bin differs from its checksum"):
        verify_token_shards(folder)
    damaged.write_bytes(data[:-1])
    with pytest.raises(ValueError, match="tokens_00001.bin does not have its"):
        TokenShards(folder, Bytes())
    (folder / "index.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        TokenShards(folder, Bytes())
    with pytest.raises(ValueError, match="needs its folder as data_files"):
        stream({"source": "token_shards", "data_files": None})
