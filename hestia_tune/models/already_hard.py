"""Finds the layers of a pretrained model that are hard already, and describes their groups.

Training and conversion continue from the codes of these layers
(`hestia_tune.methods.hard_weights`). They need groups that fit: the method's group size must divide
the group size of the layer. The search reads each weight once or twice, one at a time.
"""

import math
from collections.abc import Iterable, Mapping

from torch import Tensor

from hestia_tune.errors import InputError, warn_once
from hestia_tune.methods import GroupMethod, Method
from hestia_tune.methods.granularity import GroupSize
from hestia_tune.methods.hard_weights import find_group_size, is_hard

# Number of codes -> what a weight with so many codes is called.
KINDS = {2: "binary", 3: "ternary", 4: "four levels"}


def find_hard(weights: Iterable[tuple[str, Tensor]], method: Method) -> dict[str, GroupSize]:
    """Return name -> group size of every layer that is hard already, in the codes of a method.

    Args:
        weights: Name and weight of every layer that the method quantizes.
        method: The method. Without groups (Fairy2i), nothing is hard already.

    Returns:
        The group sizes. If bfloat16 rounds a scale, there is a warning.

    Raises:
        InputError: If the method's group size would change a layer. The message names the layer,
            its group size and a group size that fits all layers.
    """
    found: dict[str, GroupSize] = {}
    widths, wrong, change = {}, [], 0.0
    for name, weight in weights if isinstance(method, GroupMethod) else ():
        size = find_group_size(weight, method.levels)
        fits = is_hard(weight, method.group_size, method.levels)
        if size or fits:
            found[name], widths[name] = size or method.group_size, weight.shape[1]
            wrong += [] if fits else [name]
            scales, rounded = weight.float().abs(), weight.bfloat16().float().abs()
            change = max(change, float((rounded / scales - 1).nan_to_num(0).abs().max()))
    found = named_alike(found, widths)
    if wrong:
        in_rows = all(isinstance(size, str) for size in found.values())
        sizes = (widths[n] if isinstance(s, str) else s for n, s in found.items())
        remedy = "channel" if in_rows else math.gcd(*sizes)
        raise InputError(
            f"{wrong[0]} is {KINDS[method.levels]} already, {groups_text([found[wrong[0]]])}; "
            f"quantizer.group_size {method.group_size} would change it; set "
            f"quantizer.group_size={remedy}"
        )
    if change:
        warn_once(f"scales of the pretrained model are rounded to bfloat16, by up to {change:.2%}")
    return found


def named_alike(found: Mapping[str, GroupSize], widths: Mapping[str, int]) -> dict[str, GroupSize]:
    """Return the group sizes with one word for one thing.

    A row of 128 weights is a channel, and a group of 128 as well. If other layers have groups of
    128, it is called 128.

    Args:
        found: Name -> group size of each layer.
        widths: Name -> in_features of each layer.
    """
    return {
        name: widths[name] if size == "channel" and widths[name] in found.values() else size
        for name, size in found.items()
    }


def groups_text(sizes: Iterable[GroupSize]) -> str:
    """Return group sizes in words, for example "in groups of 128"."""
    words = {"channel": "with one scale per row", "tensor": "with one scale per matrix"}
    texts = dict.fromkeys(words.get(str(size), f"in groups of {size}") for size in sizes)
    return " or ".join(texts)


def describe(found: Mapping[str, GroupSize], levels: int, layers: int) -> str:
    """Return a description of a model that is hard already, for the log.

    Args:
        found: What `find_hard` returned, at least one layer.
        levels: The number of the method's codes.
        layers: How many layers the method quantizes.
    """
    where = "" if len(found) == layers else f" in {len(found)} of {layers} linears"
    return f"{KINDS[levels]} already{where}, {groups_text(found.values())}"
