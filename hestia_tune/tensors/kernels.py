"""Multiply by packed codes, each kernel by one library, and choose the kernel of each weight.

A kernel holds a weight a second time, in its library's own layout. This copy is the price of its
speed. The kernel is the attribute ``kernel`` of the weight. It is never saved, copied or moved:
files hold codes and scales. A kernel does not take some products: another dtype or device, more
rows than the kernel is fast for, a compiled or differentiated graph, or codes that have changed
since. `multiply` asks `Kernel.takes` and dequantizes in these cases.

    kernel    device     layout                    products
    int4pack  CPU, CUDA  codes in 4 bits (torch)   as bfloat16 or float32 rounds
    gemlite   CUDA       codes in 2 bits (Triton)  as bfloat16 or float16 rounds

`use_kernel` chooses. `auto` measures the product of one row by every kernel that can take a weight,
and by the dequantized weight. It chooses the fastest. It measures once per process for each kind
of weight (shape, groups, dtype, device, number of threads). The measurement repeats one product, so
its weight may stay in the cache. It compares kernels, and does not predict the speed of a model. A
complex weight is multiplied as a ternary weight, so that every kernel can take it (`ComplexStack`).

All kernels hold codes and scales exactly. On an H200, the products of the CUDA kernels were right,
but their speed has not been measured. On a CPU, the files of the formats ``onnx`` and ``gguf``
decode faster in their own programs.
"""

import abc
import functools
import importlib.util
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from hestia_tune.errors import InputError, one_line
from hestia_tune.tensors.group_tensor import Fairy2iTensor, TernaryTensor, TwoBitTensor
from hestia_tune.tensors.packed_tensor import PackedTensor, multiply


class Kernel(abc.ABC):
    """A weight of codes -1 to 1, or -1 to 2, in the layout of a library.

    The library may refuse the weight by an error of its own.

    Args:
        weight: A `TernaryTensor` or `TwoBitTensor` (out_features, in_features) for which `limit`
            returns no reason. It must not be a transpose.

    Attributes:
        max_rows: The number of rows up to which a product should be faster than a dense product.
        parts: The tensors that the kernel holds.
    """

    name: str
    packages: ClassVar[Sequence[str]] = ()
    extra: ClassVar[str] = ""
    devices: ClassVar[Sequence[str]]
    dtypes: ClassVar[Sequence[torch.dtype]]
    max_rows: float = float("inf")
    parts: Sequence[Tensor] = ()

    @classmethod
    def limit(cls, weight: Any) -> str:
        """Return why this kernel cannot take the weight, or an empty string if it can."""
        if weight.device.type not in cls.devices:
            return f"runs on {' and '.join(cls.devices)} only"
        return "" if weight.dtype in cls.dtypes else f"has no products in {weight.dtype}"

    @classmethod
    def require(cls) -> None:
        """Raise InputError with the remedy if the library is not installed."""
        if not all(importlib.util.find_spec(package) for package in cls.packages):
            needed = " and ".join(cls.packages)
            raise InputError(
                f"the kernel {cls.name} needs {needed}: pip install 'hestia-tune[{cls.extra}]'"
            )

    def __init__(self, weight: Any):
        self.watch(weight)

    def watch(self, weight: Any) -> None:
        """Remember the state of the packed weight, so that `takes` sees whether it has changed."""
        self._source, self._versions = weight.parts, _versions(weight)
        self._dtype, self._device, self._width = weight.dtype, weight.device, weight.shape[-1]

    @abc.abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """Return the product (rows, out_features), contiguous, in the weight's dtype or float32.

        ``x`` is (rows, in_features), contiguous, in the weight's dtype.
        """

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes of memory, without the packed weight's own."""
        return sum(part.nbytes for part in self.parts)

    def takes(self, x: Tensor, weight: Any) -> bool:
        """Return whether this kernel takes the product of ``x`` with ``weight``."""
        # This runs for every product, so it avoids attributes that torch asks the subclass for.
        rows = x.numel() // max(1, x.shape[-1])
        return (
            0 < rows <= self.max_rows
            and x.shape[-1] == self._width
            and x.dtype == self._dtype
            and x.device == self._device
            and not (torch.is_grad_enabled() and x.requires_grad)
            and not torch.is_autocast_enabled(x.device.type)
            and weight.qdata is self._source[0]
            and weight.scale is self._source[1]
            and _versions(weight) == self._versions
        )

    def __deepcopy__(self, memo: dict) -> None:  # noqa: B027 (None is the copy)
        """Return None, because a copy of the weight has no kernel."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``F.linear(x, weight, bias)`` for an ``x`` (..., in_features) that it takes."""
        y = self.product(x.reshape(-1, x.shape[-1]).contiguous())
        y = y if bias is None else y + bias.to(y.dtype)
        return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])


def _versions(weight: Any) -> list[int]:
    """Return how often a packed weight and its parts were changed in place.

    Torch counts changes of the weight as a whole. Tensors made in inference mode have no count, so
    the function returns 0 for them.
    """
    with torch._C.DisableTorchFunctionSubclass():
        tensors = (weight, weight.qdata, weight.scale)
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


_GROUPS = (256, 128, 64, 32)


class Int4Pack(Kernel):
    """See the module docstring. It takes 4 bits a weight, and two numbers of its dtype a group."""

    name = "int4pack"
    devices = ("cpu", "cuda")
    max_rows = 32  # Measured: for more rows, a dequantized weight is as fast.
    dtypes = (torch.bfloat16, torch.float32)

    @classmethod
    def _group(cls, weight) -> int | None:
        return next((g for g in _GROUPS if weight.block_size[-1] % g == 0), None)

    @classmethod
    def limit(cls, weight):
        rows, columns = weight.shape
        if weight.is_cuda and weight.dtype != torch.bfloat16:
            return "has products in bfloat16 only on CUDA"
        if cls._group(weight) is None:
            return f"needs groups of a multiple of {_GROUPS[-1]}"
        if rows % (multiple := 8 if weight.is_cuda else 16):
            return f"needs out_features that are a multiple of {multiple}"
        return super().limit(weight)

    def __init__(self, weight):
        super().__init__(weight)
        rows, columns = weight.shape
        self._group_size = group = self._group(weight)
        codes = weight.codes() + 8
        if weight.is_cuda:
            tiles = next(tiles for tiles in (8, 4, 2) if columns % (16 * tiles) == 0)
            pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
            packed = torch.ops.aten._convert_weight_to_int4pack(pairs, tiles)
        else:
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        # (groups, out_features, 2): the scale, and the number added to (code + 8 - 8) * scale
        scale = weight.scale.repeat_interleave(weight.block_size[-1] // group, 1)
        scale = scale.expand(rows, -1).t().to(weight.dtype)
        self.parts = packed, torch.stack([scale, torch.zeros_like(scale)], -1).contiguous()

    def product(self, x):
        ops = torch.ops.aten
        multiply = ops._weight_int4pack_mm if x.is_cuda else ops._weight_int4pack_mm_for_cpu
        return multiply(x, self.parts[0], self._group_size, self.parts[1])


_SPLITS = 16  # In how many parts of whole groups gemlite splits a row, at most.


class Gemlite(Kernel):
    """See the module docstring. It takes as much memory as the packed weight."""

    name = "gemlite"
    packages, extra = ("gemlite",), "cuda"
    devices = ("cuda",)
    dtypes = (torch.bfloat16, torch.float16)

    @classmethod
    def limit(cls, weight):
        columns, group = weight.shape[1], weight.block_size[-1]
        # A block of gemlite's kernels has a power of two of weights, 32 or more, and one scale.
        if columns % 32 or (group != columns and (group < 32 or group.bit_count() > 1)):
            return "needs in_features that are a multiple of 32, and groups of 32, 64, 128, ..."
        return super().limit(weight)

    def __init__(self, weight):
        super().__init__(weight)
        import gemlite  # pyright: ignore[reportMissingImports]

        rows, columns = weight.shape
        kind = gemlite.DType.BF16 if weight.dtype == torch.bfloat16 else gemlite.DType.FP16
        self._linear = gemlite.GemLiteLinearTriton(
            2, weight.block_size[-1], columns, rows, input_dtype=kind, output_dtype=kind
        )
        scale = weight.scale.expand(rows, -1).contiguous().to(weight.dtype)
        self._linear.pack((weight.codes() + 1).to(torch.uint8), scale, 1)
        # A product with 5 to 63 rows also reads scales behind the last group and multiplies them by
        # 0. Without these zeros, infinity or NaN in the memory there would make the product NaN.
        padded = F.pad(self._linear.scales, (0, 0, 0, _SPLITS))
        self._linear.scales.data = padded[:-_SPLITS]
        self.parts = [
            padded if part is self._linear.scales else part for part in self._linear.parameters()
        ]

    def product(self, x):
        return self._linear(x)


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
    """Result of `use_kernel`.

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
        model: Any module with packed parameters, on their device. Only `TernaryTensor`,
            `TwoBitTensor` and `Fairy2iTensor` have kernels.
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
    if not isinstance(weight, TernaryTensor | TwoBitTensor | Fairy2iTensor):
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
        seconds[None] = _seconds(multiply, x, weight)
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
