"""Multiply by packed codes, each kernel by one library, for `packed_linear`.

A kernel holds a weight a second time, in its library's own layout. This copy is the price of its
speed. The kernel is the attribute ``kernel`` of the weight. It is never saved, copied or moved:
files hold codes and scales. A kernel does not take some products: another dtype or device, more
rows than the kernel is fast for, a compiled or differentiated graph, or codes that have changed
since. `packed_linear` asks `Kernel.takes` and dequantizes in these cases.

    kernel       device     layout                          products
    int4pack     CPU, CUDA  codes in 4 bits (torch)         as bfloat16 or float32 rounds
    onnxruntime  CPU        codes in 2 bits (MatMulNBits)   activations rounded to 8 bits, by blocks
    gemlite      CUDA       codes in 2 bits (Triton)        as bfloat16 or float16 rounds

All kernels hold codes and scales exactly. `hestia_tune.use_kernel` prepares them. On an H200, the
products of the CUDA kernels were right, but their speed has not been measured.
"""

import abc
import functools
import importlib.util
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hestia_tune.errors import InputError
from hestia_tune.tensors.bitpack import packed_width


class Kernel(abc.ABC):
    """Hold a ternary weight in the layout of a library.

    The library may refuse the weight by an error of its own.

    Args:
        weight: A `TernaryTensor` (out_features, in_features) for which `limit` returns no reason.
            It must not be a transpose.

    Attributes:
        max_rows: The number of rows up to which a product should be faster than a dense product.
        parts: The tensors that the kernel holds.
    """

    name: ClassVar[str]
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


BLOCKS = (128, 64, 32)
_ZERO_POINTS = 0b01010101  # four zero points 1
_SESSION_BYTES = 85_000  # Measured: memory of a session without its weights.
_WEIGHTS = ["codes", "scale", "zeros"]
# A model of one product. It rounds activations to 8 bits (accuracy level 4). Its weights are given
# as memory.
_MODEL = """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
product (float[rows, {columns}] x) => (float[rows, {rows}] y)
<uint8 {codes} codes = ["location": "memory"], float {scale} scale = ["location": "memory"],
 uint8 {zeros} zeros = ["location": "memory"]>
{{ y = com.microsoft.MatMulNBits <K={columns}, N={rows}, bits=2, block_size={block},
                                  accuracy_level=4> (x, codes, scale, zeros) }}"""


class OnnxRuntime(Kernel):
    """See the module docstring. It takes 2.8 bits a weight at blocks of 128."""

    name = "onnxruntime"
    packages, extra = ("onnx", "onnxruntime"), "cpu"
    devices = ("cpu",)
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    max_rows = 1

    @classmethod
    def _block(cls, weight) -> int | None:
        group, width = weight.block_size[-1], weight.shape[1]
        fits = (block for block in BLOCKS if group % block == 0)
        return next(fits, BLOCKS[-1] if group == width else None)  # The last block is padded.

    @classmethod
    def limit(cls, weight):
        if cls._block(weight) is None:
            return f"needs groups of a multiple of {BLOCKS[-1]}, or of whole rows"
        return super().limit(weight)

    def __init__(self, weight):
        super().__init__(weight)
        import onnx.parser
        import onnxruntime as ort

        (rows, columns), block = weight.shape, self._block(weight)
        blocks = -(-columns // block)
        missing = packed_width(blocks * block) - weight.qdata.shape[1]
        codes = F.pad(weight.qdata, (0, missing)) if missing else weight.qdata.contiguous()
        scale = weight.scale.float().repeat_interleave(-(-weight.block_size[-1] // block), 1)
        scale = scale.expand(rows, -1).contiguous()
        zeros = codes.new_full((rows, packed_width(blocks)), _ZERO_POINTS)
        self.parts = codes.view(rows, blocks, -1), scale, zeros
        given = [part for part in self.parts if part.data_ptr() != weight.qdata.data_ptr()]
        copies = codes.nbytes + 2 * scale.nbytes + _SESSION_BYTES
        self.num_bytes = copies + sum(part.nbytes for part in given)

        shapes = {n: list(p.shape) for n, p in zip(_WEIGHTS, self.parts, strict=True)}
        model = _MODEL.format(rows=rows, columns=columns, block=block, **shapes)
        options = ort.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 4, 1
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        self._values = [ort.OrtValue.ortvalue_from_numpy(part.numpy()) for part in self.parts]
        options.add_external_initializers(_WEIGHTS, self._values)
        model = onnx.parser.parse_model(model).SerializeToString()
        self._session = ort.InferenceSession(model, options, ["CPUExecutionProvider"])

    def product(self, x):
        y = torch.from_numpy(self._session.run(None, {"x": x.detach().float().numpy()})[0])
        # Rounding the activations turns NaN and infinity into numbers.
        return y.masked_fill_(~x.isfinite().all(1, keepdim=True), torch.nan)
