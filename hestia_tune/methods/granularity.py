"""Define how many weights share one scale.

Every method sees a weight (out_features, in_features) as a 3-D block view (rows, groups, group).
One scale covers the last axis. So one formula serves all three granularities. A row shard of the
weight can be quantized on its own, unless the granularity is "tensor".

    int g      (out_features, in_features / g, g)    The paper uses 128.
    "channel"  (out_features, 1, in_features)
    "tensor"   (1, 1, out_features * in_features)
"""

from collections.abc import Iterable
from math import gcd, inf

from torch import Tensor

from hestia_tune.errors import InputError, InputTypeError

GroupSize = int | str


def check_count(
    rule: str, value: int | str, words: tuple[str, ...] = (), most: float = inf
) -> None:
    """Check an option that is a positive int up to ``most``, or one of ``words``.

    Args:
        rule: The beginning of the errors, for example "num_stages must be an int from 1 to 4".
        value: The value of the option.
        words: The allowed strings.
        most: The largest allowed int.

    Raises:
        InputTypeError: If ``value`` is neither an int nor a string.
        InputError: If the int is out of range, or the string is another word.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InputTypeError(f"{rule}; got {value!r} of type {type(value).__name__}")
    if value not in words and (isinstance(value, str) or not 1 <= value <= most):
        raise InputError(f"{rule}; got {value!r}")


def validate_group_size(group_size: GroupSize) -> None:
    """Check the option itself by `check_count`, before any weight is known."""
    words = ("channel", "tensor")
    check_count('group_size must be a positive int, "channel" or "tensor"', group_size, words)


def check_divides(
    group_size: GroupSize,
    in_features: int,
    name: str = "the weight",
    *,
    widths: Iterable[int] = (),
    allows_tensor: bool = True,
) -> None:
    """Raise InputError, with the layer and the usable sizes, if groups do not tile a row.

    Args:
        group_size: The group size.
        in_features: The length of the rows.
        name: Name of the layer, for the error.
        widths: The lengths of all rows that have this group size. A usable size divides them all.
        allows_tensor: Whether a scale may cover several rows.
    """
    if isinstance(group_size, int) and in_features % group_size:
        common = gcd(in_features, *widths)
        usable = [size for size in range(32, common + 1, 32) if common % size == 0]
        sizes = [*map(str, usable), '"channel"', *(['"tensor"'] if allows_tensor else [])]
        choice = " or ".join(filter(None, [", ".join(sizes[:-1]), sizes[-1]]))
        raise InputError(
            f"group_size {group_size} does not divide in_features {in_features} of {name}; "
            f"use {'one of ' if len(sizes) > 1 else ''}{choice}"
        )


def require_matrix(weight: Tensor) -> None:
    """Raise InputError unless ``weight`` has two dimensions."""
    if weight.dim() != 2:
        raise InputError(
            f"weight must have the shape (out_features, in_features); got {tuple(weight.shape)}"
        )


def block_view(weight: Tensor, group_size: GroupSize, groups: int = -1) -> Tensor:
    """View (out_features, in_features) as (rows, groups, group); see the module docstring.

    A caller may pass the number of groups in a row, if a tensor has this size. A compiler then
    knows that in_features is a multiple of it.
    """
    require_matrix(weight)
    if group_size == "tensor":
        return weight.reshape(1, 1, -1)
    check_divides(group_size, weight.shape[1])
    group = weight.shape[1] if group_size == "channel" else group_size
    return weight.unflatten(1, (groups, group))
