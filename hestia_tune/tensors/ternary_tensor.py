"""`TernaryTensor`: a weight held as 2-bit codes and one bfloat16 scale per group.

The weight of a plain `nn.Linear` can be one; nothing else about the model changes. It presents a
dtype (what a dense weight in its place would have) and is multiplied as its dequantized weight
would be, to the last bit, in that dtype. Memory at rest is 2.125 bits a weight at group size 128.

Layout. A weight (out_features, in_features) is ``qdata`` (out_features, ceil(in_features / 4)),
code + 1 in 2 bits, `bitpack.pack2`, and ``scale`` (out_features, groups), (out_features, 1) or
(1, 1). ``block_size`` says how many weights along each axis share a scale, so that
``scale.shape[i] * block_size[i] == shape[i]``. Rows, columns and shards of a weight are
TernaryTensors too, as long as their groups are whole. A transposed one holds transposed views of
both parts; which axis is packed follows from the shapes, so it takes no attribute.

Operators that all packed tensors have are `PackedTensor`'s; views are in `ternary_views`,
collectives in `ternary_collectives`.
"""

import torch

from hestia_tune.methods import TernaryMethod
from hestia_tune.methods.base import require_float
from hestia_tune.methods.granularity import GroupSize, block_view
from hestia_tune.tensors.bitpack import pack2, packed_width, unpack2
from hestia_tune.tensors.checks import block_size_of, check_codes, exact_bfloat16
from hestia_tune.tensors.packed_tensor import PackedTensor


def _packed_dim(qdata_shape: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The axis along which codes share bytes: the last, or 0 if transposed."""
    shape, qdata_shape = tuple(shape), tuple(qdata_shape)
    if shape and qdata_shape == (*shape[:-1], packed_width(shape[-1])):
        return len(shape) - 1
    if len(shape) == 2 and qdata_shape == (packed_width(shape[0]), shape[1]):
        return 0
    raise ValueError(
        f"qdata must hold 4 codes a byte along the last axis of the shape {shape}; got the "
        f"shape {qdata_shape}; use TernaryTensor.from_codes"
    )


class TernaryTensor(PackedTensor):
    """A ternary weight for inference; make one with `from_codes`, `from_hp` or `from_hard`.

    Tensor Attributes:
        qdata: uint8, the codes plus one, four to a byte along the last axis.
        scale: bfloat16; multiplies the codes of its block. Its dtype never changes.

    Non-Tensor Attributes:
        block_size: weights along each axis that share a scale: (1, group_size), (1, in_features)
            per channel, (out_features, in_features) per tensor.
        shape: of the weight.
        dtype: the floating-point dtype it presents; ``.to(dtype)`` changes it and nothing else.
            bfloat16, float32 and float64 hold every value exactly. float16 rounds scales outside
            its normal range (6e-5 to 65504) when it is dequantized.
    """

    tensor_attribute_names = ["block_size", "shape", "dtype"]
    method_type = TernaryMethod

    def __new__(cls, qdata, scale, block_size, shape, dtype):
        shape = tuple(shape)
        strides = None
        if len(shape) == 2 and _packed_dim(qdata.shape, shape) == 0:
            strides = (1, shape[0])
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device=qdata.device, requires_grad=False
        )

    def __init__(self, qdata, scale, block_size, shape, dtype):
        super().__init__()
        block_size, shape = tuple(block_size), tuple(shape)
        self.check_dtypes(qdata, scale, dtype)
        covered = tuple(n * size for n, size in zip(scale.shape, block_size, strict=False))
        if not len(scale.shape) == len(block_size) == len(shape) or covered != shape:
            raise ValueError(
                f"scale.shape times block_size must be the shape {shape}; got scale.shape "
                f"{tuple(scale.shape)} and block_size {block_size}"
            )
        packed = _packed_dim(qdata.shape, shape)
        for axis, (n, size) in enumerate(zip(scale.shape, block_size, strict=True)):
            if axis != packed and n != 1 and size != 1:
                raise ValueError(
                    f"block_size must be 1 or the whole of axis {axis}, size {shape[axis]}, along "
                    f"which codes do not share bytes; got {size}"
                )
        self.qdata = qdata
        self.scale = scale
        self.block_size = block_size

    def __repr__(self) -> str:
        return (
            f"TernaryTensor(shape={tuple(self.shape)}, block_size={self.block_size}, "
            f"dtype={self.dtype}, device={self.device})"
        )

    @classmethod
    def from_codes(
        cls, codes: torch.Tensor, scale: torch.Tensor, *, dtype: torch.dtype = torch.bfloat16
    ) -> "TernaryTensor":
        """Packs codes and scales as `hestia_tune.functional.ternary_codes` gives them.

        Args:
            codes: (out_features, in_features), int8 in {-1, 0, 1}.
            scale: (out_features, groups), (out_features, 1) per channel or (1, 1) per tensor;
                bfloat16, or a float dtype whose values bfloat16 holds exactly.
            dtype: the dtype to present.

        Raises:
            TypeError: on another dtype of codes, scales or ``dtype``.
            ValueError: on other shapes or codes, or scales that bfloat16 would round.
        """
        check_codes(codes, -1, 1)
        block_size = block_size_of(codes, scale)
        scale = exact_bfloat16(scale).contiguous()
        return cls(pack2(codes + 1), scale, block_size, codes.shape, dtype)

    @classmethod
    def from_hard(
        cls,
        weight: torch.Tensor,
        *,
        group_size: GroupSize = 128,
        dtype: torch.dtype | None = None,
    ) -> "TernaryTensor":
        """Recovers codes and scales of a hard weight, exactly.

        The scale of a group is the one absolute value that occurs in it; where all weights are
        zero no scale is left to recover, and 0 stands for it.

        Args:
            weight: (out_features, in_features), each weight -scale, 0 or scale of its group.
            group_size: an int that divides in_features, "channel" or "tensor".
            dtype: the dtype to present; that of ``weight`` if None.

        Raises:
            TypeError: on a weight that is not floating point.
            ValueError: naming the first row and group that are not ternary, or whose scale is no
                bfloat16 value; or on a group size that does not divide in_features.
        """
        require_float(weight)
        blocks = block_view(weight.detach(), group_size)
        magnitude = blocks.abs()
        largest = magnitude.amax(-1, keepdim=True)
        rounded = largest.to(torch.bfloat16)
        exact = (rounded.to(weight.dtype) == largest) & largest.isfinite()
        ternary = ((magnitude == largest) | (magnitude == 0)).all(-1, keepdim=True)
        if not weight.is_meta and not (exact & ternary).all():
            row, group = (~(exact & ternary)).squeeze(-1).nonzero()[0].tolist()
            values = magnitude[row, group].unique()
            values = values[values != 0]
            shown = ", ".join(f"{value:.8g}" for value in values[:3].tolist())
            raise ValueError(
                "a hard weight has one absolute value besides 0 per group of "
                f"{group_size}, a bfloat16 value; row {row}, group {group} has {len(values)}: "
                f"{shown}; convert the model first, or use the group_size it was trained with"
            )
        codes = blocks.sign().to(torch.int8).view_as(weight)
        return cls.from_codes(codes, rounded.squeeze(-1), dtype=dtype or weight.dtype)

    @property
    def packed_dim(self) -> int:
        """The axis along which codes share bytes: the last, or 0 if transposed."""
        return _packed_dim(self.qdata.shape, self.shape)

    @property
    def is_transposed(self) -> bool:
        """Whether this is `t()` of a weight: codes share bytes along axis 0."""
        return self.dim() == 2 and self.packed_dim == 0

    def codes(self) -> torch.Tensor:
        """int8 in {-1, 0, 1}, of this tensor's shape."""
        if self.is_transposed:
            return self.t().codes().t()
        return unpack2(self.qdata, self.shape[-1]).to(torch.int8) - 1

    def dequantize(self) -> torch.Tensor:
        """The dense weight, scale times code, in the presented dtype; see there about float16."""
        if self.is_transposed:
            return self.t().dequantize().t()
        groups = (self.scale.shape[-1], self.block_size[-1])
        blocks = self.codes().to(self.scale.dtype).unflatten(-1, groups)
        # A code times a bfloat16 scale is exact; only then comes the presented dtype.
        return (blocks * self.scale.unsqueeze(-1)).flatten(-2).to(self.dtype)

    def transposed(self) -> "TernaryTensor":
        """What `t()` makes: transposed views of both parts."""
        turned = {"block_size": self.block_size[::-1], "shape": self.shape[::-1]}
        return self.rebuilt(*(part.t() for part in self.parts), **turned)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        """What FSDP2 gathers: the packed codes, and the scales unless one covers all rows.

        Raises:
            ValueError: if the rows do not divide evenly. FSDP2 gathers uneven shards only from
                tensors of the weight's own shape, which packed codes have not.
        """
        if outer_size[0] % mesh.size():
            raise ValueError(
                f"FSDP can shard a TernaryTensor only evenly; got {outer_size[0]} rows on "
                f"{mesh.size()} ranks; use a number of ranks that divides them"
            )
        inputs = self.parts if self.block_size[0] == 1 else (self.qdata,)
        return inputs, tuple(outer_size)

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        """The whole weight from what was gathered, presented in ``param_dtype``."""
        shape, one_scale = metadata, len(all_gather_outputs) == 1
        qdata, scale = (*all_gather_outputs, self.scale) if one_scale else all_gather_outputs
        if out is not None:  # FSDP2 has refilled the memory of the parts in place
            return None
        block_size = shape if one_scale else self.block_size
        attributes = {"block_size": block_size, "shape": shape, "dtype": param_dtype}
        whole = self.rebuilt(qdata, scale, **attributes)
        return whole, tuple(all_gather_outputs)


# A checkpoint that holds TernaryTensors loads with weights_only=True.
torch.serialization.add_safe_globals([TernaryTensor])
