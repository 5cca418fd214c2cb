"""Quantizers: one file per method, stateless, with a closed-form backward."""

from hestia_tune.methods.base import Method, effective_weight
from hestia_tune.methods.fairy2i import Fairy2iMethod
from hestia_tune.methods.linear import quantized_linear
from hestia_tune.methods.ternary import TernaryMethod

__all__ = [
    "Fairy2iMethod",
    "Method",
    "TernaryMethod",
    "effective_weight",
    "quantized_linear",
]
