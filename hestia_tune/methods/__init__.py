"""Methods: stateless, with a backward in closed form; the straight-through ones share a file."""

from hestia_tune.methods.fairy2i import Fairy2iMethod
from hestia_tune.methods.groups import GroupMethod
from hestia_tune.methods.hestia import EvenMethod, TernaryMethod
from hestia_tune.methods.method import Method, effective_weight, quantized_linear
from hestia_tune.methods.straight_through import (
    AbsMeanMethod,
    DLTMethod,
    INT2Method,
    INT4Method,
    LSQMethod,
    SEQMethod,
    TWNMethod,
)
from hestia_tune.methods.tequila import TequilaMethod
from hestia_tune.methods.two_bit import TwoBitMethod

__all__ = [
    "AbsMeanMethod",
    "DLTMethod",
    "EvenMethod",
    "Fairy2iMethod",
    "GroupMethod",
    "INT2Method",
    "INT4Method",
    "LSQMethod",
    "Method",
    "SEQMethod",
    "TWNMethod",
    "TequilaMethod",
    "TernaryMethod",
    "TwoBitMethod",
    "effective_weight",
    "quantized_linear",
]
