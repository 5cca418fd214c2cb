"""Measure the sensitivity of each layer: its trace, its score (Eq. 13), the artifact of all scores.

**Estimation.** The loss is the mean over all calibration tokens. So the trace of a layer is the
mean of its traces on the batches, weighted by their numbers of tokens. Every batch gets its own
probes, at least two per layer. Their spread within the batch gives the standard error. So this is
the error of the estimation for these samples. It does not say how the trace would differ on other
samples.

The estimation has rounds. First every layer gets the least number of probes. Then layers whose
score is still too uncertain get as many probes as their spread requires, up to the cap.

The random numbers of a probe depend only on the seed, the layer, the batch and the number of the
probe. So ranks can share the batches, and a killed estimation can continue. The result is the same
as the result of one process.

**Artifact.** The trace of a Hessian block may be negative, and an estimate may be too uncertain to
show its sign. Such a layer is *unresolved*. It takes the smallest resolved trace of the model. A
clamp to a tiny constant would move the mean and the deviation of the log traces, and so the scores
of all other layers.

The artifact is a JSON file with the fields of `SensitivityArtifact`. The columns are by layer:

    "schema_version": 2,
    "layers": {"layers.0.attn.q_proj": {"trace", "standard_error", "probes", "score"}, ...}

The schedule reads only the scores. Reading is strict. A temperature that silently took a default
would look like a run that worked.
"""

import hashlib
import json
import logging
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hestia_tune.config import EstimationConfig, require_number
from hestia_tune.distributed import gathered, progress_bar
from hestia_tune.errors import InputError, InputTypeError, NotFiniteError
from hestia_tune.files import read_json_lines, write_atomically
from hestia_tune.sensitivity import curvature
from hestia_tune.sensitivity.curvature import CalibrationBatch, cut

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
    """Return the sensitivity scores of the layers (Eq. 13) and their standard errors.

    s_i = sigmoid(kappa·z_i), z_i = (log h_i - mu)/(sigma + eps) (Eq. 13), where

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

    Args:
        traces: Fully qualified name -> trace of the diagonal block of this weight, in the Hessian
            (Eq. 12) or in the Gauss-Newton matrix. The loss is in nats per token.
        standard_errors: Standard errors of the traces from the probes, for these samples.
        scores: s_i in (0, 1) (Eq. 13). If empty, computed from the traces with the estimator's
            kappa and epsilon.
        model_fingerprint: What `hestia_tune.sensitivity.model_fingerprint` returns.
        probes: Number of matrix-vector products (or backward passes) per trace. Empty: unknown.
        estimator: Method, settings and seed of the estimation.
        dataset: Identity of the calibration samples.
        tokens_seen: Number of tokens predicted in the calibration samples.
        wall_time_seconds: Time since the last start of the estimation.

    Raises:
        InputError: If a number is out of range (the error names the layer), if two mappings have
            different layers, or if there are no scores and no trace is more than two standard
            errors above zero.
    """

    traces: dict[str, float]
    standard_errors: dict[str, float]
    scores: dict[str, float] = field(default_factory=dict)
    model_fingerprint: str
    probes: dict[str, int] = field(default_factory=dict)
    estimator: dict[str, Any] = field(default_factory=dict)
    dataset: dict[str, Any] = field(default_factory=dict)
    tokens_seen: int = 0
    wall_time_seconds: float = 0.0

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

    The digest is of names, shapes and values as bfloat16, so a bfloat16 checkpoint and its float32
    copy have the same digest.

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


log = logging.getLogger(__name__)

# Least number of probes per layer over all batches. A standard error from fewer says little.
_LEAST_PROBES = 8

Key = tuple[str, int, int]  # (layer, number of the batch, number of the probe)


class Journal:
    """Keep all measurements. Each is one number, or the three numbers that `hutchpp` returns.

    Every rank appends one JSON line per measurement to its own file. After a kill, the next run
    reads the files of all ranks, whatever their number was, and measures only what is missing.

    Args:
        folder: Folder of one estimation (weights, samples, settings). None: keep everything in
            memory.
        rank: Rank of this process.
    """

    def __init__(self, folder: Path | None = None, rank: int = 0):
        self.values: dict[Key, list[float]] = {}
        self._path = folder and folder / f"rank{rank}.jsonl"
        for path in sorted(folder.glob("rank*.jsonl")) if folder else ():
            for *key, values in read_json_lines(path):
                self.values[tuple(key)] = values

    def add(self, measured: dict[Key, list[float]]) -> None:
        """Record measurements in memory and, if there is a folder, on disk."""
        self.values |= measured
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                for key, values in measured.items():  # The line before may be cut off.
                    file.write(f"\n{json.dumps([*key, values])}")


def estimate_sensitivity(
    model: nn.Module,
    weights: Mapping[str, nn.Parameter],
    batches: Sequence[CalibrationBatch],
    settings: EstimationConfig | None = None,
    *,
    seed: int = 0,
    journal: Journal | None = None,
    identity: Mapping[str, Any] | None = None,
) -> SensitivityArtifact:
    """Return the sensitivity artifact of a model, estimated on calibration batches.

    A trace is that of the layer's diagonal block in the Hessian of the mean cross-entropy, in nats
    per token (Eq. 12), or in the Gauss-Newton matrix. A progress bar shows the measurements. In a
    process group, every rank calls this function with the whole model and all batches, and gets the
    same result.

    Args:
        model: The pretrained model, not prepared, on any device. It is called as
            ``model(tokens, **model_inputs)``, and returns logits (batch, seq_len, vocabulary). It
            is not changed.
        weights: Fully qualified name -> weight of each layer that will be quantized, in float32 or
            float64.
        batches: The calibration samples.
        settings: Settings of the estimation. None: the defaults.
        seed: Seed of the probes.
        journal: File of measurements, from which a later call continues
            (`hestia_tune.sensitivity.estimation.Journal`). None: they are not kept.
        identity: The key that a journal is checked against, if it is known already. None: it is
            computed.

    Raises:
        InputTypeError: If a weight has a lower precision than float32.
        InputError: If there is nothing to measure, or no trace is more than two standard errors
            above zero.
        NotFiniteError: If a product is not finite. The error names the layer and the batch.
    """
    settings = settings or EstimationConfig()
    if not weights or not any(batch.num_predicted for batch in batches):
        raise InputError(
            "sensitivity needs at least one layer and one token to predict; check the layers that "
            "are quantized, and the dataset"
        )
    for name, weight in weights.items():
        if weight.dtype not in (torch.float32, torch.float64):
            raise InputTypeError(f"{name} is {weight.dtype}; load the model in float32")
    started = time.perf_counter()
    flags = [(p, "requires_grad", p.requires_grad) for p in model.parameters()]
    flags += [(m, "training", m.training) for m in model.modules()]
    try:
        model.eval().requires_grad_(False)
        for weight in weights.values():
            weight.requires_grad_()
        work = _Estimation(model, weights, batches, settings, seed, journal or Journal())
        columns = work.columns()
    finally:
        for owner, flag, value in flags:
            setattr(owner, flag, value)
    artifact = SensitivityArtifact(
        **columns,
        **(identity or estimation_identity(model_fingerprint(weights), batches, settings, seed)),
        tokens_seen=sum(batch.num_predicted for batch in batches),
        wall_time_seconds=round(time.perf_counter() - started, 3),
    )
    if names := ", ".join(artifact.unresolved):
        rule = "a trace that is not known to be positive counts as the smallest positive trace"
        log.warning(f"{rule}; raise num_probes for a better estimate of {names}")
    return artifact


def probe_generator(seed: int, key: Key, device: torch.device) -> torch.Generator:
    """Return the source of a probe's random numbers, which is the same on every rank and run."""
    name, batch, probe = key
    text = f"{seed}/{name}/{batch}/{probe}"
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    return torch.Generator(device).manual_seed(number)


@dataclass(frozen=True)
class _Estimation:
    """Estimate in rounds of measurements until no layer needs more probes."""

    model: nn.Module
    weights: Mapping[str, nn.Parameter]
    batches: Sequence[CalibrationBatch]
    settings: EstimationConfig
    seed: int
    journal: Journal

    @property
    def is_sketched(self) -> bool:
        """Whether Hutch++ measures every batch, once per layer."""
        return self.settings.rank is not None

    def columns(self) -> dict[str, dict[str, Any]]:
        """Run all rounds; return traces, standard errors and numbers of probes, by layer."""
        settings, num_batches = self.settings, len(self.batches)
        floor = max(2, math.ceil(_LEAST_PROBES / num_batches))  # A standard error needs 2 probes.
        floor = 1 if self.is_sketched else min(floor, settings.num_probes)
        next_counts, counts = dict.fromkeys(self.weights, floor), {}
        while next_counts != counts:
            counts = next_counts
            self._measure(counts)
            results = {name: self._combine(name, count) for name, count in counts.items()}
            traces, errors, probes = ({n: r[k] for n, r in results.items()} for k in range(3))
            if not self.is_sketched:
                next_counts = self._next_counts(counts, traces, errors)
        return {"traces": traces, "standard_errors": errors, "probes": probes}

    def _combine(self, name: str, count: int) -> tuple[float, float, int]:
        """Return the trace, its standard error and the number of probes of a layer.

        Args:
            name: Name of the layer.
            count: Number of measurements on each batch.
        """
        tokens = torch.tensor([b.num_predicted for b in self.batches], dtype=torch.float64)
        shares, batches = tokens / tokens.sum(), range(len(tokens))
        measured = [[self.journal.values[name, b, k] for k in range(count)] for b in batches]
        values = torch.tensor(measured, dtype=torch.float64)  # (batches, count, 1 or 3)
        if self.is_sketched:
            means, deviations, probes = values[:, 0].unbind(-1)  # (batches,) each
            variances = deviations.square()
        else:
            variances, means = torch.var_mean(values[..., 0], 1)  # (batches,)
            variances, probes = variances / count, torch.full_like(means, count)
        trace, variance = (shares * means).sum(), (shares.square() * variances).sum()
        return trace.item(), variance.sqrt().item(), int(probes.sum())

    def _next_counts(
        self, counts: dict[str, int], traces: ByLayer, errors: ByLayer
    ) -> dict[str, int]:
        """Return how many probes per batch each layer needs in the next round.

        Args:
            counts: Number of probes per batch of each layer so far.
            traces: Trace of each layer so far.
            errors: Standard error of each trace.
        """
        settings = self.settings
        resolved = {name for name in traces if is_resolved(traces[name], errors[name])}
        if resolved:
            _, score_errors = sensitivity_scores(traces, errors, kappa=settings.kappa)
        next_counts = {}
        for name, count in counts.items():
            if name in resolved:
                # A standard error is uncertain itself, by 1/sqrt(2·degrees of freedom).
                error = 1 + 1 / math.sqrt(2 * len(self.batches) * (count - 1))
                ratio = score_errors[name] * error / settings.target_standard_error
                more = math.ceil(count * min(ratio, 100.0) ** 2)
            else:  # Doubled, unless the trace is certainly negative.
                more = count if is_resolved(-traces[name], 2 * errors[name]) else count * 2
            next_counts[name] = min(settings.num_probes, max(count, more))
        if settings.curvature == "fisher":  # One pass measures all layers anyway.
            return dict.fromkeys(next_counts, max(next_counts.values()))
        return next_counts

    def _measure(self, counts: dict[str, int]) -> None:
        """Measure the missing ones of ``counts`` probes per batch; share them among the ranks."""
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        missing = []
        for batch in range(rank, len(self.batches), ranks):
            keys = ((name, batch, k) for name, count in counts.items() for k in range(count))
            missing.append([key for key in keys if key not in self.journal.values])
        total = sum(map(len, missing))
        with progress_bar(total=total, disable=not total, desc="sensitivity") as bar:
            for keys in filter(None, missing):
                for measured in self._measurements(keys):
                    for (name, batch, _), values in measured.items():
                        if not math.isfinite(sum(values)):
                            raise NotFiniteError(
                                f"the curvature of {name} on calibration batch {batch} is "
                                f"{values[0]}; check the weights, and the data of this batch"
                            )
                    self.journal.add(measured)
                    bar.update(len(measured))
        for values in gathered(self.journal.values):
            self.journal.values |= values

    def _measurements(self, keys: list[Key]) -> Iterator[dict[Key, list[float]]]:
        """Yield the measurements of ``keys``, some at a time.

        Args:
            keys: Keys of measurements on one batch.

        Yields:
            Key -> measurement.
        """
        settings, weights, index = self.settings, self.weights, keys[0][1]
        device = next(iter(weights.values())).device
        batch = self.batches[index].to(device)
        generator = partial(probe_generator, self.seed, device=device)
        if settings.curvature == "fisher":
            probes = sorted({probe for _, _, probe in keys})
            sources = (generator(("", index, probe)) for probe in probes)
            passes = curvature.fisher_traces(self.model, weights, batch, sources)
            for probe, traces in zip(probes, passes, strict=True):
                yield {(name, index, probe): [trace] for name, trace in traces.items()}
            return
        first, segments = cut(self.model, weights, batch)
        hessian = curvature.HessianBatch(first, segments)
        if settings.rank is not None:
            for key in keys:
                result = curvature.hutchpp(
                    partial(hessian.products, key[0]),
                    lambda vs, name=key[0]: hessian.quadratic_forms([(name, v) for v in vs]),
                    weights[key[0]].detach(),
                    rank=settings.rank,
                    num_probes=settings.num_probes,
                    generator=generator(key),
                )
                yield {key: list(result)}
            return
        for start in range(0, len(keys), curvature.DIRECTIONS_PER_WALK):
            group = keys[start : start + curvature.DIRECTIONS_PER_WALK]
            directions = [
                (key[0], lambda key=key: curvature.rademacher(weights[key[0]], generator(key)))
                for key in group
            ]
            forms = hessian.quadratic_forms(directions)
            yield {key: [form] for key, form in zip(group, forms, strict=True)}
