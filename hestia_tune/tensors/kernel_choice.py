"""Choose the kernel that multiplies by each weight, by `use_kernel`.

`auto` measures the product of one row by every kernel that can take a weight, and by the
dequantized weight. It chooses the fastest. It measures once per process for each kind of weight
(shape, groups, dtype, device, number of threads). The measurement repeats one product, so its
weight may stay in the cache. It compares kernels, and does not predict the speed of a model.

A complex weight is multiplied as a ternary weight, so that every kernel can take it
(`ComplexStack`).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.benchmark import Timer

from hestia_tune.errors import InputError, one_line
from hestia_tune.tensors.fairy2i_tensor import Fairy2iTensor
from hestia_tune.tensors.group_tensor import TernaryTensor
from hestia_tune.tensors.kernels import Gemlite, Int4Pack, Kernel
from hestia_tune.tensors.packed_tensor import PackedTensor, packed_linear


def stacked(weight: Fairy2iTensor) -> TernaryTensor:
    """Return Re U, Im U, Re W and Im W, one above the other: (4n, num_stages · m)."""
    codes, scale = weight.codes(), weight.scale  # (T, 2, n, m), (T, 2, 2, n or 1, groups)
    parts = [(codes == i).to(torch.int8) - (codes == i + 2).to(torch.int8) for i in (0, 1)]
    digits = torch.stack(parts, 2)  # (T, U or W, Re or Im, n, m)
    rows = 4 * codes.shape[2]
    scale = scale.expand(-1, -1, -1, codes.shape[2], -1)
    digits, scale = (part.permute(1, 2, 3, 0, 4).reshape(rows, -1) for part in (digits, scale))
    return TernaryTensor.from_codes(digits, scale, dtype=weight.dtype)


class ComplexStack(Kernel):
    """Multiply by the stacked matrix of a `Fairy2iTensor`; see `stacked`.

    Args:
        weight: The complex weight.
        make: A function that makes the kernel of the stacked matrix.
    """

    def __init__(self, weight, make):
        super().__init__(weight)
        stack = stacked(weight)
        self._inner, self._stages = make(stack), weight.qdata.shape[0]
        self.name, self.max_rows = self._inner.name, self._inner.max_rows
        self.num_bytes = self._inner.num_bytes
        self._inner.watch(weight)  # This drops the stack, unless the library reads it.

    def product(self, x):
        rows = len(x)
        halves = x.view(2 * rows, -1).repeat(1, self._stages)  # (2·rows, T·m)
        product = self._inner.product(halves).to(x.dtype).view(rows, 2, 4, -1)
        (re_u1, im_u1, re_w1, im_w1), (re_u2, im_u2, re_w2, im_w2) = product.permute(1, 2, 0, 3)
        top = (re_u1 - im_u2) + (re_w1 + im_w2)
        bottom = (im_u1 + re_u2) + (im_w1 - re_w2)
        return torch.cat([top, bottom], 1)  # (rows, 2n)


KERNELS: dict[str, type[Kernel]] = {kind.name: kind for kind in (Gemlite, Int4Pack)}
DEQUANTIZE = "dequantize"
_MIN_SECONDS = 0.02
# Maps a kind of weight to its kernel (None: dequantized) and to the reasons against other kernels.
_chosen: dict[tuple, tuple[type[Kernel] | None, list[str]]] = {}


@dataclass(frozen=True, kw_only=True)
class KernelUse:
    """Hold the result of `use_kernel`.

    Attributes:
        layers: Maps the name of a packed weight to the name of its kernel.
        num_bytes: Bytes of memory of all kernels, without the packed weights' own.
        notes: Why kernels were not taken.
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
    """Choose how a model's packed weights are multiplied from now on, in their current dtype.

    Weights that are loaded, moved or cast later are dequantized until this is called again.

    Args:
        model: Any module with packed parameters, on their device. Only `TernaryTensor` and
            `Fairy2iTensor` have kernels.
        name: "auto" takes the fastest (see the module docstring). "dequantize" is exact and needs
            no more memory. Or a name in `KERNELS`; weights that this kernel cannot take are
            dequantized.

    Raises:
        InputError: If the name is unknown, or the kernel's library is not installed. "auto" never
            raises it.
    """
    if name not in ("auto", DEQUANTIZE, *KERNELS):
        known = ", ".join(["auto", DEQUANTIZE, *KERNELS])
        raise InputError(
            f"kernel must be one of {known}; got {name!r}; for speed on a CPU, write the formats "
            "onnx or gguf by hestia_convert, and run their files"
        )
    if name in KERNELS:
        KERNELS[name].require()
    layers, num_bytes, notes = {}, 0, {}
    for layer, weight in model.named_parameters():
        if not isinstance(weight, PackedTensor) or weight.is_meta:
            continue
        kind, reasons = _choose(weight, name)
        notes |= dict.fromkeys(reasons)
        weight.kernel = kind and make(weight, kind)
        layers[layer] = DEQUANTIZE if weight.kernel is None else weight.kernel.name
        num_bytes += 0 if weight.kernel is None else weight.kernel.num_bytes
    return KernelUse(layers=layers, num_bytes=num_bytes, notes=tuple(notes))


def _choose(weight: PackedTensor, name: str) -> tuple[type[Kernel] | None, list[str]]:
    """Return the fastest of the allowed kernels for one row, and why others were not taken.

    The kernel is None if no kernel can take the weight, or if ``auto`` finds none that is faster
    than dequantizing. The first weight of a kind decides for all others of the process.
    """
    weight.kernel = None
    if not isinstance(weight, TernaryTensor | Fairy2iTensor):
        return None, []
    shapes = tuple(weight.shape), tuple(weight.scale.shape)
    device, threads = str(weight.device), torch.get_num_threads()
    key = name, type(weight), *shapes, weight.dtype, device, threads
    if key in _chosen:
        return _chosen[key]
    x = torch.randn(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
    seconds: dict[type[Kernel] | None, float] = {}
    notes = []
    if name == "auto":
        seconds[None] = _seconds(packed_linear, x, weight)
    for kind in KERNELS.values():
        if name != kind.name and (name != "auto" or weight.device.type not in kind.devices):
            continue
        try:
            seconds[kind] = _seconds(make(weight, kind), x, None)
        except Exception as error:  # A library may raise anything. Its kernel is not taken.
            notes.append(f"not {kind.name} for {shapes[0]}: {one_line(error)}")
    best = min(seconds, key=lambda kind: seconds[kind], default=None)
    return _chosen.setdefault(key, (best, notes))


def make(weight: PackedTensor, kind: type[Kernel]) -> Kernel:
    """Return a kernel of a packed weight, or raise InputError if the library cannot take it."""
    if isinstance(weight, Fairy2iTensor):
        return ComplexStack(weight, lambda stack: make(stack, kind))
    kind.require()
    if reason := kind.limit(weight):
        raise InputError(f"it {reason}")
    return kind(weight)


def _seconds(function: Callable, *args: Any) -> float:
    """Return the median seconds of a call, after calls that warm up."""
    call = {"function": function, "args": args}
    timer = Timer("function(*args)", globals=call, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=_MIN_SECONDS).median
