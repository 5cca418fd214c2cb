"""Packed weights: codes of 1, 2 or 4 bits with one bfloat16 scale per group, or complex codes.

The weight of a plain `nn.Linear` can be such a tensor; nothing else about the model changes. It
presents a dtype (the dtype of a dense weight in its place). A product with it equals the product
with its dequantized weight in this dtype, to the last bit.

**`GroupTensor`** takes 2.125 bits a weight at group size 128, and 1.125 bits with binary codes. A
weight (out_features, in_features) is ``qdata`` (out_features, ceil(in_features / n)), n codes a
byte (`pack_codes`), and ``scale`` (out_features, groups), (out_features, 1) or (1, 1). A transpose
has the same parts and a flag. `to_intx` makes torchao's own tensor of the same weights, for users
of torchao without this package.

**`Fairy2iTensor`** has complex codes of 2 bits, in residual stages. T stages take T bits per real
weight, plus the scales. A weight (2n, 2m) is ``qdata`` (T, 2, n, ceil(m / 4)) and ``scale``.
``qdata`` holds the powers of i of U and W in 2 bits, by `pack2`. ``scale`` is (T, 2, 2, 1, 1) or
(T, 2, 2, n, groups): stage, U or W, s_re or s_im. An entry of U and W stores two rows and two
columns: i and n + i, j and m + j. A transpose has the same parts and a flag.

Checkpoints must carry complex codes, because a hard weight does not determine them. Each entry of a
hard weight is a sum of 2·T scaled digits, rounded to the weight's dtype. Several sets of codes and
scales can make this sum, and a second quantization makes another weight. So this tensor has no
`from_hard`, unlike the ternary tensor. Save the codes and scales that `Fairy2iMethod.codes` returns
for the latent weight, or save the tensor itself.
"""

import functools
import threading
from functools import partial
from typing import ClassVar, TypeVar

import torch
from torch import Tensor
from torchao.quantization import IntxUnpackedToInt8Tensor

from hestia_tune.errors import InputError, InputTypeError
from hestia_tune.methods import EvenMethod, INT4Method, TernaryMethod, TwoBitMethod
from hestia_tune.methods.fairy2i import MAX_STAGES, Fairy2iMethod, dequantize_codes
from hestia_tune.methods.groups import (
    BINARY,
    INT4,
    SYMMETRIC,
    TERNARY,
    TWO_BIT,
    GroupSize,
    Levels,
    block_view,
    nearest_code,
    unit_of,
)
from hestia_tune.methods.method import compute_dtype, require_float
from hestia_tune.tensors.packed_tensor import (
    PackedTensor,
    check_codes,
    exact_bfloat16,
    pack2,
    pack_codes,
    packed_width,
    unpack2,
    unpack_codes,
)

T = TypeVar("T", bound="GroupTensor")
# Maps the bits of a code to a dtype. It is as large as the codes of one byte in bfloat16.
_AT_ONCE = {1: torch.complex128, 2: torch.int64, 4: torch.int32}


class _Scratch(threading.local):
    """Memory on the CPU for one dense weight of a thread, as large as the largest weight so far.

    The system provides new memory page by page. For a large weight this takes several times as long
    as computing its numbers.
    """

    memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return memory for (size,) numbers. The thread's next call overwrites it."""
        num_bytes = size * dtype.itemsize
        if num_bytes > self.memory.numel():
            with torch.inference_mode(False):
                self.memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return self.memory[:num_bytes].view(dtype)


_scratch = _Scratch()


class GroupTensor(PackedTensor):
    """A weight as scales and codes for inference.

    Each kind of it is made with `from_codes`, `from_hp` or `from_hard`.

    Class Attributes:
        levels: The codes.
        lowest: The lowest code.
        distance: The distance between neighboring codes.
        bits: Bits per code.
        hard_rule: The values of a group in a hard weight, for errors.

    Tensor Attributes:
        qdata: Packed indices of the codes, counted from the lowest, along the last axis; uint8.
        scale: Scales, bfloat16. A scale multiplies the codes of its block.

    Non-Tensor Attributes (see `PackedTensor`):
        dtype: The presented dtype. bfloat16, float32 and float64 hold every value exactly.
            Dequantizing to float16 rounds scales outside its normal range (6e-5 to 65504).
    """

    levels: ClassVar[Levels]
    lowest: ClassVar[int]
    distance: ClassVar[int]
    bits: ClassVar[int]
    hard_rule: ClassVar[str]

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.lowest, cls.distance = cls.levels[0], cls.levels[1] - cls.levels[0]

    def check_shapes(self, shape, qdata_shape, scale_shape):
        if len(shape) != 2 or qdata_shape != (shape[0], packed_width(shape[1], self.bits)):
            raise InputError(
                f"qdata must hold {8 // self.bits} codes a byte along the last axis of the shape "
                f"{shape}; got the shape {qdata_shape}; use {type(self).__name__}.from_codes"
            )
        (rows, width), (*scale_rows, groups) = shape, scale_shape
        if scale_rows not in ([rows], [1]) or groups * (width // max(1, groups)) != width:
            raise InputError(
                "scale must have the shape (out_features or 1, groups) with groups that divide "
                f"in_features; got {scale_shape} for a weight {shape}"
            )

    @functools.cached_property  # Files of earlier versions hold it, and may set it.
    def block_size(self) -> tuple[int, ...]:
        """Number of weights that share a scale along each axis of the weight.

        It is (1, group_size), (1, in_features) per channel, or (out_features, in_features) per
        tensor.
        """
        sizes = zip(self.weight_shape, self.scale.shape, strict=True)
        return tuple(weights // max(1, scales) for weights, scales in sizes)

    @classmethod
    def from_codes(cls: type[T], codes: Tensor, scale: Tensor, *, dtype=torch.bfloat16) -> T:
        """Pack codes and scales, as `Method.codes` returns them.

        Args:
            codes: Codes of this kind (out_features, in_features), int8.
            scale: Scales (out_features, groups), (out_features, 1) per channel, or (1, groups) for
                all rows. The dtype is bfloat16, or a float dtype if bfloat16 holds its values
                exactly.
            dtype: The dtype to present.

        Raises:
            InputTypeError: If codes, scales or ``dtype`` have another dtype.
            InputError: If a shape or a code is wrong, or bfloat16 would round a scale.
        """
        check_codes(codes, cls.lowest, cls.levels[-1])
        if cls.distance == 2 and not codes.is_meta and (codes & 1 == 0).any():
            raise InputError(f"codes of a {cls.__name__} must be odd; got an even one")
        packed = pack_codes((codes - cls.lowest) // cls.distance, cls.bits)
        return cls(packed, exact_bfloat16(scale).contiguous(), codes.shape, dtype)

    @classmethod
    def from_hard(cls: type[T], weight: Tensor, *, group_size: GroupSize = 128) -> T:
        """Recover codes and scales of a hard weight exactly, and present its dtype.

        `unit_of` says which scale it is. If the codes include 0, a group of zeros leaves no scale
        to recover. Its scale becomes 0.

        Args:
            weight: The hard weight (out_features, in_features). Each entry is the product of a code
                and the scale of its group.
            group_size: An int that divides in_features, "channel" or "tensor".

        Raises:
            InputTypeError: If the weight is not floating point.
            InputError: If an entry is not such a product, or a scale is not a bfloat16 value. The
                error names the first such row and group. Also if the group size does not divide
                in_features.
        """
        require_float(weight)
        blocks = block_view(weight.detach(), group_size).to(compute_dtype(weight))
        unit = unit_of(blocks, cls.levels)
        code, scale = nearest_code(blocks, unit, cls.levels), unit.to(torch.bfloat16)
        exact = (code * scale == blocks).all(-1, keepdim=True) & unit.isfinite()
        if not weight.is_meta and not exact.all():
            row, group = (~exact).squeeze(-1).nonzero()[0].tolist()
            shown = blocks[row, group].abs().unique()[-3:].tolist()
            raise InputError(
                f"a hard weight has {cls.hard_rule} per group of {group_size}, a bfloat16 value; "
                f"row {row}, group {group} has {shown}; convert the model first, or use the "
                "group_size it was trained with"
            )
        codes = code.to(torch.int8).view_as(weight)
        return cls.from_codes(codes, scale.squeeze(-1), dtype=weight.dtype)

    def codes(self) -> Tensor:
        """Return the codes, int8, in this tensor's shape."""
        codes = self._unpacked(self.qdata, self.weight_shape[-1]).to(torch.int8)
        return codes.t() if self.is_transposed else codes

    def _unpacked(self, qdata: Tensor, width: int) -> Tensor:
        """Return the codes of packed bytes, in bfloat16."""
        fields = unpack_codes(qdata, width, self.bits).to(torch.bfloat16)
        return fields * self.distance + self.lowest

    def dequantize_weight(self, *, for_now: bool = False) -> Tensor:
        """Return scale times code, (out_features, in_features), in the presented dtype."""
        width, packed = self.weight_shape[-1], self.qdata
        # The table is for real tensors on the CPU: no fake tensors, no other device.
        is_plain = type(packed) is Tensor and packed.device.type == "cpu"
        if torch.compiler.is_compiling() or not is_plain:
            codes = self._unpacked(packed, width)
        else:  # Look up all codes of a byte at once, which takes less than half the time.
            every_byte = torch.arange(256, dtype=torch.uint8, device="cpu").unsqueeze(-1)
            table = self._unpacked(every_byte, 8 // self.bits).view(_AT_ONCE[self.bits]).flatten()
            out = _scratch.take(packed.numel(), table.dtype) if for_now else None
            looked_up = torch.index_select(table, 0, packed.int().flatten(), out=out)
            codes = looked_up.view(packed.shape).view(torch.bfloat16)[:, :width]
        blocks = codes.unflatten(-1, (self.scale.shape[-1], self.block_size[-1]))
        # A code times a bfloat16 scale is exact. The presented dtype comes only after it.
        return blocks.mul_(self.scale.unsqueeze(-1)).flatten(-2).to(self.dtype)


class TernaryTensor(GroupTensor):
    """Codes -1, 0, 1, four to a byte, stored as code + 1."""

    method_type = TernaryMethod
    levels, bits = TERNARY, 2
    hard_rule = "one absolute value besides 0"


class TwoBitTensor(GroupTensor):
    """Codes -1, 0, 1, 2, four to a byte, stored as code + 1. The scale has a sign."""

    method_type = TwoBitMethod
    levels, bits = TWO_BIT, 2
    hard_rule = "one scale times -1, 0, 1 and 2"


class INT2Tensor(GroupTensor):
    """Codes -3, -1, 1, 3, four to a byte, stored as (code + 3) / 2.

    The scale is half the distance between neighboring levels.
    """

    method_type = partial(EvenMethod, codebook="int2")
    levels, bits = SYMMETRIC, 2
    hard_rule = "one absolute value and three times it"


class INT4Tensor(GroupTensor):
    """Codes -8 to 7, two to a byte, stored as code + 8. The scale has a sign."""

    method_type = INT4Method
    levels, bits = INT4, 4
    hard_rule = "integers from -8 to 7 times one scale, with -8 among them,"


class BinaryTensor(GroupTensor):
    """Codes -1, 1, eight to a byte, stored as (code + 1) / 2."""

    method_type = partial(EvenMethod, codebook="binary")
    levels, bits = BINARY, 1
    hard_rule = "one absolute value"


def to_intx(
    codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16
) -> IntxUnpackedToInt8Tensor:
    """Return an int2 tensor of torchao, zero point 0, that dequantizes to scale times code.

    The integers of int2 are -2 to 1. So codes with a 2 become their negatives, with the negative of
    the scale.

    Args:
        codes: Codes (out_features, in_features), int8 in {-1, 0, 1, 2}.
        scale: Scales as for `TwoBitTensor.from_codes`. A scale of the whole tensor is repeated for
            every row, because torchao cannot slice rows out of blocks that span rows.
        dtype: bfloat16, float32 or float16. torchao stores the scales in it.

    Raises:
        InputTypeError: If ``dtype`` is another dtype, or for the reasons of
            `TwoBitTensor.from_codes`.
        InputError: If a scale is too large for float16, or for the reasons of
            `TwoBitTensor.from_codes`.
    """
    if dtype not in (torch.bfloat16, torch.float32, torch.float16):
        raise InputTypeError(
            f"torchao's intx has bfloat16, float32 or float16 weights; got {dtype}"
        )
    packed = TwoBitTensor.from_codes(codes, scale, dtype=dtype)
    intx_scale = packed.scale.to(dtype).expand(codes.shape[0], -1).contiguous()
    if dtype == torch.float16 and not scale.is_meta and (scale.abs() > 65504).any():
        raise InputError("scales must be at most 65504 for float16; use bfloat16")
    if not codes.is_meta and (codes == 2).any():
        codes, intx_scale = -codes, -intx_scale
    return IntxUnpackedToInt8Tensor(
        qdata=codes,
        scale=intx_scale,
        zero_point=torch.zeros_like(intx_scale, dtype=torch.int8),
        target_dtype=torch.int2,  # pyright: ignore[reportAttributeAccessIssue]
        block_size=(1, packed.block_size[1]),
        dtype=dtype,
        activation_quantization=None,
    )


class Fairy2iTensor(PackedTensor):
    """A complex weight for inference; make one with `from_codes` or `from_hp`.

    Tensor Attributes:
        qdata: Powers of i, four to a byte, uint8 (num_stages, 2, n, ceil(m / 4)).
        scale: Scales, bfloat16, (num_stages, 2, 2, 1, 1) or (num_stages, 2, 2, n, groups).

    Non-Tensor Attributes (see `PackedTensor`):
        dtype: The presented dtype. Stages are added in float32 (float64 for float64), and the sum
            is rounded to ``dtype`` once.
    """

    method_type = Fairy2iMethod

    def check_shapes(self, shape, qdata_shape, scale_shape):
        if len(shape) != 2 or any(size % 2 or size == 0 for size in shape):
            raise InputError(f"shape must be two even numbers, none of them 0; got {shape}")
        n, m, stages = shape[0] // 2, shape[1] // 2, qdata_shape[0]
        if qdata_shape != (stages, 2, n, packed_width(m)) or not 1 <= stages <= MAX_STAGES:
            raise InputError(
                f"qdata must have the shape (num_stages, 2, {n}, {packed_width(m)}), 1 to "
                f"{MAX_STAGES} stages, for a weight {shape}; got {qdata_shape}; use "
                "Fairy2iTensor.from_codes"
            )
        allowed = [(1, 1), *((n, groups) for groups in range(1, m + 1) if m % groups == 0)]
        if scale_shape not in [(stages, 2, 2, *each) for each in allowed]:
            raise InputError(
                f"scale must have the shape ({stages}, 2, 2, 1, 1), or ({stages}, 2, 2, {n}, "
                f"groups) with groups that divide {m}; got {scale_shape}"
            )

    @classmethod
    def from_codes(
        cls, codes: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16
    ) -> "Fairy2iTensor":
        """Pack codes and scales, as `Fairy2iMethod.codes` returns them.

        Args:
            codes: Powers of i of U and W, (num_stages, 2, n, m), int8 in {0, 1, 2, 3}.
            scales: Scales (num_stages, 2, 2, 1, 1), or (num_stages, 2, 2, n, groups) with groups
                that divide m. `GroupTensor.from_codes` describes the allowed dtypes.
            dtype: The dtype to present.

        Raises:
            InputTypeError: If codes, scales or ``dtype`` have another dtype.
            InputError: If a shape or a code is wrong, or bfloat16 would round a scale.
        """
        check_codes(codes, 0, 3)
        if codes.dim() != 4:
            raise InputError(
                f"codes must have the shape (num_stages, 2, n, m); got {tuple(codes.shape)}"
            )
        shape = (2 * codes.shape[2], 2 * codes.shape[3])
        return cls(pack2(codes), exact_bfloat16(scales).contiguous(), shape, dtype)

    def codes(self) -> Tensor:
        """Return the codes (num_stages, 2, n, m), int8 in {0, 1, 2, 3}.

        A transpose returns the codes of its weight.
        """
        return unpack2(self.qdata, self.weight_shape[1] // 2).to(torch.int8)

    def dequantize_weight(self, *, for_now: bool = False) -> Tensor:
        """Return the weight (2n, 2m) of `Fairy2iMethod.hard`, dense, in the presented dtype."""
        return dequantize_codes(self.codes(), self.scale, self.dtype)
