"""Exchange the rows of shards, for a method that pairs row i with row i + n/2 (Fairy2i).

FSDP2 gives a rank consecutive rows. The method needs both rows of a pair. The exchange is an
all-to-all of the shard, after which every rank holds whole pairs. It sends 4 bytes a weight there
and 2 back in a refresh, 8 there and 4 back in a pull-back, divided by the ranks.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class PairedRows:
    """Exchanges this rank's rows of a sharded tensor for whole pairs of rows, and back.

    Args:
        num_rows: The number of rows of the whole tensor.
        group: The ranks that share it.
    """

    def __init__(self, num_rows: int, group: dist.ProcessGroup):
        self._num_rows, self._group = num_rows, group
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)

    def to_pairs(self, rows: Tensor) -> Tensor:
        """Return (2k, m) for the held rows: the upper rows of k pairs, then their lower rows."""
        begin, _ = self._bounds(self._num_rows, self._rank)
        upper = max(0, self._num_rows // 2 - begin)
        return self._exchange(rows.tensor_split([upper]), to_pairs=True)

    def from_pairs(self, pairs: Tensor) -> Tensor:
        """Return the held rows for the pairs; undo `to_pairs`."""
        return self._exchange(pairs.tensor_split(2), to_pairs=False)

    def _bounds(self, num_rows: int, rank: int) -> tuple[int, int]:
        """Return begin and end of a rank's rows among ``num_rows``, as FSDP2 shards them."""
        each = -(-num_rows // self._size)
        return min(rank * each, num_rows), min((rank + 1) * each, num_rows)

    def _overlaps(self, rank: int, other: int) -> list[int]:
        """Return how many upper and how many lower rows ``rank`` holds and ``other`` pairs."""
        begin, end = self._bounds(self._num_rows, rank)
        first, last = self._bounds(self._num_rows // 2, other)
        offsets = 0, self._num_rows // 2
        return [len(range(max(begin, first + o), min(end, last + o))) for o in offsets]

    def _exchange(self, halves: Sequence[Tensor], *, to_pairs: bool) -> Tensor:
        """Exchange both halves by all-to-all, and return one below the other."""
        sent = [self._overlaps(self._rank, other) for other in range(self._size)]
        received = [self._overlaps(other, self._rank) for other in range(self._size)]
        if not to_pairs:
            sent, received = received, sent
        parts = []
        for half, rows in enumerate(halves):
            sizes = [[counts[half] for counts in each] for each in (received, sent)]
            parts.append(rows.new_empty((sum(sizes[0]), *rows.shape[1:])))
            dist.all_to_all_single(parts[-1], rows.contiguous(), *sizes, group=self._group)
        return torch.cat(parts)
