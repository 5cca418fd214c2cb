"""Turn a pretrained model and calibration batches into the sensitivity artifact.

The loss is the mean over all calibration tokens. So the trace of a layer is the mean of its traces
on the batches, weighted by their numbers of tokens. Every batch gets its own probes, at least two
per layer. Their spread within the batch gives the standard error. So this is the error of the
estimation for these samples. It does not say how the trace would differ on other samples.

The estimation has rounds. First every layer gets the least number of probes. Then layers whose
score is still too uncertain get as many probes as their spread requires, up to the cap.

The random numbers of a probe depend only on the seed, the layer, the batch and the number of the
probe. So ranks can share the batches, and a killed estimation can continue. The result is the same
as the result of one process.
"""

import hashlib
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hestia_tune.config import EstimationConfig
from hestia_tune.distributed import gathered, progress_bar
from hestia_tune.errors import InputError, InputTypeError, NotFiniteError
from hestia_tune.files import read_json_lines
from hestia_tune.sensitivity import curvature
from hestia_tune.sensitivity.artifact import (
    ByLayer,
    SensitivityArtifact,
    estimation_identity,
    is_resolved,
    model_fingerprint,
    sensitivity_scores,
)
from hestia_tune.sensitivity.curvature import CalibrationBatch, cut

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

    A progress bar shows the measurements. In a process group, every rank calls this function with
    the whole model and all batches. Every rank gets the same result.

    Args:
        model: The pretrained model, not prepared, in float32 or float64, on any device. It takes
            tokens and the ``model_inputs`` of a batch, and returns logits. It is not changed.
        weights: Fully qualified name -> weight of each layer that will be quantized.
        batches: The calibration samples.
        settings: Settings of the estimation. None: the defaults.
        seed: Seed of the probes.
        journal: Keeps measurements for a later call. None: they are not kept.
        identity: What `estimation_identity` returned for this call. None: it is computed.

    Raises:
        InputTypeError: If a weight has a lower precision than float32.
        InputError: If there is nothing to measure, or no trace is known to be positive.
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
        """Return whether Hutch++ measures every batch, once per layer."""
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
