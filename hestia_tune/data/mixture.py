"""Several datasets as one stream, each with a weight: its share of the sequences.

Sequence k of a share comes from the member in whose part of [0, 1) the number u + k·φ falls, modulo
1, where φ is the golden ratio and u follows from the seed. Such numbers fill [0, 1) evenly. So
every batch has the members in proportion, up to a sequence or so, where random draws would let a
quarter of chats become none in one step and half in the next. The number k gives the member, so a
saved place is k and the places of the members.

Members may be streams, or datasets with a length, which are then read in a seeded order, pass by
pass. Each member begins again when it ends.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from hestia_tune.data.sequences import PositionSampler
from hestia_tune.data.stream import Stream
from hestia_tune.errors import InputError

_GOLDEN = (math.sqrt(5) - 1) / 2


class IndexedStream(Stream):
    """Read a dataset with a length as a stream without an end, in a seeded order.

    Args:
        dataset: The dataset. A tokenized set has a seed and an order of its own.
        seed: Seed of the order. Each pass is permuted.
        shuffle: Whether to permute the passes.
    """

    def __init__(self, dataset: Any, seed: int = 0, shuffle: bool = True):
        super().__init__()
        self.dataset = dataset
        order = getattr(dataset, "order", {})
        self._seed, self._shuffle = order.get("seed", seed), order.get("shuffle", shuffle)
        self._given = self._following = 0

    def reseed(self, seed: int) -> None:
        self._seed = seed

    def avoid_seed(self, seed: int) -> None:
        self._seed += self._seed == seed

    def identity(self) -> list:
        return [len(self.dataset), self._seed, self._shuffle, *self._share()]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self._given, "stream": self.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._given = self._following = state["given"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._given, self._following = self._following, 0
        share, num_shares = self._share()
        sampler = PositionSampler(
            len(self.dataset),
            None,
            share,
            num_shares,
            self._seed,
            shuffle=self._shuffle,
            start=self._given * num_shares,
        )
        for index in sampler:
            self._given += 1
            yield self.dataset[index]


@dataclass(frozen=True)
class Part:
    """A member of a mixture, with its share of the sequences."""

    weight: float
    stream: Stream


class MixtureDataset(Stream):
    """Several streams as one, without an end, each with its share of the sequences.

    Args:
        datasets: The members: streams, or datasets with a length.
        weights: A positive number for each member. They need not add up to 1.
        seed: Seed of the order of the members, and of members without a seed of their own.

    Raises:
        InputError: If a member ends by an option of its own, or weights are not positive.
    """

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float], seed: int = 0):
        super().__init__()
        self._seed, total = seed, sum(weights)
        if not all(weight > 0 for weight in weights):
            raise InputError(f"weights must be positive; got {list(weights)}; leave a member out")
        for data in datasets:
            limits = getattr(data, "config", None)
            for key in ("max_tokens", "epochs") if isinstance(data, Stream) else ("max_tokens",):
                if (value := getattr(limits, key, None)) is not None:
                    raise InputError(
                        f"a member of a mixture has no end, and {key} {value} would end it; leave "
                        f"{key} out of the sections of dataset, and set max_steps"
                    )
        streams = [
            data if isinstance(data, Stream) else IndexedStream(data, seed) for data in datasets
        ]
        self.parts = [
            Part(weight / total, stream) for weight, stream in zip(weights, streams, strict=True)
        ]
        self._given, self._following = 0, 0

    @property
    def seq_len(self) -> int:
        return max(_length_of(part.stream) for part in self.parts)

    def reseed(self, seed: int) -> None:
        self._seed = seed
        for part in self.parts:
            part.stream.reseed(seed)

    def avoid_seed(self, seed: int) -> None:
        self._seed += self._seed == seed
        for part in self.parts:
            part.stream.avoid_seed(seed)

    def identity(self) -> list:
        parts = [[part.weight, part.stream.identity()] for part in self._shared()]
        return [self._seed, *self._share(), *parts]

    def _shared(self) -> list[Part]:
        """The parts, which read the shares of this rank."""
        for part in self.parts:
            part.stream.rank, part.stream.world_size = self.rank, self.world_size
        return self.parts

    def state_dict(self) -> dict[str, Any]:
        places = [part.stream.state_dict() for part in self._shared()]
        return {"given": self._given, "parts": places, "stream": self.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._given = self._following = state["given"]
        for part, place in zip(self._shared(), state["parts"], strict=True):
            part.stream.load_state_dict(place)

    def member(self, number: int) -> int:
        """Return the index of the member that gives a sequence of this share."""
        share, num_shares = self._share()
        start = random.Random(f"mixture/{self._seed}/{share}/{num_shares}").random()
        place, end = (start + number * _GOLDEN) % 1.0, 0.0
        for index, part in enumerate(self.parts):
            end += part.weight
            if place < end:
                return index
        return len(self.parts) - 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._given, self._following = self._following, 0
        readers = [iter(part.stream) for part in self._shared()]
        while True:
            index = self.member(self._given)
            sample = next(readers[index])
            self._given += 1
            yield sample


def _length_of(stream: Stream) -> int:
    """Return the tokens of a sequence of a stream, or of the first sequence of a dataset."""
    if not isinstance(stream, IndexedStream):
        return stream.seq_len
    config = getattr(stream.dataset, "config", None)
    return getattr(config, "seq_len", None) or len(stream.dataset[0]["tokens"])
