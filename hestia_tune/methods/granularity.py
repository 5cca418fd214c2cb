"""How many weights share one scale.

A weight (out_features, in_features) is seen as a 3-D block view (rows, groups, group): the last
axis is what one scale covers. Every method works on that view, so one formula serves all three
granularities, and a row shard of the weight can be quantized on its own unless the granularity is
"tensor".

    int g      (out_features, in_features / g, g)    the paper's setting is 128
    "channel"  (out_features, 1, in_features)
    "tensor"   (1, 1, out_features * in_features)
"""

from math import inf

import torch

from hestia_tune.errors import InputError, InputTypeError

GroupSize = int | str


def check_count(
    rule: str, value: int | str, words: tuple[str, ...] = (), most: float = inf
) -> None:
    """Checks an option that is a positive int up to ``most``, or one of ``words``.

    Raises:
        InputTypeError: if ``value`` is neither an int nor a string; begins with the ``rule``.
        InputError: if it is out of range or another word; likewise.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InputTypeError(f"{rule}; got {value!r} of type {type(value).__name__}")
    if value not in words and (isinstance(value, str) or not 1 <= value <= most):
        raise InputError(f"{rule}; got {value!r}")


def validate_group_size(group_size: GroupSize) -> None:
    """`check_count` of the option itself, before any weight is known."""
    words = ("channel", "tensor")
    check_count('group_size must be a positive int, "channel" or "tensor"', group_size, words)


def check_divides(group_size: GroupSize, in_features: int, name: str = "the weight") -> None:
    """Raises ValueError, naming the layer and the sizes that work, if groups do not tile a row."""
    if isinstance(group_size, int) and in_features % group_size:
        usable = [g for g in range(32, in_features + 1, 32) if in_features % g == 0]
        sizes = "".join(f"{g}, " for g in usable)
        raise InputError(
            f"group_size {group_size} does not divide in_features {in_features} of {name}; "
            f'use one of {sizes}"channel" or "tensor"'
        )


def block_view(weight: torch.Tensor, group_size: GroupSize) -> torch.Tensor:
    """Views (out_features, in_features) as (rows, groups, group); see the module docstring."""
    if weight.dim() != 2:
        raise InputError(
            f"weight must have the shape (out_features, in_features); got {tuple(weight.shape)}"
        )
    if group_size == "tensor":
        return weight.reshape(1, 1, -1)
    check_divides(group_size, weight.shape[1])
    group = weight.shape[1] if group_size == "channel" else group_size
    return weight.unflatten(1, (-1, group))
