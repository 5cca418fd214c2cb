"""Which samples a rank takes, so that a position is one number for all ranks.

torch's sampler gives the same order, but can begin only at its start, and torchdata's remembers a
place of each rank, which means nothing to another number of ranks.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler


@dataclass(eq=False)
class PositionSampler(Sampler[int]):
    """Indices of this rank from a position on, in an order that depends on no number of ranks.

    Rank r of R takes positions r, r + R, r + 2R, ...: so R ranks take the same samples in one step
    as one rank with R times the batch. Position p is in pass p // num_samples over the data.

    Args:
        num_samples: of the dataset.
        length: positions of all ranks in an epoch, those left out that are too few for each rank
            to have one; None has no end.
        rank, world_size: of this process.
        seed, shuffle: each pass is permuted by ``seed + epoch + pass``, if at all.
        start: positions that all ranks together have taken already.
    """

    num_samples: int
    length: int | None
    rank: int
    world_size: int
    seed: int
    shuffle: bool = False
    start: int = 0
    epoch: int = 0

    def __iter__(self) -> Iterator[int]:
        end = sys.maxsize if self.length is None else self.length - self.length % self.world_size
        order, permuted = range(self.num_samples), None
        for position in range(self.start + self.rank, end, self.world_size):
            turn, index = divmod(position, self.num_samples)
            if self.shuffle and permuted != turn:
                generator = torch.Generator().manual_seed(self.seed + self.epoch + turn)
                order, permuted = torch.randperm(self.num_samples, generator=generator), turn
            yield int(order[index])
