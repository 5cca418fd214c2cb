"""Packed weights for inference, their bits, and the way to torchao's own tensor.

`pack` and `pack_hard` are how the rest of the package makes them: what a method's codes go into is
one of its ``packed_formats``, and here is the one table of those.
"""

import dataclasses

import torch

# The modules in the next line register what the packed tensors do under torch's operators.
from hestia_tune.methods import Method
from hestia_tune.tensors import ternary_collectives, ternary_views  # noqa: F401
from hestia_tune.tensors.bitpack import pack2, unpack2
from hestia_tune.tensors.fairy2i_tensor import Fairy2iTensor
from hestia_tune.tensors.intx import to_intx
from hestia_tune.tensors.packed_tensor import packed_linear
from hestia_tune.tensors.ternary_tensor import TernaryTensor

__all__ = [
    "Fairy2iTensor",
    "TernaryTensor",
    "pack",
    "pack2",
    "pack_hard",
    "packed_linear",
    "to_intx",
    "unpack2",
]

_FROM_CODES = {
    "ternary": TernaryTensor.from_codes,
    "intx": to_intx,
    "fairy2i": Fairy2iTensor.from_codes,
}
# Of a method's first format, where codes follow from hard weights.
_FROM_HARD = {"ternary": TernaryTensor.from_hard}


def check_format(method: Method, packed_format: str | None) -> str:
    """``packed_format``, or the method's first if None; ValueError if it has none of that name."""
    packed_format = packed_format or next(iter(method.packed_formats), None)
    if packed_format not in method.packed_formats:
        known = ", ".join(method.packed_formats) or "none"
        raise ValueError(f"{method.key()} packs as {known}; got {packed_format}; use one of those")
    return packed_format


def pack(method: Method, latent: torch.Tensor, packed_format: str | None = None) -> torch.Tensor:
    """The packed hard weight of a latent weight (out_features, in_features), in its dtype.

    Args:
        method: the method it was trained with.
        latent: the latent weight.
        packed_format: one of the method's ``packed_formats``; None takes the first.

    Raises:
        ValueError: if the method has no packed format of that name.
    """
    packed_format = check_format(method, packed_format)
    codes, scale = method.codes(latent)
    return _FROM_CODES[packed_format](codes, scale, dtype=latent.dtype)


def pack_hard(method: Method, hard: torch.Tensor, packed_format: str | None = None) -> torch.Tensor:
    """As `pack`, of a hard weight that is already there, exactly.

    Args:
        method: one whose ``codes_follow_from_hard``.
        hard: (out_features, in_features), every weight scale times code.
        packed_format: one of the method's ``packed_formats``; None takes the first.

    Raises:
        ValueError: if ``hard`` is no hard weight of the method, or on another format.
    """
    packed_format = check_format(method, packed_format)
    own = _FROM_HARD[method.packed_formats[0]](hard, **dataclasses.asdict(method))
    return _FROM_CODES[packed_format](own.codes(), own.scale, dtype=hard.dtype)
