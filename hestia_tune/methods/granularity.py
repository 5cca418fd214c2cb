"""How many weights share one scale.

A weight (out_features, in_features) is seen as a 3-D block view (rows, groups, group): the last
axis is what one scale covers. Every method works on that view, so one formula serves all three
granularities, and a row shard of the weight can be quantized on its own unless the granularity is
"tensor".

    int g      (out_features, in_features / g, g)    the paper's setting is 128
    "channel"  (out_features, 1, in_features)
    "tensor"   (1, 1, out_features * in_features)
"""

import torch

GroupSize = int | str


def validate_group_size(group_size: GroupSize) -> None:
    """Checks the option itself, before any weight is known.

    Raises:
        TypeError: if ``group_size`` is neither an int nor a string.
        ValueError: if it is not positive, or another word than "channel" or "tensor".
    """
    rule = 'group_size must be a positive int, "channel" or "tensor"'
    if isinstance(group_size, bool) or not isinstance(group_size, int | str):
        raise TypeError(f"{rule}; got {group_size!r} of type {type(group_size).__name__}")
    if isinstance(group_size, int) and group_size <= 0:
        raise ValueError(f'{rule}; got {group_size}; use "tensor" for one scale per weight')
    if isinstance(group_size, str) and group_size not in ("channel", "tensor"):
        raise ValueError(f"{rule}; got {group_size!r}")


def check_divides(group_size: GroupSize, in_features: int, name: str = "the weight") -> None:
    """Raises ValueError, naming the layer and the sizes that work, if groups do not tile a row."""
    if isinstance(group_size, int) and in_features % group_size:
        usable = [g for g in range(32, in_features + 1, 32) if in_features % g == 0]
        sizes = "".join(f"{g}, " for g in usable)
        raise ValueError(
            f"group_size {group_size} does not divide in_features {in_features} of {name}; "
            f'use one of {sizes}"channel" or "tensor"'
        )


def block_view(weight: torch.Tensor, group_size: GroupSize) -> torch.Tensor:
    """Views (out_features, in_features) as (rows, groups, group); see the module docstring."""
    if weight.dim() != 2:
        raise ValueError(
            f"weight must have the shape (out_features, in_features); got {tuple(weight.shape)}"
        )
    if group_size == "tensor":
        return weight.reshape(1, 1, -1)
    check_divides(group_size, weight.shape[1])
    group = weight.shape[1] if group_size == "channel" else group_size
    return weight.unflatten(1, (-1, group))
