"""Hidden states of all samples between two blocks, in bfloat16, in memory or in a mapped file.

Two streams go through the model: that of the pretrained blocks, and that of the blocks which are
hard already. A stream is kept at one place only and overwritten as it moves on, batch by batch, so
what each needs is a hidden state a token, 2·dim bytes.
"""

import functools
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hestia_tune.errors import InputError


class Stream:
    """Hidden states of this rank, by batches of fixed sequences.

    Args:
        shape: (batches, sequences, seq_len, dim).
        device: where batches are computed.
        folder: keeps them in a file there, which ends with the process; None is in memory.

    Attributes:
        block: number of the block that they go into.
    """

    block = 0

    def __init__(
        self,
        shape: tuple[int, ...],
        device: torch.device,
        folder: Path | None = None,
    ):
        self.device, dtype = device, torch.bfloat16
        if folder is None:
            self._states = torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
            return
        with tempfile.NamedTemporaryFile(dir=folder) as file:  # it lives on while it is mapped
            size = dtype.itemsize * math.prod(shape)
            try:  # a full disk is an error now, not a crash later
                getattr(os, "posix_fallocate", lambda *_: None)(file.fileno(), 0, size)
            except OSError as error:
                raise InputError(
                    f"{folder}: {size / 2**30:.2f} GiB of hidden states: {error.strerror}; make "
                    "room or raise reconstruct.memory"
                ) from error
            mapped = torch.from_file(file.name, shared=True, size=math.prod(shape), dtype=dtype)
        self._states = mapped.view(shape)

    def write(self, batch: int, states: torch.Tensor) -> None:
        """Keeps the states (sequences, seq_len, dim) of a batch, rounded to bfloat16."""
        self._states[batch].copy_(states.to(torch.bfloat16))  # rounded where they are

    def read(self, batch: int) -> torch.Tensor:
        """The states of a batch on the device, bfloat16; the copy may still be under way."""
        return self._states[batch].to(self.device, non_blocking=True)


@functools.cache
def _copies(device: torch.device) -> Any:
    """The CUDA stream of all copies to a device: what is allocated in one serves that one alone."""
    module = torch.get_device_module(device)  # torch.cpu's streams do nothing
    return module.Stream(device) if device.type == "cuda" else module.Stream()


def prefetched(order: list[int], *streams: Stream) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """(batch, its states in each stream, float32) in order.

    The next batch is copied while one is computed, if it comes from memory (what is mapped is not
    pinned): on CUDA in a stream of its own, which first waits until what it copied before has been
    read, so that two batches stand on the device at most.
    """
    device = streams[0].device
    module, copies = torch.get_device_module(device), _copies(device)

    def fetch(batch: int) -> tuple[int, list[torch.Tensor]]:
        copies.wait_stream(module.current_stream(device))
        with module.stream(copies):
            return batch, [stream.read(batch) for stream in streams]

    fetched = map(fetch, order)
    ahead = next(fetched, None)
    while ahead is not None:
        batch, states = ahead
        module.current_stream(device).wait_stream(copies)
        # A copy, of the CPU's too: what is kept may be overwritten before it has been used.
        ready = [state.float() for state in states]
        ahead = next(fetched, None)
        yield batch, ready
