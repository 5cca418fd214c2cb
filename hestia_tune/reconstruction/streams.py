"""Hidden states of all samples between two blocks, in bfloat16, in memory or in a mapped file.

Two streams go through the model: one through the pretrained blocks, and one through the hard
blocks. Only the current hidden states of a stream are kept. They are overwritten, batch by batch,
as the stream moves on. So each stream needs one hidden state per token, 2·dim bytes.
"""

import functools
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from hestia_tune.errors import InputError

# Limit, in GiB per rank, for hidden states in memory. If they need more, they go to a file.
MEMORY_GIB = 8.0


def pieces(count: int, size: int) -> list[int]:
    """Divide batches among buffers of pinned memory, so that little memory is lost.

    torch rounds the size of pinned memory up to a power of two. For 2400 sequences of 1024 tokens
    and 1152 numbers (5.7 GB) that would be 8.6 GB.

    Args:
        count: Number of batches.
        size: Bytes of a batch.

    Returns:
        The number of batches in each buffer.
    """

    def divided(each: int) -> list[int]:
        return [each] * (count // each) + [count % each] * bool(count % each)

    def rounded(counts: list[int]) -> int:
        return sum(2 ** (number * size - 1).bit_length() for number in counts)

    return min(map(divided, range(count, 0, -1)), key=rounded)


class Stream:
    """Hidden states of this rank, by batches of fixed sequences.

    Args:
        shape: The shape (batches, sequences, seq_len, dim).
        device: The device that computes the batches.
        folder: Folder for a file that holds the states and vanishes with the process. None: the
            states are in memory.

    Attributes:
        block: Number of the block that the states are the input of.

    Raises:
        InputError: If the disk has no room for the file.
    """

    block = 0

    def __init__(self, shape: tuple[int, ...], device: torch.device, folder: Path | None = None):
        self.device, dtype, is_pinned = device, torch.bfloat16, device.type == "cuda"
        if folder is None:
            counts = (
                pieces(shape[0], dtype.itemsize * math.prod(shape[1:])) if is_pinned else shape[:1]
            )
            options = {"dtype": dtype, "pin_memory": is_pinned}
            parts = (torch.empty(count, *shape[1:], **options) for count in counts)
            self._states = [states for part in parts for states in part]
            return
        with tempfile.NamedTemporaryFile(dir=folder) as file:  # It stays while it is mapped.
            size = dtype.itemsize * math.prod(shape)
            try:  # A full disk must be an error now, not a crash later.
                getattr(os, "posix_fallocate", lambda *_: None)(file.fileno(), 0, size)
            except OSError as error:
                raise InputError(
                    f"{folder} cannot hold {size / 2**30:.2f} GiB of hidden states: "
                    f"{error.strerror}; make room, or lower reconstruct.num_samples"
                ) from error
            mapped = torch.from_file(file.name, shared=True, size=math.prod(shape), dtype=dtype)
        self._states = [*mapped.view(shape)]

    def write(self, batch: int, states: torch.Tensor) -> None:
        """Keep the states (sequences, seq_len, dim) of a batch, rounded to bfloat16."""
        self._states[batch].copy_(states.to(torch.bfloat16))  # Rounded on their own device.

    def read(self, batch: int) -> torch.Tensor:
        """Return the states of a batch on the device, in bfloat16; the copy may not be complete."""
        return self._states[batch].to(self.device, non_blocking=True)


@functools.cache
def _copies(device: torch.device) -> Any:
    """Return the CUDA stream of all copies to a device; memory of a stream serves only that one."""
    module = torch.get_device_module(device)  # The streams of torch.cpu do nothing.
    return module.Stream(device) if device.type == "cuda" else module.Stream()


def prefetched(order: Iterable[int], *streams: Stream) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yield batches of one or several streams, and copy the next batch meanwhile.

    The copy runs beside the computation if the states are in memory. (A mapped file is not pinned.)
    On CUDA the copies have their own CUDA stream. It first waits until the batch before has been
    read. So at most two batches are on the device.

    Args:
        order: Numbers of the batches.
        streams: The streams to read.

    Yields:
        The number of a batch, and its states in each stream, in float32.
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
        batch = ahead[0]
        module.current_stream(device).wait_stream(copies)
        # This is a copy on the CPU too, because the stream may be overwritten before it is used.
        ready = [state.float() for state in ahead[1]]
        ahead = next(fetched, None)
        yield batch, ready
