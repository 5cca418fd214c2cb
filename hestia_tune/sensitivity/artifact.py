"""Turn traces into scores (Eq. 11), and the artifact that gives the scores to the schedule.

The trace of a Hessian block may be negative, and an estimate may be too uncertain to show its sign.
Such a layer is *unresolved*. It takes the smallest resolved trace of the model. A clamp to a tiny
constant would move the mean and the deviation of the log traces, and so the scores of all other
layers.

The artifact is a JSON file with the fields of `SensitivityArtifact`. The columns are by layer:

    "schema_version": 2,
    "layers": {"layers.0.attn.q_proj": {"trace", "standard_error", "probes", "score"}, ...}

The schedule reads only the scores. Reading is strict. A temperature that silently took a default
would look like a run that worked.
"""

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch

from hestia_tune.config import EstimationConfig, require_number
from hestia_tune.errors import InputError, InputTypeError
from hestia_tune.files import write_atomically
from hestia_tune.sensitivity.curvature import CalibrationBatch

ByLayer = Mapping[str, float]  # Fully qualified name -> number.
SCHEMA_VERSION = 2
_COMPUTE = "compute it with `tune run hestia_sensitivity --config NAME`"
_HEADER = ("model_fingerprint", "estimator", "dataset", "tokens_seen", "wall_time_seconds")
# Fields with a number per layer -> name of the number in the file, its least and its largest value.
_LARGEST = sys.float_info.max
_COLUMNS = {
    "traces": ("trace", -_LARGEST, _LARGEST),
    "standard_errors": ("standard_error", 0, _LARGEST),
    "probes": ("probes", 0, _LARGEST),
    "scores": ("score", 0, 1),
}


def is_resolved(trace: float, standard_error: float) -> bool:
    """Return whether the trace is positive by more than 2 standard errors (95%)."""
    return trace - 2.0 * standard_error > 0


def sensitivity_scores(
    traces: ByLayer,
    standard_errors: ByLayer | None = None,
    *,
    kappa: float = 1.0,
    epsilon: float = 1e-8,
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the sensitivity scores of the layers (Eq. 11) and their standard errors.

    s_i = sigmoid(kappa·z_i), z_i = (log h_i - mu)/(sigma + eps) (Eq. 11), where

    - s_i is the score and h_i the trace of layer i. An unresolved layer takes the smallest resolved
      trace.
    - mu and sigma are the mean and the population standard deviation of all log h_i.

    The standard errors are to first order, for independent errors of the traces. With n layers,
    dz_i/dlog h_j = (1[i = j] - 1/n - z_i·z_j/n)/sigma. The error of a layer moves its own score
    and, through mu and sigma, slightly moves all other scores.

    Args:
        traces: Layer name -> trace.
        standard_errors: Layer name -> standard error of the trace. None: the traces are exact.
        kappa: Gain of the sigmoid.
        epsilon: The number eps, which is added to sigma.

    Returns:
        Layer name -> score, and layer name -> standard error of the score.

    Raises:
        InputError: If no layer is resolved.
    """
    errors_of = standard_errors or dict.fromkeys(traces, 0.0)
    resolved = [name for name, h in traces.items() if is_resolved(h, errors_of[name])]
    if not resolved:
        raise InputError(
            "no layer's trace is known to be positive; use more samples or probes, or "
            "curvature: fisher, whose traces are never negative"
        )
    smallest = min(resolved, key=traces.__getitem__)
    # The layer whose trace each layer takes.
    sources = [name if name in resolved else smallest for name in traces]
    logs = [math.log(traces[name]) for name in sources]
    mu, spread = fmean(logs), pstdev(logs)
    sigma = spread + epsilon
    z = [(h - mu) / sigma if spread else 0.0 for h in logs]
    # The sigmoid as a tanh, because tanh does not overflow.
    scores = [0.5 * (1.0 + math.tanh(0.5 * kappa * z_i)) for z_i in z]
    relative = [errors_of[name] / traces[name] for name in sources]
    errors = []
    for i, score in enumerate(scores):
        slopes = ((i == j) - 1 / len(z) - z[i] * z[j] / len(z) for j in range(len(z)))
        error = math.hypot(*(d * r for d, r in zip(slopes, relative, strict=True)))
        # If the layers do not differ, there is no slope.
        errors.append(kappa * score * (1 - score) * error / sigma if spread else 0.0)
    return dict(zip(traces, scores, strict=True)), dict(zip(traces, errors, strict=True))


@dataclass(frozen=True, kw_only=True)
class SensitivityArtifact:
    """Curvature traces and scores of the quantized layers of one model.

    Raises:
        InputError: If a number is out of range. The error names the layer. Also if two columns name
            different layers, or if there are no scores and no trace is resolved.
    """

    # Fully qualified name -> trace of the diagonal block of this weight, in the Hessian (Eq. 10) or
    # in the Gauss-Newton matrix. The loss is in nats per token.
    traces: dict[str, float]
    # Standard errors of the traces, as estimates for the calibration samples.
    standard_errors: dict[str, float]
    # s_i in (0, 1) (Eq. 11). Empty: computed with kappa and epsilon of the estimator.
    scores: dict[str, float] = field(default_factory=dict)
    model_fingerprint: str  # See `model_fingerprint`.
    # Number of matrix-vector products (or backward passes) for each trace. Empty: unknown.
    probes: dict[str, int] = field(default_factory=dict)
    estimator: dict[str, Any] = field(default_factory=dict)  # Method, settings and seed.
    dataset: dict[str, Any] = field(default_factory=dict)  # Identity of the calibration samples.
    tokens_seen: int = 0  # Number of tokens predicted in the calibration samples.
    wall_time_seconds: float = 0.0  # Time of the estimation since its last start.

    def __post_init__(self):
        if not isinstance(self.estimator, dict) or not isinstance(self.dataset, dict):
            raise InputTypeError("estimator and dataset must be mappings")
        if not self.probes:
            object.__setattr__(self, "probes", dict.fromkeys(self.traces, 0))
        for column, (key, low, high) in _COLUMNS.items():
            if column == "scores" and not self.scores:
                object.__setattr__(self, "scores", self._score()[0])
            values = getattr(self, column)
            if not values or values.keys() != self.traces.keys():
                raise InputError(f"{column} and traces must name the same layers, at least one")
            for name, value in values.items():
                require_number(f"{key} of {name}", value, low, high)

    def _score(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the scores and their standard errors, from the traces."""
        gain = {key: self.estimator[key] for key in ("kappa", "epsilon") if key in self.estimator}
        return sensitivity_scores(self.traces, self.standard_errors, **gain)

    @property
    def unresolved(self) -> list[str]:
        """Names of the layers whose trace is not known to be positive."""
        errors = self.standard_errors
        return [name for name, h in self.traces.items() if not is_resolved(h, errors[name])]

    @property
    def score_standard_errors(self) -> dict[str, float]:
        """Standard errors of the scores, from the standard errors of the traces."""
        return self._score()[1]

    def save(self, path: str | Path) -> None:
        """Write the artifact to a JSON file: first under a temporary name, then renamed."""
        layers = {
            name: {key: getattr(self, column)[name] for column, (key, *_) in _COLUMNS.items()}
            for name in self.traces
        }
        document = {"schema_version": SCHEMA_VERSION}
        document |= {key: getattr(self, key) for key in _HEADER} | {"layers": layers}
        write_atomically(path, json.dumps(document, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "SensitivityArtifact":
        """Read an artifact that `save` has written.

        Args:
            path: The JSON file.

        Returns:
            The artifact.

        Raises:
            InputError: If there is no such file, or if it is not a complete artifact of this schema
                version.
        """
        path = Path(path)
        if not path.is_file():
            raise InputError(f"sensitivity file {path} does not exist; {_COMPUTE}")
        try:
            document = json.loads(path.read_text("utf-8"))
            version = document["schema_version"]
            if version != SCHEMA_VERSION:
                raise InputError(f"schema_version must be {SCHEMA_VERSION}; got {version}")
            layers = document["layers"].items()
            columns = {
                column: {name: entry[key] for name, entry in layers}
                for column, (key, *_) in _COLUMNS.items()
            }
            return cls(**columns, **{key: document[key] for key in _HEADER})
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            fault = f"it lacks the field {error}" if isinstance(error, KeyError) else error
            raise InputError(f"sensitivity file {path} is not valid: {fault}; {_COMPUTE}") from None

    def check_model(self, names: Iterable[str], fingerprint: str | None = None) -> None:
        """Check that the artifact belongs to a model.

        Args:
            names: Names of the quantized layers of the model.
            fingerprint: The model's `model_fingerprint`. None: do not compare it.

        Raises:
            InputError: If the layers or the fingerprints differ.
        """
        if different := set(names) ^ set(self.scores):
            layer = min(different)
            raise InputError(f"the sensitivity file and the model differ in {layer}; {_COMPUTE}")
        if fingerprint not in (None, self.model_fingerprint):
            raise InputError(f"the sensitivity file was computed for other weights; {_COMPUTE}")


def model_fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of the pretrained weights of the quantized linears.

    The digest is of names, shapes and values as bfloat16. So it is the same for a model that is
    stored in float32.

    Args:
        weights: Fully qualified name -> pretrained weight, in any dtype.

    Returns:
        "sha256:" and 64 hexadecimal digits.
    """
    rounded = ((name, weights[name].detach().to(torch.bfloat16)) for name in sorted(weights))
    return _digest((name, weight.view(torch.int16)) for name, weight in rounded)


def estimation_identity(
    fingerprint: str,
    batches: Sequence[CalibrationBatch],
    settings: EstimationConfig,
    seed: int,
) -> dict[str, Any]:
    """Return everything that the results of an estimation depend on.

    Args:
        fingerprint: The `model_fingerprint` of the measured weights.
        batches: The calibration samples.
        settings: The settings of the estimation.
        seed: Seed of the probes.

    Returns:
        The fields ``model_fingerprint``, ``estimator`` and ``dataset`` of the artifact.
    """
    hessian = "hutchinson" if settings.rank is None else "hutch++"
    methods = {"hessian": hessian, "fisher": "gauss-newton"}
    estimator = {"method": methods[settings.curvature], **asdict(settings), "seed": seed}
    del estimator["output"], estimator["overwrite"]
    inputs = (value for b in batches for value in (b.tokens, b.labels, *b.model_inputs.values()))
    dataset = {"num_batches": len(batches), "digest": _digest(("", value) for value in inputs)}
    return {"model_fingerprint": fingerprint, "estimator": estimator, "dataset": dataset}


def _digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return a digest of tensors with their names, shapes and values."""
    digest = hashlib.sha256()
    for name, value in tensors:
        digest.update(f"{name}{tuple(value.shape)}".encode())
        values: Any = value.cpu().contiguous().numpy()  # to pyright, no buffer
        digest.update(values)
    return f"sha256:{digest.hexdigest()}"
