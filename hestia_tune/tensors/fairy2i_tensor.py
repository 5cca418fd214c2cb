"""`Fairy2iTensor`: a weight held as complex codes of 2 bits, in residual stages, and their scales.

The weight of a plain `nn.Linear` can be one, as it can be a `TernaryTensor`: it presents a dtype
and is multiplied as its dequantized weight would be, to the last bit, in that dtype. T stages take
T bits a real weight, plus the scales.

Layout. A weight (2n, 2m) is ``qdata`` (T, 2, n, ceil(m / 4)), the powers of i of U and W in 2 bits,
`bitpack.pack2`, and ``scale`` (T, 2, 2, 1, 1) or (T, 2, 2, n, groups): stage, U or W, s_re or s_im.
An entry of U and W stands for two rows and two columns, i and n + i, j and m + j, so no part of a
weight is one of these: there are transposes and whole copies, and neither slices nor shards.
A transpose has the same parts and a flag. All its operators are `PackedTensor`'s.

Checkpoints must carry codes. A hard weight does not tell them: each of its entries is a sum of 2·T
scaled digits, rounded to the weight's dtype, that several sets of codes and scales can make, and
quantizing it anew makes another weight. So `from_hard`, which the ternary tensor has, is not
offered: save what `Fairy2iMethod.codes` gives for the latent weight, or the tensor itself.
"""

import torch

from hestia_tune.methods.fairy2i import MAX_STAGES, Fairy2iMethod, Granularity, dequantize_codes
from hestia_tune.tensors.bitpack import pack2, packed_width, unpack2
from hestia_tune.tensors.checks import check_codes, exact_bfloat16
from hestia_tune.tensors.packed_tensor import PackedTensor


class Fairy2iTensor(PackedTensor):
    """A complex weight for inference; make one with `from_codes` or `from_hp`.

    Tensor Attributes:
        qdata: uint8 (num_stages, 2, n, ceil(m / 4)), powers of i, four to a byte.
        scale: bfloat16 (num_stages, 2, 2, 1, 1) or (num_stages, 2, 2, n, groups). Its dtype never
            changes.

    Non-Tensor Attributes:
        shape: (2n, 2m), or (2m, 2n) of a transpose.
        dtype: the floating-point dtype it presents; ``.to(dtype)`` changes it and nothing else.
            Stages are added in float32 (float64 for float64), and the sum is rounded to it once.
        is_transposed: whether this is `t()` of a weight.
    """

    tensor_attribute_names = ["shape", "dtype", "is_transposed"]
    method_type = Fairy2iMethod

    def __new__(cls, qdata, scale, shape, dtype, is_transposed=False):
        shape = tuple(shape)
        strides = (1, shape[0]) if is_transposed and len(shape) == 2 else None
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device=qdata.device, requires_grad=False
        )

    def __init__(self, qdata, scale, shape, dtype, is_transposed=False):
        super().__init__()
        self.check_dtypes(qdata, scale, dtype)
        shape = tuple(shape)[::-1] if is_transposed else tuple(shape)
        if len(shape) != 2 or any(size % 2 or size == 0 for size in shape):
            raise ValueError(f"shape must be two even numbers, none of them 0; got {shape}")
        n, m = shape[0] // 2, shape[1] // 2
        num_stages = qdata.shape[0] if qdata.dim() else 0
        if tuple(qdata.shape) != (num_stages, 2, n, packed_width(m)) or not (
            1 <= num_stages <= MAX_STAGES
        ):
            raise ValueError(
                f"qdata must have the shape (num_stages, 2, {n}, {packed_width(m)}), 1 to "
                f"{MAX_STAGES} stages, for a weight {shape}; got {tuple(qdata.shape)}; use "
                "Fairy2iTensor.from_codes"
            )
        *lead, rows, groups = scale.shape if scale.dim() > 1 else (0, 0)
        one_pair = rows == groups == 1
        per_row = rows == n and groups and m % groups == 0
        if lead != [num_stages, 2, 2] or not (one_pair or per_row):
            raise ValueError(
                f"scale must have the shape ({num_stages}, 2, 2, 1, 1), or ({num_stages}, 2, 2, "
                f"{n}, groups) with groups that divide {m}; got {tuple(scale.shape)}"
            )
        self.qdata = qdata
        self.scale = scale
        self.is_transposed = is_transposed

    def __repr__(self) -> str:
        return (
            f"Fairy2iTensor(shape={tuple(self.shape)}, num_stages={self.num_stages}, "
            f"granularity={self.granularity!r}, dtype={self.dtype}, device={self.device}, "
            f"is_transposed={self.is_transposed})"
        )

    @classmethod
    def refuse(cls, func):
        raise NotImplementedError(
            "a Fairy2iTensor can be multiplied in a linear, transposed and copied whole, and "
            "not cut, reshaped, joined or calculated with: rows i and n + i, and columns j and "
            f"m + j, share codes; got {func}; call dequantize() first, or, under FSDP or "
            "tensor parallelism, load the weight whole on every rank and leave it out of the "
            "sharding (`ignored_params` of fully_shard)"
        )

    @classmethod
    def from_codes(
        cls, codes: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype = torch.bfloat16
    ) -> "Fairy2iTensor":
        """Packs codes and scales as `Fairy2iMethod.codes` gives them.

        Args:
            codes: (num_stages, 2, n, m), int8 in {0, 1, 2, 3}: powers of i of U and W.
            scales: (num_stages, 2, 2, 1, 1), or (num_stages, 2, 2, n, groups) with groups that
                divide m; bfloat16, or a float dtype whose values bfloat16 holds exactly.
            dtype: the dtype to present.

        Raises:
            TypeError: on another dtype of codes, scales or ``dtype``.
            ValueError: on other shapes or codes, or scales that bfloat16 would round.
        """
        check_codes(codes, 0, 3)
        if codes.dim() != 4:
            raise ValueError(
                f"codes must have the shape (num_stages, 2, n, m); got {tuple(codes.shape)}"
            )
        shape = (2 * codes.shape[2], 2 * codes.shape[3])
        return cls(pack2(codes), exact_bfloat16(scales).contiguous(), shape, dtype)

    @property
    def num_stages(self) -> int:
        """Residual stages, each one bit per real weight."""
        return self.qdata.shape[0]

    @property
    def _complex_columns(self) -> int:
        return self.shape[0 if self.is_transposed else 1] // 2

    @property
    def granularity(self) -> Granularity:
        """The number of complex columns that share scales in a row, or "tensor"."""
        if tuple(self.scale.shape[3:]) == (1, 1):
            return "tensor"
        return self._complex_columns // self.scale.shape[-1]

    def codes(self) -> torch.Tensor:
        """int8 in {0, 1, 2, 3}, (num_stages, 2, n, m); of a transpose, those of the weight."""
        return unpack2(self.qdata, self._complex_columns).to(torch.int8)

    def dequantize(self) -> torch.Tensor:
        """The dense weight in the presented dtype, as `Fairy2iMethod.hard` makes it."""
        dense = dequantize_codes(self.codes(), self.scale, self.dtype)
        return dense.t() if self.is_transposed else dense

    def transposed(self) -> "Fairy2iTensor":
        """What `t()` makes: views of both parts, shape and flag turned."""
        turned = {"shape": self.shape[::-1], "is_transposed": not self.is_transposed}
        return self.rebuilt(*(part.detach() for part in self.parts), **turned)


# A checkpoint that holds Fairy2iTensors loads with weights_only=True.
torch.serialization.add_safe_globals([Fairy2iTensor])
