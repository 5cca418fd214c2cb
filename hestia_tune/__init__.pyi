from .annealing import AnnealingSchedule
from .models.loading import load_quantized
from .qat.linear import quantized_linears
from .qat.prepare import (
    DLT,
    INT2,
    INT4,
    LSQ,
    SEQ,
    TWN,
    AbsMean,
    AbsMeanConfig,
    DLTConfig,
    Fairy2iConfig,
    Fairy2iQATQuantizer,
    HestiaConfig,
    HestiaQATQuantizer,
    INT2Config,
    INT4Config,
    LSQConfig,
    MethodConfig,
    SEQConfig,
    Tequila,
    TequilaConfig,
    TWNConfig,
    TwoBit,
    TwoBitConfig,
)
from .qat.schedule import ScheduleDriver, get_wsd_schedule
from .qat.select import is_transformer_linear
from .sensitivity import EstimationConfig, SensitivityArtifact, estimate_sensitivity
from .tensors import Fairy2iTensor, TernaryTensor, use_kernel

__version__: str

__all__ = [
    "AbsMean",
    "AbsMeanConfig",
    "AnnealingSchedule",
    "DLT",
    "DLTConfig",
    "EstimationConfig",
    "Fairy2iConfig",
    "Fairy2iQATQuantizer",
    "Fairy2iTensor",
    "HestiaConfig",
    "HestiaQATQuantizer",
    "INT2",
    "INT2Config",
    "INT4",
    "INT4Config",
    "LSQ",
    "LSQConfig",
    "MethodConfig",
    "SEQ",
    "SEQConfig",
    "ScheduleDriver",
    "SensitivityArtifact",
    "TWN",
    "TWNConfig",
    "Tequila",
    "TequilaConfig",
    "TernaryTensor",
    "TwoBit",
    "TwoBitConfig",
    "estimate_sensitivity",
    "get_wsd_schedule",
    "is_transformer_linear",
    "load_quantized",
    "quantized_linears",
    "use_kernel",
]
