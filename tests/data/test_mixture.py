"""Mixtures: shares of the members, order by the seed, exact resuming, ranks and workers."""

import itertools
import json
from collections import Counter

import pytest
import torch
from chat_folders import TURNS, make_chats, make_tokenizer_folder, write_chats
from streams import Bytes, make_texts, write_files
from torchdata.stateful_dataloader import StatefulDataLoader

from hestia_tune.data import (
    MixtureDataset,
    SequenceDataset,
    streaming_chat_dataset,
    streaming_text_dataset,
    write_token_shards,
)
from hestia_tune.models import HuggingFaceTokenizer
from hestia_tune.training.loader import collate_samples


class Numbers(torch.utils.data.Dataset):
    """Samples that say where they are from."""

    def __init__(self, name, count):
        self.name, self.count = name, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"tokens": [self.name, index], "labels": [self.name, index]}


def names(samples):
    return [sample["tokens"][0] for sample in samples]


@pytest.mark.parametrize("weights", [(3, 1), (0.75, 0.25), (0.1, 0.9), (1, 1, 1), (5,)])
@pytest.mark.parametrize("seed", [0, 7])
def test_members_have_their_share_in_every_part_of_the_stream(weights, seed):
    members = [Numbers(name, 10) for name in range(len(weights))]
    mixture = MixtureDataset(members, weights, seed)
    drawn = names(itertools.islice(mixture, 4000))
    for size in (40, 400, 4000):
        for start in range(0, 4000, size):
            counts = Counter(drawn[start : start + size])
            for name, weight in enumerate(weights):
                share = size * weight / sum(weights)
                assert abs(counts[name] - share) <= 3, (size, start, name)


def test_the_seed_and_the_rank_change_the_order():
    def drawn(seed, rank=0, ranks=1):
        mixture = MixtureDataset([Numbers(0, 10), Numbers(1, 10)], [0.6, 0.4], seed)
        mixture.rank, mixture.world_size = rank, ranks
        return [tuple(sample["tokens"]) for sample in itertools.islice(mixture, 50)]

    assert drawn(0) == drawn(0) != drawn(1)
    assert drawn(0, 0, 2) != drawn(0, 1, 2)


def test_ranks_read_every_sample_of_a_member_equally_often():
    counts = Counter()
    for rank in range(2):
        mixture = MixtureDataset([Numbers(0, 12), Numbers(1, 4)], [0.75, 0.25], 3)
        mixture.rank, mixture.world_size = rank, 2
        own = [tuple(s["tokens"]) for s in itertools.islice(mixture, 16 * 5)]
        counts.update(own)
    assert len(counts) == 16 and set(counts.values()) <= {9, 10, 11}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return HuggingFaceTokenizer(make_tokenizer_folder(tmp_path_factory.mktemp("t"), TURNS))


def listed(sample):
    return {key: torch.as_tensor(value).tolist() for key, value in sample.items()}


def make_mixture(folder, tokenizer, rank=0, world_size=1, seed=0, **chats):
    """Return a mixture of a stream of text, a stream of chats, a tokenized set and sequences."""
    text = write_files(folder / "text", [make_texts(40)], "json")
    rows = write_chats(folder / "a.jsonl", make_chats(30))
    write_token_shards(tokenizer, folder / "set", **text)
    members = [
        streaming_text_dataset(tokenizer, **text, seq_len=120, shuffle_buffer=9),
        streaming_chat_dataset(tokenizer, **rows, seq_len=120, shuffle_buffer=9, **chats),
        streaming_text_dataset(
            tokenizer, source="token_shards", data_files=str(folder / "set"), seq_len=120, seed=4
        ),
        SequenceDataset(range(1200), 120),
    ]
    mixture = MixtureDataset(members, [4, 3, 2, 1], seed)
    mixture.rank, mixture.world_size = rank, world_size
    return mixture


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2)])
def test_a_mixture_resumes_after_every_sequence(tmp_path, tokenizer, rank, world_size):
    mixture = make_mixture(tmp_path, tokenizer, rank, world_size)
    states, expected = [mixture.state_dict()], []
    for sample in itertools.islice(mixture, 100):
        expected.append(listed(sample))
        states.append(json.loads(json.dumps(mixture.state_dict())))
    assert sum("seq_lens" in sample for sample in expected) in range(27, 34)
    resumed = make_mixture(tmp_path, tokenizer, rank, world_size)
    for step in range(0, 90, 11):
        resumed.load_state_dict(states[step])
        found = [listed(sample) for sample in itertools.islice(resumed, 10)]
        assert found == expected[step : step + 10]
    for other in (
        make_mixture(tmp_path, tokenizer, rank, world_size, seed=1),
        make_mixture(tmp_path, tokenizer, 0, 3),
    ):
        with pytest.raises(ValueError, match="the saved place is from another stream"):
            other.load_state_dict(states[5])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_loader_of_a_mixture_resumes(tmp_path, tokenizer, num_workers):
    def loader():
        mixture = make_mixture(tmp_path, tokenizer, 1, 2)
        mixture.batch_size = 4
        return StatefulDataLoader(
            mixture,
            4,
            num_workers=num_workers,
            collate_fn=lambda samples: collate_samples(samples, 2),
        )

    whole, batches, states = loader(), [], []
    for batch in itertools.islice(whole, 12):
        batches.append(batch)
        states.append(whole.state_dict())
    for stop in (0, 5, 8):
        resumed = loader()
        resumed.load_state_dict(states[stop])
        for batch, other in zip(itertools.islice(resumed, 3), batches[stop + 1 :], strict=False):
            assert {key: value.tolist() for key, value in batch.items()} == {
                key: value.tolist() for key, value in other.items()
            }


def test_a_batch_of_texts_and_packed_chats_has_masks_for_all(tmp_path, tokenizer):
    mixture = make_mixture(tmp_path, tokenizer)
    samples = list(itertools.islice(mixture, 12))
    batch = collate_samples(samples, 2)
    assert batch["tokens"].shape == batch["input_pos"].shape == (12, 120)
    causal = torch.ones(120, 120, dtype=torch.bool).tril()
    for row, sample in enumerate(samples):
        if "seq_lens" not in sample:  # a text is one document
            assert torch.equal(batch["mask"][row], causal)
            assert batch["input_pos"][row].tolist() == list(range(120))


def test_unpacked_chats_are_padded_beside_texts(tmp_path, tokenizer):
    mixture = make_mixture(tmp_path, tokenizer, packed=False)
    samples = list(itertools.islice(mixture, 12))
    batch = collate_samples(samples, 2)
    assert batch["tokens"].shape == (12, 120) and set(batch) == {"tokens", "labels"}
    for row, sample in enumerate(samples):
        assert (batch["labels"][row, len(sample["tokens"]) :] == -100).all()


def test_members_have_no_end(tmp_path):
    text = write_files(tmp_path / "text", [make_texts(40)], "json") | {"seq_len": 16}
    for option in ({"max_tokens": 100}, {"epochs": 2}):
        stream = streaming_text_dataset(Bytes(), **text, **option)
        with pytest.raises(ValueError, match=f"{next(iter(option))} .* would end it; leave"):
            MixtureDataset([stream], [1])
    with pytest.raises(ValueError, match="weights must be positive"):
        MixtureDataset([Numbers(0, 3)], [-1])
