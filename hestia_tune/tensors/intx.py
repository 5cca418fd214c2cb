"""The same weights in torchao's own tensor, for people who have torchao and nothing of ours.

`IntxUnpackedToInt8Tensor` is what torchao's int2 weight-only quantization makes. It is built here
from codes and scales; quantizing dense weights through torchao's config would choose other scales
and put ternary codes a third of the range off. The price of the plain format is memory: a byte a
weight, four times the packed codes.
"""

import torch
from torchao.quantization import IntxUnpackedToInt8Tensor

from hestia_tune.errors import InputError, InputTypeError
from hestia_tune.tensors.ternary_tensor import TernaryTensor


def to_intx(
    codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> IntxUnpackedToInt8Tensor:
    """An int2 tensor of torchao, zero point 0, that dequantizes to scale times code.

    Args:
        codes: (out_features, in_features), int8 in {-1, 0, 1}.
        scale: as for `TernaryTensor.from_codes`. One of a whole tensor is repeated for every row,
            because torchao cannot take rows out of blocks that span rows.
        dtype: bfloat16, float32 or float16; torchao keeps the scales in it.

    Raises:
        InputError: as `TernaryTensor.from_codes`, or on a scale too large for float16.
    """
    if dtype not in (torch.bfloat16, torch.float32, torch.float16):
        raise InputTypeError(
            f"torchao's intx has bfloat16, float32 or float16 weights; got {dtype}"
        )
    packed = TernaryTensor.from_codes(codes, scale, dtype=dtype)
    kept = packed.scale.to(dtype).expand(codes.shape[0], -1).contiguous()
    if dtype == torch.float16 and not scale.is_meta and (scale > 65504).any():
        raise InputError("scales must be at most 65504 for float16; use bfloat16")
    return IntxUnpackedToInt8Tensor(
        qdata=codes,
        scale=kept,
        zero_point=torch.zeros_like(kept, dtype=torch.int8),
        target_dtype=torch.int2,
        block_size=(1, packed.block_size[1]),
        dtype=dtype,
        activation_quantization=None,
    )
