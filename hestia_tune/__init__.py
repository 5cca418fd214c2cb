"""Train pretrained LLMs to ternary weights, by quantization-aware training."""

from typing import TYPE_CHECKING

from hestia_tune.qat.baselines import DLT, INT2, INT4, LSQ, SEQ, TWN, AbsMean, Tequila
from hestia_tune.qat.configs import Fairy2iConfig, HestiaConfig, MethodConfig
from hestia_tune.qat.linear import quantized_linears
from hestia_tune.qat.prepare import Fairy2iQATQuantizer, HestiaQATQuantizer
from hestia_tune.qat.schedule import AnnealingSchedule, ScheduleDriver, get_wsd_schedule
from hestia_tune.qat.select import is_transformer_linear
from hestia_tune.sensitivity import EstimationConfig, SensitivityArtifact, estimate_sensitivity
from hestia_tune.tensors import Fairy2iTensor, TernaryTensor, use_kernel

if TYPE_CHECKING:
    from hestia_tune.models.packed import load_quantized

__version__ = "0.1.0"

__all__ = [
    "DLT",
    "INT2",
    "INT4",
    "LSQ",
    "SEQ",
    "TWN",
    "AbsMean",
    "AnnealingSchedule",
    "EstimationConfig",
    "Fairy2iConfig",
    "Fairy2iQATQuantizer",
    "Fairy2iTensor",
    "HestiaConfig",
    "HestiaQATQuantizer",
    "MethodConfig",
    "ScheduleDriver",
    "SensitivityArtifact",
    "Tequila",
    "TernaryTensor",
    "estimate_sensitivity",
    "get_wsd_schedule",
    "is_transformer_linear",
    "load_quantized",
    "quantized_linears",
    "use_kernel",
]


def __getattr__(name: str):
    if name == "load_quantized":  # It needs torchtune, which takes seconds to import.
        from hestia_tune.models.packed import load_quantized

        return load_quantized
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
