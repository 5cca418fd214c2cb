"""The kinds of `GroupTensor`: which codes, in how many bits."""

from functools import partial

from hestia_tune.methods import EvenMethod, TernaryMethod
from hestia_tune.tensors.group_tensor import GroupTensor


class TernaryTensor(GroupTensor):
    """Codes -1, 0, 1, four to a byte: code + 1."""

    method_type = TernaryMethod
    levels, bits = 3, 2
    hard_rule = "one absolute value besides 0"


class INT2Tensor(GroupTensor):
    """Codes -3, -1, 1, 3, four to a byte: (code + 3) / 2. The scale is half the distance of two
    levels."""

    method_type = partial(EvenMethod, codebook="int2")
    levels, bits = 4, 2
    hard_rule = "one absolute value and three times it"


class BinaryTensor(GroupTensor):
    """Codes -1, 1, eight to a byte: (code + 1) / 2."""

    method_type = partial(EvenMethod, codebook="binary")
    levels, bits = 2, 1
    hard_rule = "one absolute value"
