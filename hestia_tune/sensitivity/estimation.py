"""From a pretrained model and calibration batches to the sensitivity artifact.

The trace of a layer is that of the Hessian (or Gauss-Newton) block of the mean loss over all
calibration tokens: the mean of the batches' traces, weighted by their tokens. Every batch gets its
own probes, at least two for each layer, whose spread within the batch gives the standard error;
so the error is that of the estimation, for these samples. Rounds: every layer gets the floor; then
those whose score is not known well enough get as many as their spread asks for, up to the cap.

Probes are numbered, and a probe's random numbers follow from the seed, the layer, the batch and its
number alone. So ranks share the batches out, a killed estimation goes on, and the result is that of
one uninterrupted process.
"""

import contextlib
import functools
import hashlib
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from hestia_tune.sections import EstimationConfig
from hestia_tune.sensitivity.artifact import SensitivityArtifact, model_fingerprint, samples_digest
from hestia_tune.sensitivity.curvature import HessianBatch, fisher_traces
from hestia_tune.sensitivity.hutchpp import TraceEstimate, hutchpp, rademacher
from hestia_tune.sensitivity.journal import Journal, Key
from hestia_tune.sensitivity.scores import (
    RESOLVED_ERRORS,
    is_resolved,
    score_standard_errors,
    usable_traces,
)
from hestia_tune.sensitivity.segments import CalibrationBatch, cut

log = logging.getLogger(__name__)

# Probes per layer over all batches, below which a standard error says little.
_LEAST_PROBES = 8
# They share one run of every segment (3 units of work, against some 4 for each of them), and are
# recorded together.
DIRECTIONS_PER_WALK = 32


def estimate_sensitivity(
    model: nn.Module,
    weights: Mapping[str, nn.Parameter],
    batches: Sequence[CalibrationBatch],
    settings: EstimationConfig | None = None,
    *,
    journal: Journal | None = None,
    progress: bool = True,
) -> SensitivityArtifact:
    """The sensitivity artifact of a model, from calibration batches.

    In a process group, every rank calls this with the whole model and all batches; they share the
    batches out and all get the same result.

    Args:
        model: pretrained, not prepared, in float32 (or float64), on any device; takes tokens and
            the batches' ``model_inputs``, gives logits. Left as it was.
        weights: fully qualified name -> weight of each layer that will be quantized.
        batches: the calibration samples.
        settings: see `EstimationConfig`; None takes the defaults.
        journal: keeps measurements for a later call; None does not.
        progress: shows a progress bar with the time left, on the first rank.

    Raises:
        TypeError: if a weight is of lower precision than float32.
        ValueError: if there is nothing to measure, or no trace comes out positive.
        FloatingPointError: naming the layer and the batch, if a product is not finite.
    """
    settings = settings or EstimationConfig()
    _check_inputs(weights, batches)
    started = time.perf_counter()
    with _in_eval_mode(model, weights):
        traces = _Estimation(
            model, weights, batches, settings, journal or Journal(), progress
        ).traces()
    identity = estimation_identity(weights, batches, settings)
    artifact = SensitivityArtifact(
        traces={name: t.trace for name, t in traces.items()},
        standard_errors={name: t.standard_error for name, t in traces.items()},
        resolved={name: is_resolved(t.trace, t.standard_error) for name, t in traces.items()},
        probes={name: t.probes for name, t in traces.items()},
        model_fingerprint=identity["model_fingerprint"],
        estimator=identity["estimator"],
        dataset={"num_batches": len(batches), "digest": identity["samples"]},
        tokens_seen=sum(batch.num_predicted for batch in batches),
        wall_time_seconds=round(time.perf_counter() - started, 3),
    )
    for name in artifact.unresolved:
        found = traces[name]
        log.warning(
            f"the trace of {name}, {found.trace:.3g} +- {found.standard_error:.2g}, is not known "
            "to be positive; it takes the smallest resolved one (raise "
            "sensitivity_estimation.num_probes for a better estimate)"
        )
    return artifact


def estimation_identity(
    weights: Mapping[str, torch.Tensor],
    batches: Sequence[CalibrationBatch],
    settings: EstimationConfig,
) -> dict[str, Any]:
    """What the numbers of an estimation depend on: two digests, and the method with its settings.

    Args:
        weights: fully qualified name -> pretrained weight, in any dtype.
    """
    methods = {"hessian": "hutch++" if settings.fixed else "hutchinson", "fisher": "gauss-newton"}
    estimator = {"method": methods[settings.curvature], **asdict(settings)}
    for key in ("output", "overwrite", "vectors_at_once"):
        del estimator[key]
    return {
        "model_fingerprint": model_fingerprint(weights),
        "estimator": estimator,
        "samples": samples_digest(batches),
    }


def _check_inputs(weights: Mapping[str, nn.Parameter], batches: Sequence[CalibrationBatch]) -> None:
    if not weights or not batches:
        raise ValueError("sensitivity needs at least one layer and one calibration sample")
    for name, weight in weights.items():
        if weight.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"second derivatives need float32 weights; {name} is {weight.dtype}; "
                "load the model in float32"
            )
    empty = [k for k, batch in enumerate(batches) if batch.num_predicted == 0]
    if empty:
        raise ValueError(f"calibration batch {empty[0]} has no token to predict; check the dataset")


@contextlib.contextmanager
def _in_eval_mode(model: nn.Module, weights: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Without dropout, with gradients for ``weights`` alone; everything as it was afterwards."""
    required = {parameter: parameter.requires_grad for parameter in model.parameters()}
    was_training = {module: module.training for module in model.modules()}
    wanted = {id(weight) for weight in weights.values()}
    try:
        model.eval()
        for parameter in required:
            parameter.requires_grad_(id(parameter) in wanted)
        yield
    finally:
        for parameter, flag in required.items():
            parameter.requires_grad_(flag)
        for module, flag in was_training.items():
            module.training = flag


def probe_generator(seed: int, key: Key, device: torch.device) -> torch.Generator:
    """The source of a probe's random numbers: the same wherever and whenever it is measured."""
    name, batch, probe = key
    text = f"{seed}/{name}/{batch}/{probe}"
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    return torch.Generator(device).manual_seed(number)


@dataclass(frozen=True)
class _Estimation:
    """One estimation: rounds of measurements until no layer needs more."""

    model: nn.Module
    weights: Mapping[str, nn.Parameter]
    batches: Sequence[CalibrationBatch]
    settings: EstimationConfig
    journal: Journal
    progress: bool

    @functools.cached_property
    def _shares(self) -> torch.Tensor:
        """Of the tokens, by batch: float64 (batches,)."""
        tokens = torch.tensor([b.num_predicted for b in self.batches], dtype=torch.float64)
        return tokens / tokens.sum()

    def traces(self) -> dict[str, TraceEstimate]:
        """Runs all rounds."""
        settings = self.settings
        floor = max(settings.min_probes, math.ceil(_LEAST_PROBES / len(self.batches)))
        floor = 1 if settings.fixed else min(floor, settings.num_probes)
        counts = dict.fromkeys(self.weights, floor)
        while True:
            self._round(counts)
            traces = {name: self._trace(name, count) for name, count in counts.items()}
            wanted = counts if settings.fixed else self._wanted(counts, traces)
            if wanted == counts:
                return traces
            counts = wanted

    def _trace(self, name: str, count: int) -> TraceEstimate:
        """Over all batches, from ``count`` measurements of each."""
        batches = range(len(self.batches))
        measured = [[self.journal.values[name, b, k] for k in range(count)] for b in batches]
        found = torch.tensor(measured, dtype=torch.float64)  # (batches, count, 1 or 2)
        if self.settings.fixed:  # (trace, standard error), once
            traces, variances = found[:, 0, 0], found[:, 0, 1].square()
            rank = min(self.settings.rank, self.weights[name].numel())
            count = 2 * rank + self.settings.num_probes
        else:
            variances, traces = torch.var_mean(found[..., 0], 1)
            variances = variances / count
        return TraceEstimate(
            trace=(self._shares * traces).sum().item(),
            standard_error=(self._shares.square() * variances).sum().sqrt().item(),
            probes=count * len(batches),
        )

    def _wanted(self, counts: dict[str, int], traces: dict[str, TraceEstimate]) -> dict[str, int]:
        """Probes per batch of the next round."""
        settings = self.settings
        found = {name: t.trace for name, t in traces.items()}
        stated = {name: t.standard_error for name, t in traces.items()}
        resolved = {name: is_resolved(found[name], stated[name]) for name in traces}
        errors = dict.fromkeys(traces, math.inf)
        if any(resolved.values()):
            usable = usable_traces(found, stated, resolved)
            errors = score_standard_errors(*usable, kappa=settings.kappa, epsilon=settings.epsilon)
        wanted = {}
        for name, count in counts.items():
            # What is stated is itself an estimate, uncertain by 1/sqrt(2·degrees of freedom).
            freedom = len(self.batches) * (count - 1)
            ratio = errors[name] * (1 + 1 / math.sqrt(2 * freedom)) / settings.target_standard_error
            if resolved[name]:
                more = math.ceil(count * min(ratio, 100.0) ** 2)
            else:  # doubled, unless it is negative beyond doubt
                upper = found[name] + 2 * RESOLVED_ERRORS * stated[name]
                more = count * 2 if upper > 0 else count
            wanted[name] = min(settings.num_probes, max(count, more))
        if settings.curvature == "fisher":  # a pass measures all layers anyway
            return dict.fromkeys(wanted, max(wanted.values()))
        return wanted

    def _round(self, counts: dict[str, int]) -> None:
        """Measures what is missing up to ``counts`` probes per batch, and shares it."""
        rank, world_size = 0, 1
        if dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
        before = set(self.journal.values)
        missing: dict[int, list[Key]] = {}
        for batch in range(rank, len(self.batches), world_size):
            keys = ((name, batch, k) for name, count in counts.items() for k in range(count))
            missing[batch] = [key for key in keys if key not in before]
        total = sum(map(len, missing.values()))
        hidden = rank > 0 or not self.progress or not total
        with tqdm(total=total, disable=hidden, desc="sensitivity") as bar:
            for keys in filter(None, missing.values()):
                for measured in self._measurements(keys):
                    self._record(measured)
                    bar.update(len(measured))
        if world_size > 1:
            new = {k: v for k, v in self.journal.values.items() if k not in before}
            everyone: list[dict[Key, list[float]]] = [{}] * world_size
            dist.all_gather_object(everyone, new)
            for values in everyone:
                self.journal.values |= values

    def _measurements(self, keys: list[Key]) -> Iterator[dict[Key, list[float]]]:
        """Of ``keys``, which are of one batch, some at a time."""
        settings, weights, index = self.settings, self.weights, keys[0][1]
        device = next(iter(weights.values())).device
        batch = self.batches[index].to(device)

        def generator(key: Key) -> torch.Generator:
            return probe_generator(settings.seed or 0, key, device)

        if settings.curvature == "fisher":
            probes = sorted({probe for _, _, probe in keys})
            sources = (generator(("", index, probe)) for probe in probes)
            passes = fisher_traces(self.model, weights, batch, sources)
            for probe, traces in zip(probes, passes, strict=True):
                yield {(name, index, probe): [trace] for name, trace in traces.items()}
            return
        first, segments = cut(self.model, weights, batch)
        hessian = HessianBatch(first, segments, vectors_at_once=settings.vectors_at_once)
        place = {name: k for k, s in enumerate(segments) for name in s.weights}
        keys = sorted(keys, key=lambda key: place[key[0]])
        per_walk = 1 if settings.fixed else DIRECTIONS_PER_WALK
        for start in range(0, len(keys), per_walk):
            group = keys[start : start + per_walk]
            if settings.fixed:
                values = [self._hutchpp(hessian, group[0], generator(group[0]))]
            else:
                directions = [
                    (key[0], lambda key=key: rademacher(weights[key[0]], generator(key)))
                    for key in group
                ]
                values = [[form] for form in hessian.quadratic_forms(directions)]
            yield dict(zip(group, values, strict=True))

    def _hutchpp(self, hessian: HessianBatch, key: Key, generator: torch.Generator) -> list[float]:
        name = key[0]
        estimate = hutchpp(
            lambda vectors: hessian.products(name, vectors),
            lambda vectors: hessian.quadratic_forms([(name, vector) for vector in vectors]),
            self.weights[name].detach(),
            rank=self.settings.rank,
            num_probes=self.settings.num_probes,
            generator=generator,
        )
        return [estimate.trace, estimate.standard_error]

    def _record(self, measured: dict[Key, list[float]]) -> None:
        for (name, batch, _), values in measured.items():
            if not all(math.isfinite(v) for v in values):
                raise FloatingPointError(
                    f"the curvature of {name} on calibration batch {batch} is {values[0]}; "
                    "check the weights, and the data of that batch"
                )
        self.journal.add(measured)
