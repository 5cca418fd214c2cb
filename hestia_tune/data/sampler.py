"""Which samples a rank takes, so that a position is one number for all ranks.

torch's sampler gives the same order, but can begin only at its start, and torchdata's remembers a
place of each rank, which means nothing to another number of ranks.
"""

import sys
from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class PositionSampler(Sampler[int]):
    """Indices of this rank from a position on, in an order that depends on no number of ranks.

    Rank r of R takes positions r, r + R, r + 2R, ...: so R ranks take the same samples in one step
    as one rank with R times the batch. Position p is in pass p // num_samples over the data.

    Args:
        num_samples: of the dataset.
        length: positions of all ranks in an epoch, those left out that are too few for each rank
            to have one; None has no end.
        shuffle: permutes each pass by ``seed + epoch + pass``.

    Attributes:
        start: positions that all ranks together have taken already.
        epoch: of the permutation.
    """

    def __init__(
        self,
        num_samples: int,
        length: int | None,
        *,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool = False,
    ):
        self.num_samples, self.length = num_samples, length
        self.rank, self.world_size = rank, world_size
        self.seed, self.shuffle = seed, shuffle
        self.start = self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        end = sys.maxsize if self.length is None else len(self) * self.world_size
        order, permuted = range(self.num_samples), None
        for position in range(self.start + self.rank, end, self.world_size):
            turn, index = divmod(position, self.num_samples)
            if self.shuffle and permuted != turn:
                generator = torch.Generator().manual_seed(self.seed + self.epoch + turn)
                order, permuted = torch.randperm(self.num_samples, generator=generator), turn
            yield int(order[index])

    def __len__(self) -> int:
        """Samples of this rank in an epoch."""
        return self.length // self.world_size
