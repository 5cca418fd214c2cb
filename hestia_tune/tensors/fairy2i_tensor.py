"""Define `Fairy2iTensor`: a weight held as complex codes of 2 bits, in residual stages, and scales.

The weight of a plain `nn.Linear` can be a `Fairy2iTensor`, like a `TernaryTensor`. It presents a
dtype. A product with it equals the product with its dequantized weight in this dtype, to the last
bit. T stages take T bits per real weight, plus the scales.

Layout. A weight (2n, 2m) is ``qdata`` (T, 2, n, ceil(m / 4)) and ``scale``. ``qdata`` holds the
powers of i of U and W in 2 bits, by `bitpack.pack2`. ``scale`` is (T, 2, 2, 1, 1) or
(T, 2, 2, n, groups): stage, U or W, s_re or s_im. An entry of U and W stores two rows and two
columns: i and n + i, j and m + j. A transpose has the same parts and a flag.

Checkpoints must carry codes, because a hard weight does not determine them. Each entry of a hard
weight is a sum of 2·T scaled digits, rounded to the weight's dtype. Several sets of codes and
scales can make this sum, and a second quantization makes another weight. So this tensor has no
`from_hard`, unlike the ternary tensor. Save the codes and scales that `Fairy2iMethod.codes` returns
for the latent weight, or save the tensor itself.
"""

import torch
from torch import Tensor

from hestia_tune.errors import InputError
from hestia_tune.methods.fairy2i import MAX_STAGES, Fairy2iMethod, dequantize_codes
from hestia_tune.tensors.bitpack import pack2, packed_width, unpack2
from hestia_tune.tensors.packed_tensor import PackedTensor, check_codes, exact_bfloat16


class Fairy2iTensor(PackedTensor):
    """Hold a complex weight for inference; make one with `from_codes` or `from_hp`.

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
