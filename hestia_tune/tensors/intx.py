"""The same weights in torchao's own tensor, for people who have torchao and nothing of ours.

`IntxUnpackedToInt8Tensor` is what torchao's int2 weight-only quantization makes. It is built here
from codes and scales; quantizing dense weights through torchao's config would choose other scales
and put ternary codes a third of the range off. The price of the plain format is memory: a byte a
weight, four times the packed codes.
"""

import torch
from torchao.quantization import IntxUnpackedToInt8Tensor

from hestia_tune.tensors.checks import block_size_of, check_codes, exact_bfloat16


def to_intx(
    codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> IntxUnpackedToInt8Tensor:
    """An int2 tensor of torchao, zero point 0, that dequantizes to scale times code.

    Args:
        codes: (out_features, in_features), int8 in {-1, 0, 1}.
        scale: bfloat16 values, (out_features, groups), (out_features, 1) per channel or (1, 1) per
            tensor. The last is repeated for every row, because torchao cannot take rows out of
            blocks that span rows, as tensor parallelism does.
        dtype: bfloat16, float32 or float16; torchao keeps the scales in it.

    Raises:
        TypeError: on another dtype.
        ValueError: on other shapes or codes, scales that bfloat16 would round, or a scale too large
            for float16.
    """
    if dtype not in (torch.bfloat16, torch.float32, torch.float16):
        raise TypeError(f"torchao's intx has bfloat16, float32 or float16 weights; got {dtype}")
    check_codes(codes, -1, 1)
    rows_per_scale, group = block_size_of(codes, scale)
    exact = exact_bfloat16(scale)
    kept = exact.to(dtype)
    if not scale.is_meta and (kept.isinf() & exact.isfinite()).any():
        raise ValueError(
            f"scales must be at most 65504 for float16; got {exact.max().item()}; use bfloat16"
        )
    if rows_per_scale > 1:
        kept = kept.expand(codes.shape[0], 1)
    kept = kept.contiguous()
    return IntxUnpackedToInt8Tensor(
        qdata=codes,
        scale=kept,
        zero_point=torch.zeros_like(kept, dtype=torch.int8),
        target_dtype=torch.int2,
        block_size=(1, group),
        dtype=dtype,
        activation_quantization=None,
    )
