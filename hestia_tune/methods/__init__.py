"""Methods: one file each, stateless, with a closed-form backward."""

from hestia_tune.methods.absmean import AbsMeanMethod
from hestia_tune.methods.base import Method, effective_weight
from hestia_tune.methods.dlt import DLTMethod
from hestia_tune.methods.even import EvenMethod
from hestia_tune.methods.fairy2i import Fairy2iMethod
from hestia_tune.methods.groups import GroupMethod
from hestia_tune.methods.int2 import INT2Method
from hestia_tune.methods.linear import quantized_linear
from hestia_tune.methods.lsq import LSQMethod
from hestia_tune.methods.seq import SEQMethod
from hestia_tune.methods.tequila import TequilaMethod
from hestia_tune.methods.ternary import TernaryMethod
from hestia_tune.methods.twn import TWNMethod

__all__ = [
    "AbsMeanMethod",
    "DLTMethod",
    "EvenMethod",
    "Fairy2iMethod",
    "GroupMethod",
    "INT2Method",
    "LSQMethod",
    "Method",
    "SEQMethod",
    "TWNMethod",
    "TequilaMethod",
    "TernaryMethod",
    "effective_weight",
    "quantized_linear",
]
