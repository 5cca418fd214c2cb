"""Every YAML section as a dataclass; the packaged configs; nothing here imports torchtune."""

from hestia_tune.config.commands import (
    ConvertConfig,
    EstimationConfig,
    EvalConfig,
    TextConfig,
)
from hestia_tune.config.data import GeneratedConfig, StreamConfig
from hestia_tune.config.schedule import DistillationConfig, ReconstructionConfig, ScheduleConfig
from hestia_tune.config.section import Section, nearest, option, require_number

__all__ = [
    "ConvertConfig",
    "DistillationConfig",
    "EstimationConfig",
    "EvalConfig",
    "GeneratedConfig",
    "ReconstructionConfig",
    "ScheduleConfig",
    "Section",
    "StreamConfig",
    "TextConfig",
    "nearest",
    "option",
    "require_number",
]
