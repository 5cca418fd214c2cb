"""A stream that is stopped anywhere and resumed gives the same sequences as without the stop."""

import itertools
import pickle
import random
import tracemalloc

import pytest
from datasets.packaged_modules.parquet.parquet import Parquet
from streams import KINDS, find_all, make_texts, stream, tokens_of, write, write_files
from torchdata.stateful_dataloader import StatefulDataLoader

from hestia_tune.data import stream as stream_module


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle_buffer", [0, 12])
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 2), (1, 2)])
def test_a_dataset_resumes_after_every_sequence(tmp_path, kind, shuffle_buffer, rank, world_size):
    # Some documents are longer than a sequence. The stream runs for two and a half epochs.
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
    assert len(expected) == 300 // world_size and states[-1]["epoch"] >= 1
    resumed = stream(arguments)
    for step in range(0, len(states), 1 if kind == "json" else 13):
        resumed.load_state_dict(states[step])
        assert resumed.state_dict() == states[step]
        assert tokens_of(itertools.islice(resumed, 8)) == expected[step : step + 8]
    assert len(pickle.dumps(states[-1])) < 1000


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_a_data_loader_resumes(tmp_path, num_workers, rank, kind):
    texts = make_texts(60, longest=90)
    arguments = write_files(tmp_path / "d", [texts], kind) | {
        "shuffle_buffer": 9,
        "epochs": None,
        "max_tokens": 2 * 16 * 60,
        "rank": rank,
        "world_size": 2,
    }

    def loader():
        dataset = stream(arguments)
        dataset.batch_size = 3
        return StatefulDataLoader(
            dataset, batch_size=3, num_workers=num_workers, collate_fn=tokens_of
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
        assert len(list(find_all(states[stop], "carry"))) == max(num_workers, 1)


@pytest.mark.parametrize("kind", ["parquet", "json", "text"])
def test_resuming_reads_no_more_than_one_block(tmp_path, monkeypatch, kind):
    """Check for parquet, too, that only the row group of the block is decoded."""
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
    resumed = stream(arguments, seq_len=256)
    resumed.load_state_dict(state)
    given, read = [], stream_module.row_blocks

    def count(*args):
        for block, row in read(*args):
            given.extend(block)
            yield block, row

    monkeypatch.setattr(stream_module, "row_blocks", count)
    decoded = []
    monkeypatch.setattr(
        Parquet, "_cast_table", lambda self, table: decoded.append(len(table)) or table
    )
    assert next(iter(resumed)) == following != last
    assert 20 <= len(given) <= 40  # The block; one more if its last sequence was given.
    assert sum(decoded) <= 100


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
    assert state["carry"] and state["epoch"] == 2
    again = stream(arguments, epochs=2)
    again.load_state_dict(state)
    assert list(again) == []
    assert again.state_dict() == state


def test_the_state_of_another_stream_is_refused(tmp_path):
    arguments = write_files(tmp_path / "d", [make_texts(40)], "json")
    state = stream(arguments, rank=0, world_size=2).state_dict()
    changed = "column, seq_len, seed, shuffle_buffer or the number of ranks or workers have changed"
    with pytest.raises(ValueError, match=changed):
        stream(arguments, seed=1).load_state_dict(state)
    other = write_files(tmp_path / "e", [make_texts(40), make_texts(3)], "json")
    with pytest.raises(ValueError, match="have changed"):
        stream(other).load_state_dict(state)
    with pytest.raises(ValueError, match="have changed; .* or use a tokenized set"):
        stream(arguments, rank=0, world_size=1).load_state_dict(state)
