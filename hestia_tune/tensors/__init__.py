"""Pack weights for inference, into tensors of this package or torchao's own tensor.

The rest of the package packs weights by `pack`. The codes of a method say which tensors hold them
(`packed_formats`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hestia_tune.errors import InputError
from hestia_tune.methods import Fairy2iMethod, GroupMethod, Method
from hestia_tune.methods.groups import (
    BINARY,
    INT4,
    SYMMETRIC,
    TERNARY,
    TWO_BIT,
    GroupSize,
    Levels,
)
from hestia_tune.methods.method import require_finite
from hestia_tune.tensors.group_tensor import (
    BinaryTensor,
    Fairy2iTensor,
    GroupTensor,
    INT2Tensor,
    INT4Tensor,
    TernaryTensor,
    TwoBitTensor,
    to_intx,
)
from hestia_tune.tensors.kernels import KernelUse, use_kernel

__all__ = [
    "BinaryTensor",
    "Fairy2iTensor",
    "INT2Tensor",
    "INT4Tensor",
    "KernelUse",
    "TernaryTensor",
    "TwoBitTensor",
    "check_format",
    "pack",
    "packed_formats",
    "read_hard",
    "to_intx",
    "use_kernel",
]

# A checkpoint with these tensors loads with weights_only=True.
torch.serialization.add_safe_globals(
    [BinaryTensor, Fairy2iTensor, INT2Tensor, INT4Tensor, TernaryTensor, TwoBitTensor]
)

_FROM_CODES = {
    "ternary": TernaryTensor.from_codes,
    "two_bit": TwoBitTensor.from_codes,
    "int2": INT2Tensor.from_codes,
    "int4": INT4Tensor.from_codes,
    "binary": BinaryTensor.from_codes,
    "intx": to_intx,
    "fairy2i": Fairy2iTensor.from_codes,
}
# Codes -> the packed tensors that hold them, the default first.
_PACKED_FORMATS = {
    BINARY: ("binary",),
    TERNARY: ("ternary", "intx"),
    TWO_BIT: ("two_bit", "intx"),
    SYMMETRIC: ("int2",),
    INT4: ("int4",),
    Fairy2iMethod.code_values: ("fairy2i",),
}
_KINDS = (BinaryTensor, TernaryTensor, TwoBitTensor, INT2Tensor, INT4Tensor)
BY_LEVELS = {kind.levels: kind for kind in _KINDS}


def read_hard(
    weight: Tensor, group_size: GroupSize, levels: Levels = TERNARY, name: str = "the weight"
) -> GroupTensor:
    """Return the packed tensor of a hard weight.

    Args:
        weight: See `GroupTensor.from_hard`, also for ``group_size``.
        group_size: Weights that share a scale.
        levels: The codes.
        name: Name of the weight, for errors.

    Raises:
        InputError: If the weight is not hard.
    """
    try:
        return BY_LEVELS[levels].from_hard(weight, group_size=group_size)
    except InputError as error:
        raise InputError(f"{name} is not a hard weight: {error}") from None


def packed_formats(method: Method) -> tuple[str, ...]:
    """Return the names of the packed tensors that hold the codes of a method, the default first."""
    return _PACKED_FORMATS.get(method.code_values, ())


def check_format(method: Method, packed_format: str | None) -> str:
    """Return ``packed_format``, or the method's first packed format if it is None.

    Raises:
        InputError: If the method has no packed format of this name.
    """
    allowed = packed_formats(method)
    packed_format = packed_format or next(iter(allowed), None)
    if packed_format not in allowed:
        known = ", ".join(allowed) or "none"
        raise InputError(f"{method.key()} packs as {known}; got {packed_format}; use one of those")
    return packed_format


def pack(
    method: Method,
    weight: Tensor,
    packed_format: str | None = None,
    parameters: Sequence[Tensor] = (),
    *,
    is_hard: bool = False,
    name: str = "the weight",
) -> Tensor:
    """Return the packed hard weight of a latent weight, in its dtype.

    Args:
        method: The method that trained the weight.
        weight: The latent weight (out_features, in_features).
        packed_format: One of the `packed_formats` of the method. None takes the first.
        parameters: The method's parameters, if it has any.
        is_hard: Whether ``weight`` is the hard weight already, to be packed without a change. The
            method must have ``codes_follow_from_hard``.
        name: Name of the weight, for errors.

    Raises:
        NotFiniteError: If the latent weight or a parameter has NaN or infinity.
        InputError: If the method has no packed format of this name, or a weight that should be
            hard is not.
    """
    packed_format = check_format(method, packed_format)
    if is_hard:
        if not isinstance(method, GroupMethod):
            raise InputError(
                f"{name}: the hard weight of {method.key()} has no codes that could be read back; "
                "give the latent weight"
            )
        read = read_hard(weight, method.group_size, method.levels, name)
        codes, scale = read.codes(), read.scale
    else:
        require_finite(name, weight, *parameters)
        codes, scale = method.codes(weight, parameters)
    return _FROM_CODES[packed_format](codes, scale, dtype=weight.dtype)
