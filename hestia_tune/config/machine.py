"""Values for the options that a config leaves at ``auto``: what fits the machine of this process.

A config with ``auto`` is the same file on a laptop and on a node of GPUs. `hestia_tune.config.run`
asks here once, when it reads the config, and everything else sees the values that were found. The
functions import torch when they are called, because printing the help must not wait for it.

A config may name a GPU that is not here, to check the run before it moves to its machine. The
values are then those of a GPU of today: bfloat16, and compiled code.
"""

import importlib.util
import inspect
import os
import pkgutil
import shutil
from typing import Any

AUTO = "auto"
# Processes that read data beside a GPU. The number decides the order of a stream's text, so it does
# not follow the number of cores.
_GPU_WORKERS = 2


def find_device() -> str:
    """Return "cuda" if there is a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def is_slow_in_bf16() -> bool:
    """Return whether this processor has no products in bfloat16, as far as torch knows."""
    import torch

    has_mkldnn = torch.backends.mkldnn.is_available()
    return has_mkldnn and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def find_dtype(device: str) -> str:
    """Return "bf16" if a device has products in bfloat16, else "fp32"."""
    import torch

    if device.startswith("cuda"):
        is_fast = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(False)
    else:  # without oneDNN, which has the products, they are loops over numbers
        is_fast = torch.backends.mkldnn.is_available() and not is_slow_in_bf16()
    return "bf16" if is_fast else "fp32"


def find_workers(device: str) -> int:
    """Return the number of processes that read data: some beside a GPU, none on a CPU."""
    return _GPU_WORKERS if device.startswith("cuda") else 0


def can_compile(device: str) -> bool:
    """Return whether torch.compile finds the compilers that it needs for a device."""
    import torch

    names = [os.environ.get("CXX"), "g++", "clang++"]
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            return True
        if importlib.util.find_spec("triton") is None:
            return False
        names = [os.environ.get("CC"), "gcc", "clang", "cc"]
    return any(shutil.which(name) for name in names if name)


def takes_fused(component: Any) -> bool:
    """Return whether an optimizer has the option ``fused``, one kernel for all parameters.

    Args:
        component: Dotted name of the optimizer. If there is no such object, a later check says so.
    """
    try:
        return "fused" in inspect.signature(pkgutil.resolve_name(str(component))).parameters
    except (ImportError, AttributeError, ValueError, TypeError):
        return False


def num_ranks() -> int:
    """Return the number of processes of this run: of the process group, or as torchrun sets it."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def accumulation(global_batch: int, batch: int, ranks: int) -> int | str:
    """Return the micro-batches of a step, or a text with numbers that divide the step.

    Args:
        global_batch: Sequences of an optimizer step.
        batch: Sequences of a micro-batch.
        ranks: Number of ranks.
    """
    share = batch * ranks
    if global_batch % share == 0:
        return global_batch // share
    below = global_batch // share * share
    sizes = [f"global_batch_size={size}" for size in (below, below + share) if size]
    if global_batch % ranks == 0:
        each = global_batch // ranks
        fitting = [size for size in range(1, each + 1) if each % size == 0]
        near = {max((s for s in fitting if s < batch), default=0)}
        near |= {min((s for s in fitting if s > batch), default=0)}
        sizes += [f"batch_size={size}" for size in sorted(near - {0})]
    else:
        sizes.append("another number of ranks")
    return ", ".join(sizes[:-1]) + f" or {sizes[-1]}"
