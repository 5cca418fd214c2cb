"""`Fairy2iTensor`: a weight held as complex codes of 2 bits, in residual stages, and their scales.

The weight of a plain `nn.Linear` can be one, as it can be a `TernaryTensor`: it presents a dtype
and is multiplied as its dequantized weight would be, to the last bit, in that dtype. T stages take
T bits a real weight, plus the scales.

Layout. A weight (2n, 2m) is ``qdata`` (T, 2, n, ceil(m / 4)), the powers of i of U and W in 2 bits,
`bitpack.pack2`, and ``scale`` (T, 2, 2, 1, 1) or (T, 2, 2, n, groups): stage, U or W, s_re or s_im.
An entry of U and W stands for two rows and two columns, i and n + i, j and m + j. A transpose has
the same parts and a flag.

Checkpoints must carry codes. A hard weight does not tell them: each of its entries is a sum of 2·T
scaled digits, rounded to the weight's dtype, that several sets of codes and scales can make, and
quantizing it anew makes another weight. So `from_hard`, which the ternary tensor has, is not
offered: save what `Fairy2iMethod.codes` gives for the latent weight, or the tensor itself.
"""

import torch

from hestia_tune.errors import InputError
from hestia_tune.methods.fairy2i import MAX_STAGES, Fairy2iMethod, dequantize_codes
from hestia_tune.tensors.bitpack import pack2, packed_width, unpack2
from hestia_tune.tensors.packed_tensor import PackedTensor, check_codes, exact_bfloat16


class Fairy2iTensor(PackedTensor):
    """A complex weight for inference; make one with `from_codes` or `from_hp`.

    Tensor Attributes:
        qdata: uint8 (num_stages, 2, n, ceil(m / 4)), powers of i, four to a byte.
        scale: bfloat16 (num_stages, 2, 2, 1, 1) or (num_stages, 2, 2, n, groups).

    Non-Tensor Attributes: those of `PackedTensor`.
        dtype: stages are added in float32 (float64 for float64), and the sum is rounded to it once.
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
        cls, codes: torch.Tensor, scales: torch.Tensor, *, dtype: torch.dtype = torch.bfloat16
    ) -> "Fairy2iTensor":
        """Packs codes and scales as `Fairy2iMethod.codes` gives them.

        Args:
            codes: (num_stages, 2, n, m), int8 in {0, 1, 2, 3}: powers of i of U and W.
            scales: (num_stages, 2, 2, 1, 1), or (num_stages, 2, 2, n, groups) with groups that
                divide m; their dtype, and errors, as of `GroupTensor.from_codes`.
            dtype: the dtype to present.
        """
        check_codes(codes, 0, 3)
        if codes.dim() != 4:
            raise InputError(
                f"codes must have the shape (num_stages, 2, n, m); got {tuple(codes.shape)}"
            )
        shape = (2 * codes.shape[2], 2 * codes.shape[3])
        return cls(pack2(codes), exact_bfloat16(scales).contiguous(), shape, dtype)

    def codes(self) -> torch.Tensor:
        """int8 in {0, 1, 2, 3}, (num_stages, 2, n, m); of a transpose, those of the weight."""
        return unpack2(self.qdata, self.weight_shape[1] // 2).to(torch.int8)

    def dequantize_weight(self, *, for_now: bool = False) -> torch.Tensor:
        """The dense weight (2n, 2m) in the presented dtype, as `Fairy2iMethod.hard` makes it."""
        return dequantize_codes(self.codes(), self.scale, self.dtype)
