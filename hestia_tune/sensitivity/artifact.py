"""The sensitivity artifact: what the estimator hands to the temperature schedule.

JSON, keyed by fully qualified name:

    {"schema_version": 1,
     "model_fingerprint": "sha256 ...",
     "estimator": {settings and seed},
     "layers": {"layers.0.attn.q_proj": {"trace": ..., "standard_error": ..., "score": ...}, ...}}

Reading is strict: a temperature that silently fell back to a default would look like a run that
worked. JSON has no NaN here, and a pickle could run code.
"""

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hestia_tune.files import write_atomically

SCHEMA_VERSION = 1
_SAMPLES_PER_LAYER = 1024


def model_fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """A digest of names, shapes and evenly spaced weights (as bfloat16) of the quantized layers.

    The same for a model stored in bfloat16 and in float32; another for other weights.

    Args:
        weights: fully qualified name of each quantized linear -> its pretrained weight.
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        flat = weights[name].detach().reshape(-1)
        # An odd stride, so that the samples do not all fall into one column.
        stride = (flat.numel() // _SAMPLES_PER_LAYER) | 1
        sample = flat[::stride][:_SAMPLES_PER_LAYER].to(torch.bfloat16).cpu()
        digest.update(f"{name}{tuple(weights[name].shape)}".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"


def sensitivity_scores(
    traces: Mapping[str, float], *, kappa: float = 1.0, epsilon: float = 1e-8
) -> dict[str, float]:
    """s_i = sigmoid(kappa·(log h_i - mu)/(sigma + eps)) over all layers (Eq. 11).

    mu and sigma are the mean and the (population) standard deviation of the log traces h_i.

    Raises:
        ValueError: naming the layers whose trace is not positive and finite.
    """
    bad = [name for name, h in traces.items() if not (h > 0 and math.isfinite(h))]
    if bad or not traces:
        raise ValueError(
            f"Hessian traces must be positive and finite; not so: {bad[:5] or 'none given'}"
        )
    logs = {name: math.log(h) for name, h in traces.items()}
    mu = math.fsum(logs.values()) / len(logs)
    sigma = math.sqrt(math.fsum((v - mu) ** 2 for v in logs.values()) / len(logs))
    # A sigmoid by tanh, which does not overflow.
    return {
        name: 0.5 * (1.0 + math.tanh(0.5 * kappa * (value - mu) / (sigma + epsilon)))
        for name, value in logs.items()
    }


def _first(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


@dataclass(frozen=True, kw_only=True)
class SensitivityArtifact:
    """Hessian traces and scores of the quantized layers of one model.

    Args:
        traces: fully qualified name -> Hessian trace of that weight's diagonal block (Eq. 10).
        standard_errors: of the traces, same keys.
        scores: s_i in (0, 1) (Eq. 11), same keys.
        model_fingerprint: see `model_fingerprint`.
        estimator: settings and seed of the estimation, as written.

    Raises:
        ValueError: naming the layers that are missing or whose numbers are out of range.
    """

    traces: dict[str, float]
    standard_errors: dict[str, float]
    scores: dict[str, float]
    model_fingerprint: str
    estimator: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if not isinstance(self.model_fingerprint, str):
            raise ValueError(f"model_fingerprint must be a string; got {self.model_fingerprint!r}")
        if not isinstance(self.estimator, dict):
            raise ValueError(f"estimator must be a mapping of settings; got {self.estimator!r}")
        names = set(self.traces)
        if not names or names != set(self.scores) or names != set(self.standard_errors):
            raise ValueError(
                "traces, standard_errors and scores must name the same layers, at least one"
            )
        for name in names:
            trace, error, score = self.traces[name], self.standard_errors[name], self.scores[name]
            if not all(_is_finite_number(v) for v in (trace, error, score)):
                raise ValueError(
                    f"trace, standard_error and score of {name} must be finite numbers"
                )
            if not 0.0 <= score <= 1.0:
                raise ValueError(f"score of {name} must be in [0, 1]; got {score}")

    def save(self, path: str | Path) -> None:
        """Writes the JSON file (temporary name, then rename)."""
        layers = {
            name: {
                "trace": self.traces[name],
                "standard_error": self.standard_errors[name],
                "score": self.scores[name],
            }
            for name in self.traces
        }
        document = {
            "schema_version": SCHEMA_VERSION,
            "model_fingerprint": self.model_fingerprint,
            "estimator": self.estimator,
            "layers": layers,
        }
        write_atomically(path, json.dumps(document, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "SensitivityArtifact":
        """Reads what `save` wrote.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is not such a JSON document, or of another schema version.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"sensitivity file {path} does not exist; compute it first, or set sensitivity=null"
            )
        try:
            document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
            version = document["schema_version"]
            if version != SCHEMA_VERSION:
                raise ValueError(f"schema_version must be {SCHEMA_VERSION}; got {version}")
            layers = document["layers"]
            columns = {
                key: {name: entry[key] for name, entry in layers.items()}
                for key in ("trace", "standard_error", "score")
            }
            return cls(
                traces=columns["trace"],
                standard_errors=columns["standard_error"],
                scores=columns["score"],
                model_fingerprint=document["model_fingerprint"],
                estimator=document["estimator"],
            )
        except KeyError as error:
            raise ValueError(f"sensitivity file {path} lacks the field {error}") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"sensitivity file {path} is not valid: {error}") from None

    def check_model(self, names: Iterable[str], fingerprint: str | None = None) -> None:
        """Raises ValueError unless the artifact is of this model.

        Args:
            names: fully qualified names of the layers that will be quantized.
            fingerprint: `model_fingerprint` of the pretrained model; None skips that check.
        """
        missing, unknown = set(names) - set(self.scores), set(self.scores) - set(names)
        if missing:
            raise ValueError(f"the sensitivity file has no entry for {_first(missing)}")
        if unknown:
            raise ValueError(
                f"the sensitivity file names layers that are not quantized: {_first(unknown)}"
            )
        if fingerprint is not None and fingerprint != self.model_fingerprint:
            raise ValueError(
                "the sensitivity file was computed for other weights; compute it anew (its "
                f"fingerprint is {self.model_fingerprint[:19]}, the model's {fingerprint[:19]})"
            )


def _is_finite_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def _no_constant(name: str):
    raise ValueError(f"{name} is not a number")
