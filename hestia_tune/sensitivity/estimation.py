"""From a pretrained model and calibration batches to the sensitivity artifact.

A layer's trace, of the mean loss over all calibration tokens, is the mean of the batches' traces,
weighted by their tokens. Every batch gets its own probes, at least two for each layer, whose spread
within the batch gives the standard error; so the error is that of the estimation, for these
samples. Rounds: every layer gets the floor; then those whose score is not known well enough get as
many as their spread asks for, up to the cap.

A probe's random numbers follow from the seed, the layer, the batch and its own number alone. So
ranks share the batches out, a killed estimation goes on, and the result is that of one process.
"""

import contextlib
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
from hestia_tune.sensitivity import curvature
from hestia_tune.sensitivity.artifact import (
    ByLayer,
    SensitivityArtifact,
    estimation_identity,
    is_resolved,
    sensitivity_scores,
)
from hestia_tune.sensitivity.curvature import CalibrationBatch, cut

log = logging.getLogger(__name__)

# Probes per layer over all batches, below which a standard error says little.
_LEAST_PROBES = 8

Key = tuple[str, int, int]  # (layer, batch, number of the probe)


class Journal:
    """What has been measured: by key, one number, or what `hutchpp` returns.

    Every rank appends a JSON line per measurement to a file of its own. After a kill the next run
    reads the files of all ranks, whatever their number was, and measures only what is missing.

    Args:
        folder: of one estimation (weights, samples, settings); None keeps everything in memory.
        rank: of this process.
    """

    def __init__(self, folder: Path | None = None, rank: int = 0):
        self.values: dict[Key, list[float]] = {}
        self._path = folder and folder / f"rank{rank}.jsonl"
        for path in sorted(folder.glob("rank*.jsonl")) if folder else ():
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError):  # the line being written at a kill
                    layer, batch, probe, values = json.loads(line)
                    self.values[layer, batch, probe] = values

    def add(self, measured: dict[Key, list[float]]) -> None:
        """Records measurements, on disk too."""
        self.values |= measured
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                for key, values in measured.items():  # the line before may be cut off
                    file.write(f"\n{json.dumps([*key, values])}")


def estimate_sensitivity(
    model: nn.Module,
    weights: Mapping[str, nn.Parameter],
    batches: Sequence[CalibrationBatch],
    settings: EstimationConfig | None = None,
    *,
    seed: int = 0,
    journal: Journal | None = None,
) -> SensitivityArtifact:
    """The sensitivity artifact of a model, from calibration batches, with a progress bar.

    In a process group, every rank calls this with the whole model and all batches, and gets the
    same result.

    Args:
        model: pretrained, not prepared, in float32 (or float64), on any device; takes tokens and
            the batches' ``model_inputs``, gives logits. Left as it was.
        weights: fully qualified name -> weight of each layer that will be quantized.
        batches: the calibration samples.
        settings: None takes the defaults.
        seed: Seed of the probes.
        journal: keeps measurements for a later call; None does not.

    Raises:
        InputTypeError: if a weight is of lower precision than float32.
        InputError: if there is nothing to measure, or no trace comes out positive.
        NotFiniteError: naming the layer and the batch, if a product is not finite.
    """
    settings = settings or EstimationConfig()
    if not weights or not any(batch.num_predicted for batch in batches):
        raise InputError("sensitivity needs at least one layer and one token to predict")
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
        journal = journal or Journal()
        columns = _Estimation(model, weights, batches, settings, seed, journal).columns()
    finally:
        for owner, flag, value in flags:
            setattr(owner, flag, value)
    artifact = SensitivityArtifact(
        **columns,
        **estimation_identity(weights, batches, settings, seed),
        tokens_seen=sum(batch.num_predicted for batch in batches),
        wall_time_seconds=round(time.perf_counter() - started, 3),
    )
    if artifact.unresolved:
        log.warning(
            "traces not known to be positive take the smallest resolved one; raise num_probes for "
            f"a better estimate of {', '.join(artifact.unresolved)}"
        )
    return artifact


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
    seed: int
    journal: Journal

    @property
    def is_sketched(self) -> bool:
        """Whether every batch is measured once by Hutch++."""
        return self.settings.rank is not None

    def columns(self) -> dict[str, dict[str, Any]]:
        """Runs all rounds: traces, standard errors and probes, each by layer."""
        settings, num_batches = self.settings, len(self.batches)
        floor = max(2, math.ceil(_LEAST_PROBES / num_batches))  # a standard error needs 2
        floor = 1 if self.is_sketched else min(floor, settings.num_probes)
        wanted, counts = dict.fromkeys(self.weights, floor), {}
        while wanted != counts:
            counts = wanted
            self._round(counts)
            found = {name: self._combined(name, count) for name, count in counts.items()}
            traces, errors, probes = ({n: f[k] for n, f in found.items()} for k in range(3))
            if not self.is_sketched:
                wanted = self._wanted(counts, traces, errors)
        return {"traces": traces, "standard_errors": errors, "probes": probes}

    def _combined(self, name: str, count: int) -> tuple[float, float, int]:
        """(trace, standard error, probes) over all batches, from ``count`` measurements of each."""
        tokens = torch.tensor([b.num_predicted for b in self.batches], dtype=torch.float64)
        shares, batches = tokens / tokens.sum(), range(len(tokens))
        measured = [[self.journal.values[name, b, k] for k in range(count)] for b in batches]
        found = torch.tensor(measured, dtype=torch.float64)  # (batches, count, 1 or 3)
        if self.is_sketched:
            means, deviations, probes = found[:, 0].unbind(-1)  # (batches,) each
            variances = deviations.square()
        else:
            variances, means = torch.var_mean(found[..., 0], 1)  # (batches,)
            variances, probes = variances / count, torch.full_like(means, count)
        trace, variance = (shares * means).sum(), (shares.square() * variances).sum()
        return trace.item(), variance.sqrt().item(), int(probes.sum())

    def _wanted(self, counts: dict[str, int], traces: ByLayer, errors: ByLayer) -> dict[str, int]:
        """Probes per batch of the next round."""
        settings = self.settings
        resolved = {name for name in traces if is_resolved(traces[name], errors[name])}
        if resolved:
            _, score_errors = sensitivity_scores(traces, errors, kappa=settings.kappa)
        wanted = {}
        for name, count in counts.items():
            if name in resolved:
                # An error is itself an estimate, uncertain by 1/sqrt(2·degrees of freedom).
                error = 1 + 1 / math.sqrt(2 * len(self.batches) * (count - 1))
                ratio = score_errors[name] * error / settings.target_standard_error
                more = math.ceil(count * min(ratio, 100.0) ** 2)
            else:  # doubled, unless it is negative beyond doubt
                more = count if is_resolved(-traces[name], 2 * errors[name]) else count * 2
            wanted[name] = min(settings.num_probes, max(count, more))
        if settings.curvature == "fisher":  # a pass measures all layers anyway
            return dict.fromkeys(wanted, max(wanted.values()))
        return wanted

    def _round(self, counts: dict[str, int]) -> None:
        """Measures what is missing up to ``counts`` probes per batch, and shares it."""
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
                                f"{values[0]}; check the weights, and the data of that batch"
                            )
                    self.journal.add(measured)
                    bar.update(len(measured))
        for values in gathered(self.journal.values):
            self.journal.values |= values

    def _measurements(self, keys: list[Key]) -> Iterator[dict[Key, list[float]]]:
        """Of ``keys``, which are of one batch, some at a time."""
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
        if self.is_sketched:
            for key in keys:
                found = curvature.hutchpp(
                    partial(hessian.products, key[0]),
                    lambda vs, name=key[0]: hessian.quadratic_forms([(name, v) for v in vs]),
                    weights[key[0]].detach(),
                    rank=settings.rank,
                    num_probes=settings.num_probes,
                    generator=generator(key),
                )
                yield {key: list(found)}
            return
        for start in range(0, len(keys), curvature.DIRECTIONS_PER_WALK):
            group = keys[start : start + curvature.DIRECTIONS_PER_WALK]
            directions = [
                (key[0], lambda key=key: curvature.rademacher(weights[key[0]], generator(key)))
                for key in group
            ]
            forms = hessian.quadratic_forms(directions)
            yield {key: [form] for key, form in zip(group, forms, strict=True)}
