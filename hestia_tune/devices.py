"""The device and the dtype of a process, and what lies on a device."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hestia_tune.errors import InputError

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def get_device(name: str) -> torch.device:
    """Return this process's device, and make a GPU the current one.

    Args:
        name: "cpu", or "cuda" for the GPU with the number of this process on its node, or a single
            GPU such as "cuda:1" for a run of one process.

    Raises:
        InputError: If there is no such device here.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"device {name}: torch knows no such device; use cuda or cpu") from error
    local_rank = os.environ.get("LOCAL_RANK")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(
                f"device {name}: torch finds no GPU here; set device=auto or device=cpu"
            )
        own = int(local_rank or 0)
        index = own if device.index is None else device.index
        if local_rank is not None and index != own:
            raise InputError(
                f"device {name}: torchrun gives each process its own GPU; set device=cuda"
            )
        count = torch.cuda.device_count()
        if index >= count:
            raise InputError(
                f"device {name}: process {own} of this node has no GPU, because there are {count}; "
                f"start at most {count} processes per node"
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    try:
        torch.empty(0, device=device)
    except RuntimeError as error:
        raise InputError(f"device {name} is not available here; use cuda or cpu") from error
    return device


def get_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype that a config names.

    Args:
        name: "bf16" or "fp32".
        device: The device that computes with it.

    Raises:
        InputError: If the name is another, or if the GPU has no bfloat16.
    """
    if name not in _DTYPES:
        raise InputError(f"dtype must be one of {', '.join(_DTYPES)}; got {name}")
    if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise InputError("dtype=bf16: this GPU has no bfloat16; set dtype=fp32")
    return _DTYPES[name]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let new tensors have a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def compile_backend() -> str:
    """Return the backend of torch.compile: the variable TORCH_COMPILE_BACKEND, or Inductor."""
    return os.environ.get("TORCH_COMPILE_BACKEND", "inductor")


def move_batch(batch: dict[str, Any], device: torch.device) -> None:
    """Move the tensors of a batch to a device, in place.

    Args:
        batch: Name -> tensor, or a mapping of such.
        device: The device. The host does not wait for copies to a GPU.
    """
    for key, value in batch.items():
        if isinstance(value, dict):
            move_batch(value, device)
        elif device.type == "cuda" and isinstance(value, torch.Tensor) and not value.is_cuda:
            batch[key] = value.pin_memory().to(device, non_blocking=True)
        else:  # a tensor, or a mask of flex attention
            batch[key] = value.to(device)


def peak_memory(device: torch.device) -> dict[str, float]:
    """Return the peaks of a GPU's memory in GiB since the last call, and begin anew."""
    peaks = {
        "peak_memory_active": torch.cuda.memory_stats(device).get("active_bytes.all.peak", 0),
        "peak_memory_alloc": torch.cuda.max_memory_allocated(device),
        "peak_memory_reserved": torch.cuda.max_memory_reserved(device),
    }
    torch.cuda.reset_peak_memory_stats(device)
    return {name: value / 2**30 for name, value in peaks.items()}
