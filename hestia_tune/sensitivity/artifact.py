"""From traces to scores (Eq. 11), and the artifact that hands them to the temperature schedule.

A block of the Hessian need not have a positive trace, and an estimate need not be known well
enough to say. Such a layer is *unresolved*: it takes the smallest resolved trace of the model. A
clamp to a tiny constant would drag the mean and the deviation of the log traces, and with them the
scores of all other layers.

The artifact is a JSON file with the fields of `SensitivityArtifact`, the columns by layer, and

    "schema_version": 2,
    "layers": {"layers.0.attn.q_proj": {"trace", "standard_error", "probes", "score"}, ...}

The schedule reads the scores alone. Reading is strict: a temperature that silently fell back to a
default would look like a run that worked.
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

ByLayer = Mapping[str, float]  # by fully qualified name
SCHEMA_VERSION = 2
_COMPUTE = "compute it with `tune run hestia_sensitivity --config NAME`"
_HEADER = ("model_fingerprint", "estimator", "dataset", "tokens_seen", "wall_time_seconds")
# Of each layer: field -> (its name in the file, the range of its number).
_LARGEST = sys.float_info.max
_COLUMNS = {
    "traces": ("trace", -_LARGEST, _LARGEST),
    "standard_errors": ("standard_error", 0, _LARGEST),
    "probes": ("probes", 0, _LARGEST),
    "scores": ("score", 0, 1),
}


def is_resolved(trace: float, standard_error: float) -> bool:
    """Whether the trace is known to be positive: by 2 standard errors (95%)."""
    return trace - 2.0 * standard_error > 0


def sensitivity_scores(
    traces: ByLayer,
    standard_errors: ByLayer | None = None,
    *,
    kappa: float = 1.0,
    epsilon: float = 1e-8,
) -> tuple[dict[str, float], dict[str, float]]:
    """s_i = sigmoid(kappa·z_i), z_i = (log h_i - mu)/(sigma + eps) (Eq. 11); their standard errors.

    h_i are the traces, in which an unresolved layer has that of the smallest resolved; mu and sigma
    the mean and the (population) standard deviation of their logarithms. To first order and for
    independent errors, dz_i/dlog h_j = (1[i = j] - 1/n - z_i·z_j/n)/sigma: a layer's error moves
    its own score and, through mu and sigma, a little of all others.

    Raises:
        InputError: if no layer is resolved.
    """
    errors_of = standard_errors or dict.fromkeys(traces, 0.0)
    known = {name: h for name, h in traces.items() if is_resolved(h, errors_of[name])}
    if not known:
        raise InputError(
            "no layer's trace is known to be positive; take more samples or probes, or "
            "curvature: fisher, whose traces are never negative"
        )
    smallest = min(known, key=known.__getitem__)
    sources = [name if name in known else smallest for name in traces]
    logs = [math.log(traces[name]) for name in sources]
    mu, spread = fmean(logs), pstdev(logs)
    sigma = spread + epsilon
    z = [(h - mu) / sigma if spread else 0.0 for h in logs]
    # A sigmoid by tanh, which does not overflow.
    scores = [0.5 * (1.0 + math.tanh(0.5 * kappa * one)) for one in z]
    relative = [errors_of[name] / traces[name] for name in sources]
    errors = []
    for i, score in enumerate(scores):
        slopes = ((i == j) - 1 / len(z) - z[i] * z[j] / len(z) for j in range(len(z)))
        error = math.hypot(*(d * r for d, r in zip(slopes, relative, strict=True)))
        # Layers that do not differ: no slope to speak of.
        errors.append(kappa * score * (1 - score) * error / sigma if spread else 0.0)
    return dict(zip(traces, scores, strict=True)), dict(zip(traces, errors, strict=True))


@dataclass(frozen=True, kw_only=True)
class SensitivityArtifact:
    """Curvature traces and scores of the quantized layers of one model.

    Raises:
        InputError: naming the layer whose number is out of range; if columns name other
            layers; if scores are to be made and no trace is resolved.
    """

    # Fully qualified name -> trace of that weight's diagonal block of the Hessian (Eq. 10) or of
    # the Gauss-Newton matrix, of the loss in nats per token.
    traces: dict[str, float]
    standard_errors: dict[str, float]  # of the traces, as estimates for the calibration samples
    # s_i in (0, 1) (Eq. 11); empty for those of the estimator's kappa and epsilon.
    scores: dict[str, float] = field(default_factory=dict)
    model_fingerprint: str  # see `model_fingerprint`
    # Matrix-vector products (or backward passes) behind each trace; empty if unknown.
    probes: dict[str, int] = field(default_factory=dict)
    estimator: dict[str, Any] = field(default_factory=dict)  # method, settings and seed
    dataset: dict[str, Any] = field(default_factory=dict)  # what the calibration samples were
    tokens_seen: int = 0  # that were predicted in the calibration samples
    wall_time_seconds: float = 0.0  # of the estimation, since it was last started

    def __post_init__(self):
        if not isinstance(self.estimator, dict) or not isinstance(self.dataset, dict):
            raise InputTypeError("estimator and dataset must be mappings")
        if not self.probes:
            object.__setattr__(self, "probes", dict.fromkeys(self.traces, 0))
        for column, (key, low, high) in _COLUMNS.items():
            if column == "scores" and not self.scores:
                object.__setattr__(self, "scores", self._scored[0])
            values = getattr(self, column)
            if not values or values.keys() != self.traces.keys():
                raise InputError(f"{column} and traces must name the same layers, at least one")
            for name, value in values.items():
                require_number(f"{key} of {name}", value, low, high)

    @property
    def _scored(self) -> tuple[dict[str, float], dict[str, float]]:
        gain = {key: self.estimator[key] for key in ("kappa", "epsilon") if key in self.estimator}
        return sensitivity_scores(self.traces, self.standard_errors, **gain)

    @property
    def unresolved(self) -> list[str]:
        """Layers whose trace is not known to be positive."""
        errors = self.standard_errors
        return [name for name, h in self.traces.items() if not is_resolved(h, errors[name])]

    @property
    def score_standard_errors(self) -> dict[str, float]:
        """Standard errors of the scores, from those of the traces."""
        return self._scored[1]

    def save(self, path: str | Path) -> None:
        """Writes the JSON file (temporary name, then rename)."""
        layers = {
            name: {key: getattr(self, column)[name] for column, (key, *_) in _COLUMNS.items()}
            for name in self.traces
        }
        document = {"schema_version": SCHEMA_VERSION}
        document |= {key: getattr(self, key) for key in _HEADER} | {"layers": layers}
        write_atomically(path, json.dumps(document, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "SensitivityArtifact":
        """Reads what `save` wrote.

        Raises:
            InputError: if there is no such file; or if it is not such a document, whole and of this
                schema version.
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
        """Raises ValueError unless these are its layers and, if given, this its fingerprint."""
        odd = set(names) ^ set(self.scores)
        if odd:
            raise InputError(f"the sensitivity file and the model differ in {min(odd)}; {_COMPUTE}")
        if fingerprint not in (None, self.model_fingerprint):
            raise InputError(f"the sensitivity file was computed for other weights; {_COMPUTE}")


def model_fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """A digest of the pretrained weights of the quantized linears by fully qualified name: of
    names, shapes and values as bfloat16, so it is the same for a model stored in float32."""
    rounded = ((name, weights[name].detach().to(torch.bfloat16)) for name in sorted(weights))
    return _digest((name, weight.view(torch.int16)) for name, weight in rounded)


def estimation_identity(
    weights: Mapping[str, torch.Tensor],
    batches: Sequence[CalibrationBatch],
    settings: EstimationConfig,
    seed: int,
) -> dict[str, Any]:
    """Return what the numbers of an estimation depend on, by field of the artifact.

    Args:
        weights: Fully qualified name -> pretrained weight, in any dtype.
        batches: The calibration samples.
        settings: The settings of the estimation.
        seed: Seed of the probes.
    """
    hessian = "hutchinson" if settings.rank is None else "hutch++"
    methods = {"hessian": hessian, "fisher": "gauss-newton"}
    estimator = {"method": methods[settings.curvature], **asdict(settings), "seed": seed}
    del estimator["output"], estimator["overwrite"]
    inputs = (value for b in batches for value in (b.tokens, b.labels, *b.model_inputs.values()))
    dataset = {"num_batches": len(batches), "digest": _digest(("", value) for value in inputs)}
    fingerprint = model_fingerprint(weights)
    return {"model_fingerprint": fingerprint, "estimator": estimator, "dataset": dataset}


def _digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, value in tensors:
        digest.update(f"{name}{tuple(value.shape)}".encode())
        digest.update(value.cpu().contiguous().numpy())
    return f"sha256:{digest.hexdigest()}"
