"""`GroupTensor`: a weight held as codes of 1 or 2 bits and one bfloat16 scale per group.

The weight of a plain `nn.Linear` can be one; nothing else about the model changes. It presents a
dtype (what a dense weight in its place would have) and is multiplied as its dequantized weight
would be, to the last bit, in that dtype. Memory at rest is 2.125 bits a weight at group size 128,
1.125 of binary codes.

Layout. A weight (out_features, in_features) is ``qdata`` (out_features, ceil(in_features / n)), n
codes a byte (`bitpack`), and ``scale`` (out_features, groups), (out_features, 1) or (1, 1). Rows,
columns and shards of a weight are such tensors too, as long as their groups are whole. A transpose
has the same parts and a flag.

Operators that all packed tensors have are `PackedTensor`'s; the others are in `group_operators`.
What kinds there are is in `ternary_tensor`.
"""

import functools
from typing import ClassVar, TypeVar

import torch

from hestia_tune.methods.base import compute_dtype, require_float
from hestia_tune.methods.granularity import GroupSize, block_view
from hestia_tune.methods.groups import nearest_code
from hestia_tune.tensors.bitpack import pack_codes, packed_width, unpack_codes
from hestia_tune.tensors.packed_tensor import PackedTensor, check_codes, exact_bfloat16

T = TypeVar("T", bound="GroupTensor")


class GroupTensor(PackedTensor):
    """A weight of scales and codes for inference; make one of its kinds with `from_codes`,
    `from_hp` or `from_hard`.

    Class Attributes:
        levels: how many codes there are; they lie evenly around 0.
        bits: of a code.
        hard_rule: what a group of a hard weight is, in errors.

    Tensor Attributes:
        qdata: uint8, which of the codes it is, counted from the lowest, along the last axis.
        scale: bfloat16; multiplies the codes of its block.

    Non-Tensor Attributes: those of `PackedTensor`.
        dtype: bfloat16, float32 and float64 hold every value exactly. float16 rounds scales
            outside its normal range (6e-5 to 65504) when it is dequantized.
    """

    levels: ClassVar[int]
    bits: ClassVar[int]
    hard_rule: ClassVar[str]
    limits = "can be cut between groups and bytes, transposed, sharded, copied and multiplied"

    @classmethod
    def _grid(cls) -> tuple[int, int]:
        """The largest code, and the distance of two."""
        return (1, 1) if cls.levels == 3 else (cls.levels - 1, 2)

    def check_shapes(self, shape, qdata_shape, scale_shape):
        *rows, width = shape
        if qdata_shape != (*rows, packed_width(width, self.bits)):
            raise ValueError(
                f"qdata must hold {8 // self.bits} codes a byte along the last axis of the shape "
                f"{shape}; got the shape {qdata_shape}; use {type(self).__name__}.from_codes"
            )
        *scale_rows, groups = scale_shape
        per_group = width // max(1, groups)
        if scale_rows not in (rows, [1] * len(rows)) or groups * per_group != width:
            raise ValueError(
                "scale must have the shape (out_features or 1, groups) with groups that divide "
                f"in_features; got {scale_shape} for a weight {shape}"
            )

    @functools.cached_property  # which files of earlier versions hold, and may set
    def block_size(self) -> tuple[int, ...]:
        """Weights along each axis of the weight that share a scale: (1, group_size), (1,
        in_features) per channel, (out_features, in_features) per tensor."""
        sizes = zip(self.weight_shape, self.scale.shape, strict=True)
        return tuple(weights // max(1, scales) for weights, scales in sizes)

    @property
    def has_scale_per_row(self) -> bool:
        """Whether each row has scales of its own; otherwise one covers all rows."""
        return self.scale.shape[0] == self.weight_shape[0]

    @classmethod
    def from_codes(
        cls: type[T], codes: torch.Tensor, scale: torch.Tensor, *, dtype=torch.bfloat16
    ) -> T:
        """Packs codes and scales as `Method.codes` gives them.

        Args:
            codes: (out_features, in_features), int8, of those that this kind has.
            scale: (out_features, groups), (out_features, 1) per channel, or (1, groups) for all
                rows; bfloat16, or a float dtype whose values bfloat16 holds exactly.
            dtype: the dtype to present.

        Raises:
            TypeError: on another dtype of codes, scales or ``dtype``.
            ValueError: on other shapes or codes, or scales that bfloat16 would round.
        """
        largest, distance = cls._grid()
        check_codes(codes, -largest, largest)
        if distance == 2 and not codes.is_meta and (codes & 1 == 0).any():
            raise ValueError(f"codes of a {cls.__name__} must be odd; got an even one")
        packed = pack_codes((codes + largest) // distance, cls.bits)
        return cls(packed, exact_bfloat16(scale).contiguous(), codes.shape, dtype)

    @classmethod
    def from_hard(cls: type[T], weight: torch.Tensor, *, group_size: GroupSize = 128) -> T:
        """Recovers codes and scales of a hard weight, exactly, to present its dtype.

        The scale of a group is the largest absolute value in it, of four levels the smallest. Of
        codes with a 0, no scale is left to recover where all weights are zero, and 0 stands for it.

        Args:
            weight: (out_features, in_features), each weight the product of a code and the scale of
                its group.
            group_size: an int that divides in_features, "channel" or "tensor".

        Raises:
            TypeError: on a weight that is not floating point.
            ValueError: naming the first row and group that are not such products, or whose scale is
                no bfloat16 value; or on a group size that does not divide in_features.
        """
        require_float(weight)
        blocks = block_view(weight.detach(), group_size).to(compute_dtype(weight))
        low, high = blocks.abs().aminmax(dim=-1, keepdim=True)
        unit = low if cls.levels == 4 else high
        code, scale = nearest_code(blocks, unit, cls.levels), unit.to(torch.bfloat16)
        exact = (code * scale == blocks).all(-1, keepdim=True) & unit.isfinite()
        if not weight.is_meta and not exact.all():
            row, group = (~exact).squeeze(-1).nonzero()[0].tolist()
            shown = blocks[row, group].abs().unique()[-3:].tolist()
            raise ValueError(
                f"a hard weight has {cls.hard_rule} per group of {group_size}, a bfloat16 value; "
                f"row {row}, group {group} has {shown}; convert the model first, or use the "
                "group_size it was trained with"
            )
        codes = code.to(torch.int8).view_as(weight)
        return cls.from_codes(codes, scale.squeeze(-1), dtype=weight.dtype)

    def codes(self) -> torch.Tensor:
        """int8, of this tensor's shape."""
        if self.is_transposed:
            return self.t().codes().t()
        return self._unpacked(torch.int8)

    def _unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        largest, distance = self._grid()
        fields = unpack_codes(self.qdata, self.weight_shape[-1], self.bits).to(dtype)
        return (fields * distance if distance > 1 else fields) - largest

    def dequantize_weight(self) -> torch.Tensor:
        """(out_features, in_features), scale times code, in the presented dtype."""
        codes = self._unpacked(self.scale.dtype)
        blocks = codes.unflatten(-1, (self.scale.shape[-1], self.block_size[-1]))
        # A code times a bfloat16 scale is exact; only then comes the presented dtype.
        return blocks.mul_(self.scale.unsqueeze(-1)).flatten(-2).to(self.dtype)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        """What FSDP2 gathers: the packed codes, and the scales unless one covers all rows.

        Raises:
            ValueError: if the rows do not divide evenly. FSDP2 gathers uneven shards only from
                tensors of the weight's own shape, which packed codes have not.
        """
        if outer_size[0] % mesh.size():
            raise ValueError(
                f"FSDP can shard a {type(self).__name__} only evenly; got {outer_size[0]} rows on "
                f"{mesh.size()} ranks; use a number of ranks that divides them"
            )
        return self.parts if self.has_scale_per_row else (self.qdata,), tuple(outer_size)

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        """The whole weight from what was gathered, presented in ``param_dtype``."""
        if out is not None:  # FSDP2 has refilled the memory of the parts in place
            return None
        qdata, scale = (*all_gather_outputs, self.scale)[:2]
        whole = self.rebuilt(qdata, scale, shape=metadata, dtype=param_dtype)
        return whole, tuple(all_gather_outputs)
