"""hestia_tune: quantization-aware training of pretrained LLMs to ternary weights."""

from hestia_tune.qat import (
    HestiaConfig,
    HestiaQATQuantizer,
    quantized_linears,
)
from hestia_tune.schedule import AnnealingSchedule, ScheduleDriver
from hestia_tune.selection import is_transformer_linear
from hestia_tune.sensitivity import SensitivityArtifact

__version__ = "0.1.0"

__all__ = [
    "AnnealingSchedule",
    "HestiaConfig",
    "HestiaQATQuantizer",
    "ScheduleDriver",
    "SensitivityArtifact",
    "is_transformer_linear",
    "quantized_linears",
]
