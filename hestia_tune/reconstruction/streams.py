"""Hidden states of all samples between two blocks, in bfloat16, in memory or in a mapped file.

Two streams go through the model: that of the pretrained blocks, and that of the blocks which are
hard already. A stream is kept at one place only and overwritten as it moves on, batch by batch, so
what is needed is two hidden states a token, 4·dim bytes.
"""

import logging
import math
from collections.abc import Iterator
from pathlib import Path

import torch

log = logging.getLogger(__name__)


class Stream:
    """Hidden states (num_sequences, seq_len, dim) of this rank, by batches of fixed sequences.

    Args:
        shape: of all.
        batch_size: sequences of this rank in a batch; divides num_sequences.
        device: where batches are computed.
        file: where to keep them; None is in memory.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        batch_size: int,
        device: torch.device,
        file: Path | None = None,
    ):
        self.batch_size, self._device = batch_size, device
        if file is None:
            pinned = device.type == "cuda"
            self._states = torch.empty(shape, dtype=torch.bfloat16, pin_memory=pinned)
        else:
            count = shape[0] * shape[1] * shape[2]
            mapped = torch.from_file(str(file), shared=True, size=count, dtype=torch.bfloat16)
            self._states = mapped.view(shape)

    def write(self, batch: int, states: torch.Tensor) -> None:
        """Keeps the states (batch_size, seq_len, dim) of a batch, rounded to bfloat16."""
        self._states[batch * self.batch_size :][: self.batch_size].copy_(states)

    def read(self, batch: int) -> torch.Tensor:
        """The states of a batch on the device, float32; the copy may still be under way."""
        states = self._states[batch * self.batch_size :][: self.batch_size]
        return states.to(self._device, non_blocking=True).float()


def make_streams(
    shape: tuple[int, int, int],
    batch_size: int,
    *,
    device: torch.device,
    limit: float,
    folder: Path,
    rank: int,
) -> tuple[Stream, Stream]:
    """Both streams: in memory, or, beyond ``limit`` GiB, in files of ``folder`` without a name."""
    need = 2 * 2 * math.prod(shape) / 2**30
    names = [folder / f"stream_{k}_{rank}.tmp" if need > limit else None for k in range(2)]
    full, hard = (Stream(shape, batch_size, device, file) for file in names)
    for file in filter(None, names):
        file.unlink()  # it lives on while it is mapped
    log.info(f"hidden states: {need:.2f} GiB, in {'files' if need > limit else 'memory'}")
    return full, hard


def prefetched(order: list[int], *streams: Stream) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """(batch, its states in each stream) in order; the next is fetched while one is computed."""
    ready = None
    for batch in [*order, None]:
        fetched = None
        if batch is not None:
            fetched = batch, [stream.read(batch) for stream in streams]
        if ready is not None:
            yield ready
        ready = fetched
