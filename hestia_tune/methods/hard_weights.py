"""Recognise weights that are hard already, and find latent weights that continue from them.

A weight is hard if every group is a scale times codes (`hestia_tune.methods.groups` lists the
codes). The group size is not stored in a dense weight, so `find_group_size` searches for it. A
dense weight is refused after its first rows. A hard weight is read once or twice.

Training that begins at full pressure never sees the latent weight itself. It sees what the method
makes of it. A method whose scale is mean|w| makes a hard weight smaller, because the mean counts
zeros. So `latent_of_hard` stretches the weight first.
"""

import torch
from torch import Tensor

from hestia_tune.methods.base import compute_dtype
from hestia_tune.methods.granularity import GroupSize, block_view
from hestia_tune.methods.groups import SCALE_EPS, GroupMethod, nearest_code, scale_of_hard

# How many rows decide that a weight is dense, before all rows are looked at.
_FIRST_ROWS = 8


def is_hard(weight: Tensor, group_size: GroupSize, levels: int = 3) -> bool:
    """Return whether a weight is a scale times codes in every group.

    With two and three levels, the scale may be any number: rounding it to bfloat16 keeps the weight
    hard. With more levels, it must be rounded already as `round_scale` does.

    Args:
        weight: The weight (out_features, in_features).
        group_size: An int that divides in_features, "channel" or "tensor".
        levels: The number of codes: 2, 3, 4 or 16.
    """

    def fits(rows: Tensor) -> bool:
        blocks = block_view(rows, group_size).to(compute_dtype(rows))
        largest = blocks.abs().amax(-1, keepdim=True)
        scale = scale_of_hard(blocks, levels) if levels > 3 else largest
        return bool((nearest_code(blocks, scale, levels) * scale == blocks).all())

    return fits(weight[:_FIRST_ROWS]) and fits(weight)


def find_group_size(weight: Tensor, levels: int = 3) -> GroupSize | None:
    """Return the largest group size at which a weight is hard.

    Args:
        weight: The weight (out_features, in_features).
        levels: The number of codes.

    Returns:
        "tensor", "channel", or the largest multiple of 32 that divides in_features and fits. None
        if nothing fits.
    """
    width = weight.shape[1]
    multiples = (size for size in range(width // 32 * 32, 0, -32) if width % size == 0)
    sizes: list[GroupSize] = ["tensor", "channel", *multiples]
    return next((size for size in sizes if is_hard(weight, size, levels)), None)


def find_codes(weight: Tensor) -> tuple[int, GroupSize] | tuple[None, None]:
    """Return the fewest levels and the largest group size at which a weight is hard.

    Args:
        weight: The weight (out_features, in_features).

    Returns:
        The number of codes (2, 3, 4 or 16) and the group size; or None and None for another weight.
    """
    for levels in (2, 3, 4, 16):
        if size := find_group_size(weight, levels):
            return levels, size
    return None, None


def latent_of_hard(method: GroupMethod, weight: Tensor) -> Tensor:
    """Return a latent weight, float32, whose forward pass at full pressure is a hard weight.

    The equality is exact at tau 0, with the method's initial parameters. `GroupMethod.hard` of the
    latent weight is the hard weight too. If the hard weight itself has this property, it is
    returned. Otherwise each group of n weights, of which k are not zero, is multiplied by n/k. Its
    mean|w| is then the scale.

    Args:
        method: The method that will train the weight.
        weight: A weight that `is_hard` with the method's group size and levels. Its scales are
            bfloat16 numbers.
    """
    weight = weight.float()
    zero, one = weight.new_tensor(0.0), weight.new_tensor(1.0)
    parameters = method.initial_parameters(weight)
    if torch.equal(method.effective_weight(weight, zero, one, parameters), weight):
        return weight
    blocks = method.blocks(weight)
    nonzeros = (blocks != 0).sum(-1, keepdim=True).clamp(min=1)
    scale = blocks.abs().amax(-1, keepdim=True).double()
    magnitude = (scale - SCALE_EPS).clamp(min=0.0) * blocks.shape[-1] / nonzeros
    # An odd last bit is no bfloat16 number. Otherwise `mean_scale` could take it for a scale.
    magnitude = (magnitude.float().view(torch.int32) | 1).view(torch.float32)
    return (torch.sign(blocks) * magnitude).view_as(weight)
