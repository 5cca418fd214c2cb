from .annealing import AnnealingSchedule
from .models.packed import load_quantized
from .qat.linear import quantized_linears
from .qat.prepare import (
    DLT,
    INT2,
    INT4,
    LSQ,
    SEQ,
    TWN,
    AbsMean,
    Fairy2iConfig,
    Fairy2iQATQuantizer,
    HestiaConfig,
    HestiaQATQuantizer,
    MethodConfig,
    Tequila,
)
from .qat.schedule import ScheduleDriver, get_wsd_schedule
from .qat.select import is_transformer_linear
from .sensitivity import EstimationConfig, SensitivityArtifact, estimate_sensitivity
from .tensors import Fairy2iTensor, TernaryTensor, use_kernel

__version__: str

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
