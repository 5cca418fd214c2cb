"""Which samples a rank takes, so that a position is one number for all ranks.

torch's sampler gives the same order, but can begin only at its start, and torchdata's remembers a
place of each rank, which means nothing to another number of ranks.
"""

from collections.abc import Iterator
from itertools import count

import torch
from torch.utils.data import Sampler


class PositionSampler(Sampler[int]):
    """Indices of this rank from a position on, in an order that depends on no number of ranks.

    Rank r of R takes positions r, r + R, r + 2R, ... of the order: so R ranks take the same
    samples in one step as one rank with R times the batch.

    Args:
        length: of the dataset; None has no end.
        shuffle: permutes each epoch by ``seed + epoch``.
        fill: repeats samples from the start until all ranks have as many; else some are left out.

    Attributes:
        start: positions that all ranks together have taken already.
        epoch: of the permutation.
    """

    def __init__(
        self,
        length: int | None,
        *,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool = False,
        fill: bool = False,
    ):
        self.length, self.rank, self.world_size = length, rank, world_size
        self.seed, self.shuffle, self.fill = seed, shuffle, fill
        self.start = self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.length is None:
            return count(self.start + self.rank, self.world_size)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = range(self.length)
        if self.shuffle:
            order = torch.randperm(self.length, generator=generator)
        positions = range(self.start + self.rank, len(self) * self.world_size, self.world_size)
        return (int(order[position % self.length]) for position in positions)

    def __len__(self) -> int:
        """Samples of this rank in an epoch."""
        return (self.length + (self.world_size - 1 if self.fill else 0)) // self.world_size
