"""Packed weights for inference, their bits, files, and the way to torchao's own tensor."""

from collections.abc import Sequence

import torch

# The modules in the next lines register what the packed tensors do under torch's operators.
from hestia_tune.methods import Method
from hestia_tune.tensors import (  # noqa: F401
    fairy2i_ops,
    ternary_collectives,
    ternary_ops,
    ternary_views,
)
from hestia_tune.tensors.bitpack import pack2, pack_base3, unpack2, unpack_base3
from hestia_tune.tensors.fairy2i_tensor import Fairy2iTensor
from hestia_tune.tensors.intx import to_intx
from hestia_tune.tensors.serialization import load_safetensors, save_safetensors
from hestia_tune.tensors.ternary_tensor import TernaryTensor

__all__ = [
    "Fairy2iTensor",
    "TernaryTensor",
    "load_safetensors",
    "pack",
    "pack2",
    "pack_base3",
    "save_safetensors",
    "to_intx",
    "unpack2",
    "unpack_base3",
]

_FORMATS = {
    "ternary": TernaryTensor.from_codes,
    "intx": to_intx,
    "fairy2i": Fairy2iTensor.from_codes,
}


def pack(
    method: Method,
    latent: torch.Tensor,
    packed_format: str | None = None,
    parameters: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """The packed hard weight of a latent weight (out_features, in_features), in its dtype.

    Args:
        method: the method it was trained with.
        latent: the latent weight.
        packed_format: one of the method's ``packed_formats``; None takes the first.
        parameters: of the method, if it has any.

    Raises:
        ValueError: if the method has no packed format of that name.
    """
    packed_format = packed_format or next(iter(method.packed_formats), None)
    if packed_format not in method.packed_formats:
        known = ", ".join(method.packed_formats) or "none"
        raise ValueError(f"{method.key()} packs as {known}; got {packed_format}")
    codes, scale = method.codes(latent, parameters)
    return _FORMATS[packed_format](codes, scale, dtype=latent.dtype)
