"""Measure the sensitivity of each quantized layer, and keep it in an artifact."""

from hestia_tune.config import EstimationConfig
from hestia_tune.sensitivity.curvature import CalibrationBatch
from hestia_tune.sensitivity.estimation import (
    SensitivityArtifact,
    estimate_sensitivity,
    model_fingerprint,
)

__all__ = [
    "CalibrationBatch",
    "EstimationConfig",
    "SensitivityArtifact",
    "estimate_sensitivity",
    "model_fingerprint",
]
