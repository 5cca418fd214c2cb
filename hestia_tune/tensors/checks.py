"""The rules that codes, scales and packed shapes obey, and the errors of those that do not.

Checks that look at values are skipped on the meta device, where there are none.
"""

import torch

from hestia_tune.methods.base import require_float
from hestia_tune.methods.granularity import GroupSize
from hestia_tune.tensors.bitpack import packed_width


def packed_dim(qdata_shape: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The axis along which codes share bytes: the last, or 0 if transposed.

    Raises:
        ValueError: if ``qdata`` has not the shape that ``shape`` needs.
    """
    shape, qdata_shape = tuple(shape), tuple(qdata_shape)
    if shape and qdata_shape == (*shape[:-1], packed_width(shape[-1])):
        return len(shape) - 1
    if len(shape) == 2 and qdata_shape == (packed_width(shape[0]), shape[1]):
        return 0
    raise ValueError(
        f"qdata must hold 4 codes a byte along the last axis of the shape {shape}; got the "
        f"shape {qdata_shape}; use TernaryTensor.from_codes"
    )


def checked_codes(codes: torch.Tensor) -> torch.Tensor:
    """``codes``; raises unless they are int8 in {-1, 0, 1}."""
    if codes.dtype != torch.int8:
        raise TypeError(f"codes must be int8; got {codes.dtype}")
    if not codes.is_meta and codes.numel():
        low, high = codes.aminmax()
        if low < -1 or high > 1:
            raise ValueError(f"codes must be -1, 0 or 1; got {low.item()} to {high.item()}")
    return codes


def exact_bfloat16(scale: torch.Tensor) -> torch.Tensor:
    """``scale`` as bfloat16; raises if that would change a value."""
    require_float(scale)
    rounded = scale.to(torch.bfloat16)
    same = (rounded.to(scale.dtype) == scale) | scale.isnan()
    if not scale.is_meta and not same.all():
        value = scale[~same][0].item()
        raise ValueError(
            f"scales must be bfloat16 values, so that every export is exact; got {value!r}; "
            "round them before the codes are chosen"
        )
    return rounded


def block_size_of(codes: torch.Tensor, scale: torch.Tensor) -> tuple[int, int]:
    """Weights along each axis that share a scale, from the shapes of codes and scales.

    Raises:
        ValueError: if scales of that shape cannot tile the codes.
    """
    if codes.dim() == 2 and scale.dim() == 2 and scale.shape[1]:
        (out_features, in_features), (rows, groups) = codes.shape, scale.shape
        if rows == out_features and in_features % groups == 0:
            return 1, in_features // groups
        if rows == groups == 1:
            return out_features, in_features
    raise ValueError(
        "scale must have the shape (out_features, groups) with groups that divide in_features, "
        f"(out_features, 1) or (1, 1); got {tuple(scale.shape)} for codes {tuple(codes.shape)}"
    )


def not_ternary(magnitude: torch.Tensor, row: int, group: int, group_size: GroupSize) -> str:
    """The message for a group that is not -scale, 0, scale."""
    values = magnitude[magnitude != 0].unique()
    shown = ", ".join(f"{value:.8g}" for value in values[:3].tolist())
    return (
        f"a hard weight has one absolute value besides 0 per group of {group_size}, a bfloat16 "
        f"value; row {row}, group {group} has {len(values)}: {shown}; convert the model first, or "
        "use the group_size it was trained with"
    )
