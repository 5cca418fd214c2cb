"""Which kernel multiplies by which weight: `use_kernel`.

`auto` measures, once a process for each kind of weight (shape, groups, dtype, device, number of
threads), a product of one row by every kernel that can take it, and takes the fastest. Whatever the
kernel, a dense product is at first slower, for it has to dequantize, and may gain with every row.
With d the time of dequantizing and c, b those that a row takes by the kernel and densely, measured
with `_ROWS` of them, the kernel is given up to d / (c - b) rows. The measurement repeats one
product, whose weight may stay in the cache: it compares, and does not foretell a model's speed.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.benchmark import Timer

from hestia_tune.config import one_line
from hestia_tune.tensors.fairy2i_tensor import Fairy2iTensor
from hestia_tune.tensors.kernels import Kernel, prepare
from hestia_tune.tensors.kernels.complex_stack import ComplexStack
from hestia_tune.tensors.kernels.gemlite import Gemlite
from hestia_tune.tensors.kernels.int4pack import Int4Pack
from hestia_tune.tensors.kernels.onnxruntime import OnnxRuntime
from hestia_tune.tensors.packed_tensor import PackedTensor
from hestia_tune.tensors.ternary_tensor import TernaryTensor

KERNELS: dict[str, type[Kernel]] = {kind.name: kind for kind in (OnnxRuntime, Gemlite, Int4Pack)}
DEQUANTIZE = "dequantize"
_ROWS = 32
_MIN_SECONDS = 0.01
# (kernel, kind of weight) -> seconds of a product of one row and of another row, or why there is
# none; of "dequantize" those of dequantizing and of a row. Measured once in this process.
_measured: dict[tuple, tuple[float, float] | str] = {}


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
        model: any module with `TernaryTensor` or `Fairy2iTensor` parameters, on their device.
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
    kinds = (
        list(KERNELS.values())
        if name == "auto"
        else [k for k in KERNELS.values() if k.name == name]
    )
    layers, num_bytes, notes = {}, 0, {}
    for layer, weight in model.named_parameters():
        if not isinstance(weight, TernaryTensor | Fairy2iTensor) or weight.is_meta:
            continue
        kernel = _fastest(weight, kinds, is_named=name != "auto", notes=notes)
        prepare(weight, kernel)
        layers[layer] = DEQUANTIZE if kernel is None else kernel.name
        num_bytes += 0 if kernel is None else kernel.num_bytes
    return KernelUse(layers=layers, num_bytes=num_bytes, notes=tuple(notes))


def _fastest(
    weight: PackedTensor, kinds: Sequence[type[Kernel]], *, is_named: bool, notes: dict[str, None]
) -> Kernel | None:
    """The fastest of the kernels, ready; None if none of them can, or dequantizing is faster."""
    made: dict[type[Kernel], Kernel] = {}
    times: dict[type[Kernel], tuple[float, float]] = {}
    for kind in kinds:
        if weight.device.type not in kind.devices and not is_named:
            continue
        key = _key(weight, kind.name)
        if key not in _measured:
            try:
                made[kind] = make(weight, kind)
                _measured[key] = _measure(made[kind], weight)
            except Exception as error:  # of any library: it is not taken, and the note says why
                made.pop(kind, None)
                _measured[key] = one_line(error)
        found = _measured[key]
        if isinstance(found, str):
            notes[f"not {kind.name} for {tuple(weight.shape)}: {found}"] = None
        else:
            times[kind] = found
    if not times:
        return None
    dequantizing, dense_row = _dense_times(weight)
    best = min(times, key=lambda kind: times[kind][0])
    first, row = times[best]
    if first > dequantizing + dense_row and not is_named:
        return None
    kernel = made.get(best) or make(weight, best)
    if row > dense_row:
        kernel.max_rows = max(1, int(dequantizing / (row - dense_row)))
    return kernel


def make(weight: PackedTensor, kind: type[Kernel]) -> Kernel:
    """A kernel of a packed weight; ValueError if it is of a form that the library does not have."""
    if isinstance(weight, Fairy2iTensor):
        return ComplexStack(weight, lambda stack: make(stack, kind))
    kind.require()
    if reason := kind.limit(weight):
        raise ValueError(f"it {reason}")
    return kind(weight)


def _key(weight: PackedTensor, name: str) -> tuple:
    form = (type(weight), tuple(weight.shape), tuple(weight.scale.shape), weight.dtype)
    return name, *form, str(weight.device), torch.get_num_threads()


def _measure(kernel: Kernel, weight: PackedTensor) -> tuple[float, float]:
    """Seconds of a product of one row, and of a row of several."""
    one, several = (
        torch.randn(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
        for rows in (1, _ROWS)
    )
    return _seconds(kernel, one, None), _seconds(kernel, several, None) / _ROWS


def _dense_times(weight: PackedTensor) -> tuple[float, float]:
    """Seconds of dequantizing, and of a row of the product with what that gives."""
    key = _key(weight, DEQUANTIZE)
    if key not in _measured:
        dense = weight.dequantize()
        x = torch.randn(_ROWS, weight.shape[1], dtype=weight.dtype, device=weight.device)
        _measured[key] = _seconds(weight.dequantize), _seconds(F.linear, x, dense) / _ROWS
    return _measured[key]


def _seconds(function: Callable, *args: Any) -> float:
    """Median time of a call, on torch's number of threads and its device."""
    scope = {"function": function, "args": args}
    timer = Timer("function(*args)", globals=scope, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=_MIN_SECONDS).median
