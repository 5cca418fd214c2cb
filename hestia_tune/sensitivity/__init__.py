"""How sensitive each quantized layer is, and the file that says so."""

from hestia_tune.config import EstimationConfig
from hestia_tune.sensitivity.artifact import SensitivityArtifact, model_fingerprint
from hestia_tune.sensitivity.curvature import CalibrationBatch
from hestia_tune.sensitivity.estimation import estimate_sensitivity

__all__ = [
    "CalibrationBatch",
    "EstimationConfig",
    "SensitivityArtifact",
    "estimate_sensitivity",
    "model_fingerprint",
]
