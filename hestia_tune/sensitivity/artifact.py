"""The sensitivity artifact: what the estimator hands to the temperature schedule.

JSON, keyed by fully qualified name:

    {"schema_version": 2,
     "model_fingerprint": "sha256:...",
     "estimator": {"method", "curvature", every setting, "seed"},
     "dataset": {what the calibration samples were},
     "tokens_seen": ..., "wall_time_seconds": ...,
     "alpha": the config's, of which tau_scale = e^{alpha·score} below is made,
     "summary": {"mean_log_trace", "std_log_trace", "max_score_standard_error", "unresolved"},
     "layers": {"layers.0.attn.q_proj": {"trace", "standard_error", "probes", "resolved", "score",
                                         "tau_scale"}, ...}}

A trace stands as it was measured, also where it is unresolved and its layer's score was made from
another (see `hestia_tune.sensitivity.scores`). The schedule reads the scores alone, with its own
alpha.

Reading is strict: a temperature that silently fell back to a default would look like a run that
worked. JSON has no NaN here, and a pickle could run code.
"""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hestia_tune.files import write_atomically
from hestia_tune.schedule import tau_scale
from hestia_tune.sensitivity.scores import (
    log_moments,
    score_standard_errors,
    sensitivity_scores,
    usable_traces,
)
from hestia_tune.sensitivity.segments import CalibrationBatch

SCHEMA_VERSION = 2
_COMPUTE = "compute it with `tune run hestia_sensitivity --config NAME`"


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_NUMBER = ("a finite number", _is_number)
_MAPPING = ("a mapping", lambda value: isinstance(value, dict))
# What stands at the top of the file: field -> (its rule, whether a value keeps it).
_HEADER = {
    "model_fingerprint": ("a string", lambda value: isinstance(value, str)),
    "estimator": _MAPPING,
    "dataset": _MAPPING,
    "tokens_seen": _NUMBER,
    "wall_time_seconds": _NUMBER,
    "alpha": _NUMBER,
}
# What each layer has: field -> (its name in the file, its rule, whether a value keeps it).
_COLUMNS = {
    "traces": ("trace", *_NUMBER),
    "standard_errors": (
        "standard_error",
        "a finite number >= 0",
        lambda value: _is_number(value) and value >= 0,
    ),
    "probes": ("probes", "a non-negative int", _is_count),
    "resolved": ("resolved", "true or false", lambda value: isinstance(value, bool)),
    "scores": ("score", "a number in [0, 1]", lambda value: _is_number(value) and 0 <= value <= 1),
}


@dataclass(frozen=True, kw_only=True)
class SensitivityArtifact:
    """Curvature traces and scores of the quantized layers of one model.

    Args:
        traces: fully qualified name -> trace of that weight's diagonal block of the Hessian
            (Eq. 10) or of the Gauss-Newton matrix, of the loss in nats per token.
        standard_errors: of the traces as estimates for the calibration samples, same keys.
        scores: s_i in (0, 1) (Eq. 11), same keys; empty for those that the estimator's kappa and
            epsilon give, an unresolved trace counting as the smallest resolved one.
        model_fingerprint: see `model_fingerprint`.
        probes: matrix-vector products (or backward passes) behind each trace; empty if unknown.
        resolved: whether each trace is known to be positive; empty if all are.
        estimator: method, settings and seed of the estimation.
        dataset: what the calibration samples were.
        tokens_seen: tokens that were predicted in the calibration samples.
        wall_time_seconds: of the estimation, since it was last started.
        alpha: of the config (Eq. 13), for the column tau_scale.

    Raises:
        ValueError: naming the layer whose number is out of range; if the columns name different
            layers; if scores are to be made and no trace is resolved.
    """

    traces: dict[str, float]
    standard_errors: dict[str, float]
    scores: dict[str, float] = field(default_factory=dict)
    model_fingerprint: str
    probes: dict[str, int] = field(default_factory=dict)
    resolved: dict[str, bool] = field(default_factory=dict)
    estimator: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, Any] = field(default_factory=dict)
    tokens_seen: int = 0
    wall_time_seconds: float = 0.0
    alpha: float = 0.4

    def __post_init__(self):
        for key, (rule, holds) in _HEADER.items():
            if not holds(getattr(self, key)):
                raise ValueError(f"{key} must be {rule}; got {getattr(self, key)!r}")
        for column, (key, rule, holds) in _COLUMNS.items():
            values = getattr(self, column) or self._default(column)
            object.__setattr__(self, column, values)
            if not values or values.keys() != self.traces.keys():
                raise ValueError(f"{column} and traces must name the same layers, at least one")
            for name, value in values.items():
                if not holds(value):
                    raise ValueError(f"{key} of {name} must be {rule}; got {value!r}")
        for name, trace in self.traces.items():
            if self.resolved[name] and trace <= 0:
                raise ValueError(f"trace of {name} is resolved and so must be > 0; got {trace}")

    def _default(self, column: str) -> dict[str, Any]:
        """What stands for an empty column."""
        if column == "scores":
            return sensitivity_scores(self._usable[0], **self._gain)
        value = {"probes": 0, "resolved": True}.get(column)
        return {} if value is None else dict.fromkeys(self.traces, value)

    def rescored(self, kappa: float) -> "SensitivityArtifact":
        """The same traces with the scores of another gain kappa (Eq. 11)."""
        return dataclasses.replace(self, scores={}, estimator=self.estimator | {"kappa": kappa})

    @property
    def _usable(self) -> tuple[dict[str, float], dict[str, float]]:
        return usable_traces(self.traces, self.standard_errors, self.resolved)

    @property
    def _gain(self) -> dict[str, float]:
        return {key: self.estimator[key] for key in ("kappa", "epsilon") if key in self.estimator}

    @property
    def unresolved(self) -> list[str]:
        """Layers whose trace is not known to be positive."""
        return [name for name, known in self.resolved.items() if not known]

    @property
    def score_standard_errors(self) -> dict[str, float]:
        """Standard errors of the scores, from those of the traces."""
        return score_standard_errors(*self._usable, **self._gain)

    def save(self, path: str | Path) -> None:
        """Writes the JSON file (temporary name, then rename)."""
        mean, deviation = log_moments(self._usable[0])
        summary = {
            "mean_log_trace": mean,
            "std_log_trace": deviation,
            "max_score_standard_error": max(self.score_standard_errors.values()),
            "unresolved": self.unresolved,
        }
        layers = {
            name: {key: getattr(self, column)[name] for column, (key, *_) in _COLUMNS.items()}
            | {"tau_scale": tau_scale(self.alpha, self.scores[name])}
            for name in self.traces
        }
        document = {"schema_version": SCHEMA_VERSION}
        document |= {key: getattr(self, key) for key in _HEADER}
        document |= {"summary": summary, "layers": layers}
        write_atomically(path, json.dumps(document, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "SensitivityArtifact":
        """Reads what `save` wrote.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is cut off, not such a JSON document, or of another schema version.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"sensitivity file {path} does not exist; {_COMPUTE}, or set sensitivity=auto or "
                "sensitivity=null"
            )
        try:
            document = json.loads(
                path.read_text(encoding="utf-8"),
                parse_constant=_no_constant,
                object_pairs_hook=_no_duplicates,
            )
            version = document["schema_version"]
            if version != SCHEMA_VERSION:
                older = isinstance(version, int) and version < SCHEMA_VERSION
                raise ValueError(
                    f"schema_version must be {SCHEMA_VERSION}; got {version}, which "
                    + (f"is outdated; {_COMPUTE}" if older else "this version cannot read")
                )
            layers = document["layers"].items()
            columns = {
                column: {name: entry[key] for name, entry in layers}
                for column, (key, *_) in _COLUMNS.items()
            }
            return cls(**columns, **{key: document[key] for key in _HEADER})
        except KeyError as error:
            raise ValueError(
                f"sensitivity file {path} lacks the field {error}; {_COMPUTE}"
            ) from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"sensitivity file {path} is not valid: {error}; {_COMPUTE}") from None

    def differences(self, identity: Mapping[str, Any]) -> list[str]:
        """In what this is not the artifact of an `estimation_identity`: settings, or the data."""
        wanted, found = identity["estimator"], self.estimator
        differing = [key for key, value in wanted.items() if found.get(key) != value]
        if self.model_fingerprint != identity["model_fingerprint"]:
            differing.append("the model's weights")
        if self.dataset.get("digest") != identity["samples"]:
            differing.append("the calibration samples")
        return differing

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


def _first(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _no_constant(name: str):
    raise ValueError(f"{name} is not a number")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} stands there twice")
        found[name] = value
    return found


def model_fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """A digest of the names, shapes and weights (as bfloat16) of the quantized layers.

    The same for a model stored in bfloat16 and in float32; another for other weights.

    Args:
        weights: fully qualified name of each quantized linear -> its pretrained weight.
    """
    rounded = ((name, weights[name].detach().to(torch.bfloat16)) for name in sorted(weights))
    return _digest((name, weight.view(torch.int16)) for name, weight in rounded)


def samples_digest(batches: Sequence[CalibrationBatch]) -> str:
    """A digest of the calibration tokens, their labels, and how they are batched."""
    values = ((b.tokens, b.labels, *b.model_inputs.values()) for b in batches)
    return _digest(("", value) for batch in values for value in batch)


def _digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, value in tensors:
        digest.update(f"{name}{tuple(value.shape)}".encode())
        digest.update(value.cpu().contiguous().numpy())
    return f"sha256:{digest.hexdigest()}"
