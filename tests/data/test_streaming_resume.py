"""Stopped anywhere and resumed, a stream gives what it would have given."""

import io
import itertools
import pickle
import random
import tracemalloc
from collections import Counter

import pytest
from streams import KINDS, documents_in, make_texts, stream, tokens_of, write, write_files
from torchdata.stateful_dataloader import StatefulDataLoader

from hestia_tune.data import readers, sources
from hestia_tune.data.shares import find_places, stream_counts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle_buffer", [0, 12])
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 2), (1, 2)])
def test_dataset_resumes_after_every_sequence(tmp_path, kind, shuffle_buffer, rank, world_size):
    # Some documents are longer than a sequence; two and a half epochs.
    texts = make_texts(45, longest=90)
    arguments = write_files(tmp_path / "d", [texts[:5], texts[5:]], kind) | {
        "shuffle_buffer": shuffle_buffer,
        "epochs": None,
        "max_tokens": 300 * 16,
        "rank": rank,
        "world_size": world_size,
    }
    dataset = stream(arguments)
    states, expected = [dataset.state_dict()], []
    for item in dataset:
        expected.extend(tokens_of([item]))
        states.append(pickle.loads(pickle.dumps(dataset.state_dict())))
    assert len(expected) == 300 // world_size and stream_counts(states[-1])["epoch"] >= 1
    resumed = stream(arguments)
    for step in range(0, len(states), 1 if kind == "json" else 13):
        resumed.load_state_dict(states[step])
        assert resumed.state_dict() == states[step]
        assert tokens_of(itertools.islice(resumed, 8)) == expected[step : step + 8]
    assert len(pickle.dumps(states[-1])) < 1000


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_loader_resumes(tmp_path, num_workers, rank):
    texts = make_texts(60, longest=90)
    arguments = write_files(tmp_path / "d", [texts], "json") | {
        "shuffle_buffer": 9,
        "epochs": None,
        "max_tokens": 2 * 16 * 60,
        "batch_size": 3,
        "rank": rank,
        "world_size": 2,
    }

    def loader():
        return StatefulDataLoader(
            stream(arguments), batch_size=3, num_workers=num_workers, collate_fn=tokens_of
        )

    whole = loader()
    batches, states = [], []
    for batch in whole:
        batches.append(batch)
        states.append(whole.state_dict())
    assert len(batches) == 20
    for stop in (0, 4, 7, 18):
        resumed = loader()
        resumed.load_state_dict(states[stop])
        assert list(resumed) == batches[stop + 1 :]
        assert len(list(find_places(states[stop]))) == max(num_workers, 1)


class Counted(io.FileIO):
    """A file that counts the bytes read from it."""

    total = 0

    def read(self, *args):
        data = super().read(*args)
        Counted.total += len(data)
        return data

    def readinto(self, buffer):
        count = super().readinto(buffer)
        Counted.total += count
        return count


@pytest.mark.parametrize("kind", ["parquet", "json", "text"])
def test_resume_reads_one_block_not_the_file(tmp_path, monkeypatch, kind):
    folder = tmp_path / "d"
    folder.mkdir()
    rng = random.Random(0)
    texts = [f"{n}:{rng.randbytes(400).hex()}" for n in range(4000)]
    write(folder / "a", texts, kind, row_group_size=50)
    arguments = {"source": kind, "data_files": str(folder / "a"), "shuffle_buffer": 20}
    dataset = stream(arguments, seq_len=256)
    items = iter(dataset)
    for _ in range(11_000):
        last = next(items)
    state, following = dataset.state_dict(), next(items)
    rows = []
    document = sources.TextSource._document
    monkeypatch.setattr(
        sources.TextSource, "_document", lambda *args: rows.append(1) or document(*args)
    )
    monkeypatch.setattr(readers, "_BUFFER", 1 << 14)
    resumed = stream(arguments, seq_len=256)
    resumed.load_state_dict(state)
    rows.clear()
    Counted.total = 0
    monkeypatch.setattr(readers, "open_binary", Counted)
    assert next(iter(resumed)) == following != last
    assert len(rows) == 20
    assert 0 < Counted.total < (folder / "a").stat().st_size / 10


def test_memory_does_not_grow_with_tokens(tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    write(folder / "a", ["x" * 2000] * 2000, "json")
    arguments = {"source": "json", "data_files": str(folder / "a"), "shuffle_buffer": 20}

    def peak(tokens):
        dataset = stream(arguments, seq_len=256, epochs=None, max_tokens=tokens)
        tracemalloc.start()
        assert sum(1 for _ in dataset) == tokens // 256
        try:
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(100_000)
    assert peak(1_000_000) < 1.05 * peak(100_000)


def test_state_after_the_end_stays_at_the_end(tmp_path):
    arguments = write_files(tmp_path / "d", [make_texts(20)], "text")
    dataset = stream(arguments, epochs=2)
    assert len(list(dataset)) > 0
    state = dataset.state_dict()
    assert state["dropped_tokens"] > 0
    again = stream(arguments, epochs=2)
    again.load_state_dict(state)
    assert list(again) == []
    assert stream_counts(again.state_dict()) == stream_counts(state)


@pytest.mark.parametrize("kind", ["parquet", "json", "json.gz"])
@pytest.mark.parametrize(("old", "new"), [(1, 2), (2, 1), (4, 3), (3, 8), (2, 2)])
def test_other_number_of_shares_sees_every_document(tmp_path, kind, old, new):
    buffer, texts = 6, make_texts(300, longest=10)
    arguments = write_files(tmp_path / "d", [texts[i::3] for i in range(3)], kind)
    seen = Counter()

    def run(shares, states, stop):
        after = []
        for rank in range(shares):
            dataset = stream(
                arguments, seq_len=1, shuffle_buffer=buffer, rank=rank, world_size=shares
            )
            if states:
                dataset.load_shares(*states)
            # Uneven stops, as if loaders had been ahead of one another.
            items = itertools.islice(dataset, None if stop is None else stop * (rank + 1))
            seen.update(documents_in(tokens_of(items)))
            after.append(dataset.state_dict())
        return after

    states = run(old, None, 150)
    states = run(new, states, 60)
    states = run(old, states, None)
    assert set(seen) == set(range(300))
    doubled = sum(seen.values()) - 300
    # Per old share one block; a document that was cut in two is not counted by documents_in.
    assert 0 <= doubled <= buffer * (old + new)
    assert stream_counts(states)["epoch"] == 1


def test_sequences_are_counted_on_over_a_change_of_shares(tmp_path):
    arguments = write_files(tmp_path / "d", [make_texts(200)], "json") | {
        "epochs": None,
        "max_tokens": 16 * 100,
        "shuffle_buffer": 4,
    }
    states = []
    for rank in range(2):
        dataset = stream(arguments, rank=rank, world_size=2)
        assert dataset.num_sequences == 50
        list(itertools.islice(dataset, 20))
        states.append(dataset.state_dict())
    one = stream(arguments)
    one.load_shares(*states)
    assert one.num_sequences == 60
    loader = StatefulDataLoader(one, batch_size=2, num_workers=2, collate_fn=tokens_of)
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) == 11:
            state = loader.state_dict()
    assert sum(map(len, batches)) == 60
    assert stream_counts(loader.state_dict())["sequences"] == 100
    # What was dealt is resumed exactly by a loader that knows nothing of the change.
    resumed = StatefulDataLoader(
        stream(arguments), batch_size=2, num_workers=2, collate_fn=tokens_of
    )
    resumed.load_state_dict(state)
    assert list(resumed) == batches[11:]


def test_wrong_states(tmp_path):
    arguments = write_files(tmp_path / "d", [make_texts(40)], "json")
    state = stream(arguments, rank=0, world_size=2).state_dict()
    with pytest.raises(ValueError, match="files, column, seed or shuffle_buffer have changed"):
        stream(arguments, seed=1).load_state_dict(state)
    other = write_files(tmp_path / "e", [make_texts(40), make_texts(3)], "json")
    with pytest.raises(ValueError, match="have changed"):
        stream(other).load_state_dict(state)
    dataset = stream(arguments)
    dataset.load_state_dict(state)
    with pytest.raises(ValueError, match="share 0 of 2 .* use load_shares"):
        iter(dataset)
    with pytest.raises(ValueError, match="had 2 shares"):
        stream(arguments).load_shares(state)
    with pytest.raises(ValueError, match="no place of a stream"):
        stream(arguments).load_shares({"a": 1})
