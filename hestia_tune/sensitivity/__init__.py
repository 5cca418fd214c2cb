"""How sensitive each quantized layer is, and the file that says so."""

from hestia_tune.sensitivity.artifact import (
    SensitivityArtifact,
    model_fingerprint,
    sensitivity_scores,
)

__all__ = ["SensitivityArtifact", "model_fingerprint", "sensitivity_scores"]
