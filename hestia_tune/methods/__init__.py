"""Hold the methods: one file each, stateless, with a backward in closed form."""

from hestia_tune.methods.autograd import effective_weight, quantized_linear
from hestia_tune.methods.base import Method
from hestia_tune.methods.fairy2i import Fairy2iMethod
from hestia_tune.methods.groups import GroupMethod
from hestia_tune.methods.hestia import EvenMethod, TernaryMethod
from hestia_tune.methods.learned_step import DLTMethod, LSQMethod, SEQMethod
from hestia_tune.methods.straight_through import (
    AbsMeanMethod,
    INT2Method,
    INT4Method,
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
