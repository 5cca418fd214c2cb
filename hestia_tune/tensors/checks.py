"""The rules that codes and scales obey, and the errors of those that do not.

Checks that look at values are skipped on the meta device, where there are none.
"""

import torch

from hestia_tune.methods.base import require_float


def check_codes(codes: torch.Tensor, low: int, high: int) -> None:
    """Raises unless ``codes`` are int8 from ``low`` to ``high``."""
    if codes.dtype != torch.int8:
        raise TypeError(f"codes must be int8; got {codes.dtype}")
    if not codes.is_meta and codes.numel():
        found = [value.item() for value in codes.aminmax()]
        if found[0] < low or found[1] > high:
            raise ValueError(f"codes must be {low} to {high}; got {found[0]} to {found[1]}")


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
