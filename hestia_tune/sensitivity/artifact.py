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
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hestia_tune.files import write_atomically
from hestia_tune.sensitivity.scores import (
    score_standard_errors,
    sensitivity_scores,
    usable_errors,
    usable_traces,
)

SCHEMA_VERSION = 2
_COMPUTE = "compute it with `tune run hestia_sensitivity --config NAME`"


def _first(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


@dataclass(frozen=True, kw_only=True)
class SensitivityArtifact:
    """Curvature traces and scores of the quantized layers of one model.

    Args:
        traces: fully qualified name -> trace of that weight's diagonal block of the Hessian
            (Eq. 10) or of the Gauss-Newton matrix, of the loss in nats per token.
        standard_errors: of the traces as estimates for the calibration samples, same keys.
        scores: s_i in (0, 1) (Eq. 11), same keys.
        model_fingerprint: see `model_fingerprint`.
        probes: matrix-vector products (or backward passes) behind each trace; empty if unknown.
        resolved: whether each trace is known to be positive; empty if all are.
        estimator: method, settings and seed of the estimation.
        dataset: what the calibration samples were.
        tokens_seen: tokens that were predicted in the calibration samples.
        wall_time_seconds: of the estimation, since it was last started.
        alpha: of the config (Eq. 13), for the column tau_scale.

    Raises:
        ValueError: naming the layers that are missing or whose numbers are out of range.
    """

    traces: dict[str, float]
    standard_errors: dict[str, float]
    scores: dict[str, float]
    model_fingerprint: str
    probes: dict[str, int] = field(default_factory=dict)
    resolved: dict[str, bool] = field(default_factory=dict)
    estimator: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, Any] = field(default_factory=dict)
    tokens_seen: int = 0
    wall_time_seconds: float = 0.0
    alpha: float = 0.4

    def __post_init__(self):
        if not isinstance(self.model_fingerprint, str):
            raise ValueError(f"model_fingerprint must be a string; got {self.model_fingerprint!r}")
        for key in ("estimator", "dataset"):
            if not isinstance(getattr(self, key), dict):
                raise ValueError(f"{key} must be a mapping; got {getattr(self, key)!r}")
        for key in ("tokens_seen", "wall_time_seconds", "alpha"):
            if not _is_finite_number(getattr(self, key)):
                raise ValueError(f"{key} must be a finite number; got {getattr(self, key)!r}")
        names = set(self.traces)
        if not names or names != set(self.scores) or names != set(self.standard_errors):
            raise ValueError(
                "traces, standard_errors and scores must name the same layers, at least one"
            )
        for key, default in (("probes", 0), ("resolved", True)):
            if not getattr(self, key):
                object.__setattr__(self, key, dict.fromkeys(self.traces, default))
            if set(getattr(self, key)) != names:
                raise ValueError(f"{key} must name the same layers as traces")
        for name in names:
            trace, error, score = self.traces[name], self.standard_errors[name], self.scores[name]
            if not all(_is_finite_number(v) for v in (trace, error, score)):
                raise ValueError(
                    f"trace, standard_error and score of {name} must be finite numbers"
                )
            if error < 0:
                raise ValueError(f"standard_error of {name} must not be negative; got {error}")
            if not 0.0 <= score <= 1.0:
                raise ValueError(f"score of {name} must be in [0, 1]; got {score}")
            resolved, probes = self.resolved[name], self.probes[name]
            if not isinstance(resolved, bool):
                raise ValueError(f"resolved of {name} must be true or false; got {resolved!r}")
            if isinstance(probes, bool) or not isinstance(probes, int) or probes < 0:
                raise ValueError(f"probes of {name} must be a non-negative int; got {probes!r}")
            if resolved and trace <= 0:
                raise ValueError(f"trace of {name} is resolved and so must be > 0; got {trace}")

    @classmethod
    def from_traces(
        cls,
        traces: Mapping[str, float],
        standard_errors: Mapping[str, float],
        resolved: Mapping[str, bool],
        *,
        kappa: float = 1.0,
        epsilon: float = 1e-8,
        **fields: Any,
    ) -> "SensitivityArtifact":
        """The artifact with the scores that Eq. 11 gives; an unresolved trace counts as the
        smallest resolved one.

        Raises:
            ValueError: if no trace is resolved.
        """
        usable = usable_traces(traces, resolved)
        estimator = {**fields.pop("estimator", {}), "kappa": kappa, "epsilon": epsilon}
        return cls(
            traces=dict(traces),
            standard_errors=dict(standard_errors),
            resolved=dict(resolved),
            scores=sensitivity_scores(usable, kappa=kappa, epsilon=epsilon),
            estimator=estimator,
            **fields,
        )

    def rescored(self, kappa: float) -> "SensitivityArtifact":
        """The same traces with the scores of another gain kappa (Eq. 11)."""
        epsilon = self.estimator.get("epsilon", 1e-8)
        usable = usable_traces(self.traces, self.resolved)
        return dataclasses.replace(
            self,
            scores=sensitivity_scores(usable, kappa=kappa, epsilon=epsilon),
            estimator=self.estimator | {"kappa": kappa},
        )

    @property
    def unresolved(self) -> list[str]:
        """Layers whose trace is not known to be positive."""
        return [name for name, known in self.resolved.items() if not known]

    @property
    def score_standard_errors(self) -> dict[str, float]:
        """Standard errors of the scores, from those of the traces."""
        return score_standard_errors(
            usable_traces(self.traces, self.resolved),
            usable_errors(self.traces, self.standard_errors, self.resolved),
            kappa=self.estimator.get("kappa", 1.0),
            epsilon=self.estimator.get("epsilon", 1e-8),
        )

    def _summary(self) -> dict[str, Any]:
        logs = [math.log(h) for h in usable_traces(self.traces, self.resolved).values()]
        mean = math.fsum(logs) / len(logs)
        return {
            "mean_log_trace": mean,
            "std_log_trace": math.sqrt(math.fsum((v - mean) ** 2 for v in logs) / len(logs)),
            "max_score_standard_error": max(self.score_standard_errors.values()),
            "unresolved": self.unresolved,
        }

    def save(self, path: str | Path) -> None:
        """Writes the JSON file (temporary name, then rename)."""
        layers = {
            name: {
                "trace": self.traces[name],
                "standard_error": self.standard_errors[name],
                "probes": self.probes[name],
                "resolved": self.resolved[name],
                "score": self.scores[name],
                "tau_scale": math.exp(self.alpha * self.scores[name]),
            }
            for name in self.traces
        }
        document = {
            "schema_version": SCHEMA_VERSION,
            "model_fingerprint": self.model_fingerprint,
            "estimator": self.estimator,
            "dataset": self.dataset,
            "tokens_seen": self.tokens_seen,
            "wall_time_seconds": self.wall_time_seconds,
            "alpha": self.alpha,
            "summary": self._summary(),
            "layers": layers,
        }
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
            layers = document["layers"]
            columns = {
                key: {name: entry[key] for name, entry in layers.items()}
                for key in ("trace", "standard_error", "score", "probes", "resolved")
            }
            return cls(
                traces=columns["trace"],
                standard_errors=columns["standard_error"],
                scores=columns["score"],
                probes=columns["probes"],
                resolved=columns["resolved"],
                **{
                    key: document[key]
                    for key in (
                        "model_fingerprint",
                        "estimator",
                        "dataset",
                        "tokens_seen",
                        "wall_time_seconds",
                        "alpha",
                    )
                },
            )
        except KeyError as error:
            raise ValueError(
                f"sensitivity file {path} lacks the field {error}; {_COMPUTE}"
            ) from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"sensitivity file {path} is not valid: {error}; {_COMPUTE}") from None

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


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)} stands there twice")
    return found
