"""Packed weights for inference, their bits, files, and the way to torchao's own tensor."""

# The modules in the next lines register what the packed tensors do under torch's operators.
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
    "pack2",
    "pack_base3",
    "save_safetensors",
    "to_intx",
    "unpack2",
    "unpack_base3",
]
