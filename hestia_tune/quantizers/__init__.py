"""Quantizers: one file per method, stateless, with a closed-form backward."""

from hestia_tune.quantizers.base import Quantizer, effective_weight
from hestia_tune.quantizers.fairy2i import Fairy2iQuantizer
from hestia_tune.quantizers.linear import quantized_linear
from hestia_tune.quantizers.ternary import TernaryQuantizer

__all__ = [
    "Fairy2iQuantizer",
    "Quantizer",
    "TernaryQuantizer",
    "effective_weight",
    "quantized_linear",
]
