"""The sections of a YAML file as dataclasses. Nothing here imports torchtune."""

from hestia_tune.config.section import Section, nearest, option, require_number
from hestia_tune.config.sections import (
    BitsConfig,
    ChatConfig,
    ConvertConfig,
    DistillationConfig,
    EstimationConfig,
    EvalConfig,
    GeneratedConfig,
    ReconstructionConfig,
    ScheduleConfig,
    SourceConfig,
    StreamConfig,
    TextConfig,
)

__all__ = [
    "BitsConfig",
    "ChatConfig",
    "ConvertConfig",
    "DistillationConfig",
    "EstimationConfig",
    "EvalConfig",
    "GeneratedConfig",
    "ReconstructionConfig",
    "ScheduleConfig",
    "Section",
    "SourceConfig",
    "StreamConfig",
    "TextConfig",
    "nearest",
    "option",
    "require_number",
]
