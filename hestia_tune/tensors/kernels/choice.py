"""Which kernel multiplies by which weight: `use_kernel`.

`auto` measures, once a process for each kind of weight (shape, groups, dtype, device, number of
threads), a product of one row by every kernel that can take it, and takes the fastest. Whatever the
kernel, a dense product is at first slower, for it has to dequantize, and may gain with every row.
With d the time of dequantizing and c, b those that a row takes by the kernel and densely, measured
with `_ROWS` of them, the kernel is given up to d / (c - b) rows. The measurement repeats one
product, whose weight may stay in the cache: it compares, and does not foretell a model's speed.
"""

import contextlib
import ctypes
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hestia_tune.config import one_line
from hestia_tune.tensors.fairy2i_tensor import Fairy2iTensor
from hestia_tune.tensors.kernels import Kernel
from hestia_tune.tensors.kernels.complex_stack import ComplexStack
from hestia_tune.tensors.kernels.gemlite import Gemlite
from hestia_tune.tensors.kernels.int4pack import Int4Pack
from hestia_tune.tensors.kernels.onnxruntime import OnnxRuntime
from hestia_tune.tensors.packed_tensor import PackedTensor
from hestia_tune.tensors.ternary_tensor import TernaryTensor

KERNELS: dict[str, type[Kernel]] = {kind.name: kind for kind in (OnnxRuntime, Gemlite, Int4Pack)}
DEQUANTIZE = "dequantize"
_ROWS = 32
_MIN_SECONDS = 0.02
# What, of which kind of weight -> seconds or rows, or why there are none. Of this process.
_measured: dict[tuple, Any] = {}


@dataclass(frozen=True, kw_only=True)
class KernelUse:
    """What `use_kernel` did.

    Attributes:
        layers: name of a packed weight -> name of its kernel.
        num_bytes: memory of all kernels, besides the packed weights' own.
        notes: why a kernel was not taken.
    """

    layers: dict[str, str]
    num_bytes: int
    notes: tuple[str, ...]

    def __str__(self) -> str:
        counts = Counter(self.layers.values()).most_common()
        shown = ", ".join(f"{name} for {count}" for name, count in counts) or "no packed weights"
        notes = "".join(f"; {note}" for note in self.notes)
        return f"kernels: {shown}, {self.num_bytes / 1e6:.0f} MB beside the packed weights{notes}"


@torch.no_grad()
def use_kernel(model: nn.Module, name: str = "auto") -> KernelUse:
    """Chooses how a model's packed weights are multiplied from now on, in their present dtype.

    Weights that are loaded, moved or cast later dequantize until this is called again. A kernel is
    made for torch's number of threads at this time.

    Args:
        model: any module with packed parameters, on their device; kernels are for
            `TernaryTensor` and `Fairy2iTensor`.
        name: "auto", the fastest (see the module); "dequantize", which is exact and needs no more
            memory; or one of `KERNELS`. Weights that this one cannot take are dequantized.

    Raises:
        ValueError: on an unknown name.
        ImportError: if the kernel's library is not there; never for "auto".
    """
    if name not in ("auto", DEQUANTIZE, *KERNELS):
        known = ", ".join(["auto", DEQUANTIZE, *KERNELS])
        raise ValueError(f"kernel must be one of {known}; got {name!r}")
    if name in KERNELS:
        KERNELS[name].require()
    kinds = [kind for kind in KERNELS.values() if name in ("auto", kind.name)]
    layers, num_bytes, notes = {}, 0, {}
    for layer, weight in model.named_parameters():
        if not isinstance(weight, PackedTensor) or weight.is_meta:
            continue
        known = kinds if isinstance(weight, TernaryTensor | Fairy2iTensor) else ()
        kernel = _fastest(weight, known, is_named=name != "auto", notes=notes)
        weight.kernel = kernel
        layers[layer] = DEQUANTIZE if kernel is None else kernel.name
        num_bytes += 0 if kernel is None else kernel.num_bytes
    with contextlib.suppress(AttributeError, TypeError, OSError):  # glibc's: codes were unpacked
        ctypes.CDLL(None).malloc_trim(0)  # for other layouts, several times what stays
    return KernelUse(layers=layers, num_bytes=num_bytes, notes=tuple(notes))


def _fastest(
    weight: PackedTensor, kinds: Sequence[type[Kernel]], *, is_named: bool, notes: dict[str, None]
) -> Kernel | None:
    """The fastest of the kernels, ready; None if none of them can, or dequantizing is faster."""
    made: dict[type[Kernel], Kernel] = {}
    times: dict[type[Kernel], float] = {}

    def seconds_of_a_row(kind: type[Kernel]) -> float | str:
        try:
            made[kind] = make(weight, kind)
            return _seconds(made[kind], _rows(weight, 1), None)
        except Exception as error:  # of any library: it is not taken, and a note says why
            return one_line(error)

    for kind in kinds:
        if not is_named and weight.device.type not in kind.devices:
            continue
        found = _once(weight, kind.name, partial(seconds_of_a_row, kind))
        if isinstance(found, str):
            notes[f"not {kind.name} for {tuple(weight.shape)}: {found}"] = None
        else:
            times[kind] = found
    if not times:
        return None
    best = min(times, key=lambda kind: times[kind])
    dequantizing = _once(weight, DEQUANTIZE, lambda: _seconds(weight.dequantize_for_now))
    if times[best] > dequantizing and not is_named:
        return None
    kernel = made.get(best) or make(weight, best)

    def max_rows() -> float | str:  # see the module
        x = _rows(weight, _ROWS)
        try:
            gain = _seconds(kernel, x, None) - _seconds(F.linear, x, weight.dequantize())
        except Exception as error:  # as above
            return one_line(error)
        return max(1.0, _ROWS * dequantizing / gain) if gain > 0 else float("inf")

    found = _once(weight, f"rows of {kernel.name}", max_rows)
    if isinstance(found, str):
        notes[f"{kernel.name} for single rows of {tuple(weight.shape)}: {found}"] = None
    kernel.max_rows = 1.0 if isinstance(found, str) else found
    return kernel


def make(weight: PackedTensor, kind: type[Kernel]) -> Kernel:
    """A kernel of a packed weight; ValueError if it is of a form that the library does not have."""
    if isinstance(weight, Fairy2iTensor):
        return ComplexStack(weight, lambda stack: make(stack, kind))
    kind.require()
    if reason := kind.limit(weight):
        raise ValueError(f"it {reason}")
    return kind(weight)


def _once(weight: PackedTensor, what: str, measure: Callable[[], Any]) -> Any:
    """What is found for the first weight of a kind holds for all others of the process."""
    form = (type(weight), tuple(weight.shape), tuple(weight.scale.shape), weight.dtype)
    key = what, *form, str(weight.device), torch.get_num_threads()
    if key not in _measured:
        _measured[key] = measure()
    return _measured[key]


def _rows(weight: PackedTensor, rows: int) -> torch.Tensor:
    return torch.randn(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)


def _seconds(function: Callable, *args: Any) -> float:
    """The shortest of some calls, after one that is not counted."""
    times = []
    while len(times) < 2 or sum(times) < _MIN_SECONDS:
        started = time.perf_counter()
        out = function(*args)
        if out.is_cuda:
            torch.cuda.synchronize(out.device)
        times.append(time.perf_counter() - started)
    return min(times[1:])
