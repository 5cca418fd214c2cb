"""Measuring every layer's trace, with as many probes as its score needs.

The trace of a layer is that of the Hessian (or Gauss-Newton) block of the mean loss over all
calibration tokens: the mean of the batches' traces, weighted by their tokens. Every batch gets its
own probes, at least two for each layer, whose spread within the batch gives the standard error;
so the error is that of the estimation, for these samples. Rounds: every layer gets the floor; then
those whose score is not known well enough get as many as their spread asks for, up to the cap.

Probes are numbered, and a probe's random numbers follow from the seed, the layer, the batch and its
number alone. So ranks share the batches out, a killed estimation goes on, and the result is that of
one uninterrupted process.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from hestia_tune.config import EstimationConfig
from hestia_tune.sensitivity.fisher import fisher_traces
from hestia_tune.sensitivity.hutchpp import hutchpp_by_forms, rademacher
from hestia_tune.sensitivity.hvp import HessianBatch, double_backward_attention
from hestia_tune.sensitivity.journal import Journal, Key
from hestia_tune.sensitivity.scores import (
    RESOLVED_ERRORS,
    is_resolved,
    score_standard_errors,
    usable_errors,
    usable_traces,
)
from hestia_tune.sensitivity.segments import (
    CalibrationBatch,
    Segment,
    cut,
    logits_of,
    mean_loss,
)

# Probes per layer over all batches, below which a standard error says little.
_LEAST_PROBES = 8
# They share one run of every segment (3 units of work, against some 4 for each of them), and are
# recorded together.
DIRECTIONS_PER_WALK = 32


@dataclass(frozen=True, kw_only=True)
class LayerTrace:
    """A layer's trace over all batches; ``probes`` counts matrix-vector products, or passes."""

    trace: float
    standard_error: float
    probes: int


class Estimation:
    """One estimation: rounds of measurements until no layer needs more."""

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[str, nn.Parameter],
        batches: Sequence[CalibrationBatch],
        settings: EstimationConfig,
        journal: Journal,
        progress: bool,
    ):
        self.model, self.weights, self.batches = model, weights, batches
        self.settings, self.journal = settings, journal
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.show = progress and self.rank == 0
        self.device = next(iter(weights.values())).device
        tokens = [batch.num_predicted for batch in batches]
        self.shares = [count / sum(tokens) for count in tokens]
        self._is_chain: bool | None = None

    def traces(self) -> dict[str, LayerTrace]:
        """Runs all rounds."""
        settings = self.settings
        if settings.fixed:
            self._round(dict.fromkeys(self.weights, 1))
            return {name: self._fixed_trace(name) for name in self.weights}
        floor = max(settings.min_probes, math.ceil(_LEAST_PROBES / len(self.batches)))
        counts = dict.fromkeys(self.weights, min(floor, settings.num_probes))
        while True:
            self._round(counts)
            traces = {name: self._adaptive_trace(name, n) for name, n in counts.items()}
            wanted = self._wanted(counts, traces)
            if wanted == counts:
                return traces
            counts = wanted

    def _fixed_trace(self, name: str) -> LayerTrace:
        found = [self.journal.values[name, b, 0] for b in range(len(self.batches))]
        variance = math.fsum((w * e) ** 2 for w, (_, e) in zip(self.shares, found, strict=True))
        per_batch = 2 * min(self.settings.rank, self.weights[name].numel())
        return LayerTrace(
            trace=math.fsum(w * t for w, (t, _) in zip(self.shares, found, strict=True)),
            standard_error=math.sqrt(variance),
            probes=(per_batch + self.settings.num_probes) * len(found),
        )

    def _adaptive_trace(self, name: str, count: int) -> LayerTrace:
        trace, variance = 0.0, 0.0
        for batch, share in enumerate(self.shares):
            probes = [self.journal.values[name, batch, k][0] for k in range(count)]
            mean = math.fsum(probes) / count
            spread = math.fsum((v - mean) ** 2 for v in probes) / (count - 1)
            trace += share * mean
            variance += share**2 * spread / count
        return LayerTrace(
            trace=trace, standard_error=math.sqrt(variance), probes=count * len(self.shares)
        )

    def _wanted(self, counts: dict[str, int], traces: dict[str, LayerTrace]) -> dict[str, int]:
        """Probes per batch of the next round."""
        settings = self.settings
        resolved = {n: is_resolved(t.trace, t.standard_error) for n, t in traces.items()}
        errors = dict.fromkeys(traces, math.inf)
        if any(resolved.values()):
            found = {n: t.trace for n, t in traces.items()}
            stated = {n: t.standard_error for n, t in traces.items()}
            errors = score_standard_errors(
                usable_traces(found, resolved),
                usable_errors(found, stated, resolved),
                kappa=settings.kappa,
                epsilon=settings.epsilon,
            )
        wanted = {}
        for name, count in counts.items():
            # What is stated is itself an estimate, uncertain by 1/sqrt(2·degrees of freedom).
            freedom = len(self.batches) * (count - 1)
            ratio = errors[name] * (1 + 1 / math.sqrt(2 * freedom)) / settings.target_standard_error
            if resolved[name]:
                more = math.ceil(count * min(ratio, 100.0) ** 2)
            else:  # doubled, unless it is negative beyond doubt
                upper = traces[name].trace + 2 * RESOLVED_ERRORS * traces[name].standard_error
                more = count * 2 if upper > 0 else count
            wanted[name] = min(settings.num_probes, max(count, more))
        if settings.curvature == "fisher":  # a pass measures all layers anyway
            return dict.fromkeys(wanted, max(wanted.values()))
        return wanted

    def _round(self, counts: dict[str, int]) -> None:
        """Measures what is missing up to ``counts`` probes per batch, and shares it."""
        before = set(self.journal.values)
        missing = {
            batch: [
                (name, batch, probe)
                for name, count in counts.items()
                for probe in range(count)
                if (name, batch, probe) not in before
            ]
            for batch in range(self.rank, len(self.batches), self.world_size)
        }
        total = sum(map(self._cost, missing.values()))
        with tqdm(total=total, disable=not self.show or not total, desc="sensitivity") as bar:
            for batch, keys in missing.items():
                if not keys:
                    continue
                on_device = self.batches[batch].to(self.device)
                if self.settings.curvature == "fisher":
                    self._measure_fisher(on_device, keys, bar)
                else:
                    self._measure_hessian(on_device, keys, bar)
        if self.world_size > 1:
            new = {k: v for k, v in self.journal.values.items() if k not in before}
            everyone: list[dict[Key, list[float]]] = [{}] * self.world_size
            dist.all_gather_object(everyone, new)
            for values in everyone:
                self.journal.values |= values

    def _cost(self, keys: list[Key]) -> int:
        """Steps of the progress bar: passes, or directions through a segment."""
        if not keys:
            return 0
        if self.settings.curvature == "fisher":
            return len({probe for _, _, probe in keys})
        _, segments = self._cut(self.batches[0].to(self.device))
        above = {name: len(segments) - k for k, s in enumerate(segments) for name in s.weights}
        if not self.settings.fixed:
            return sum(above[name] for name, _, _ in keys)
        total = 0
        for name, _, _ in keys:
            rank = min(self.settings.rank, self.weights[name].numel())
            total += (3 * rank + self.settings.num_probes) * above[name] - rank
        return total

    def _cut(self, batch: CalibrationBatch) -> tuple[torch.Tensor, list[Segment]]:
        """The model as segments; as one, if those do not compute what the model does."""
        if self._is_chain is None:
            with torch.no_grad(), double_backward_attention():
                hidden, segments = cut(self.model, self.weights, batch)
                for segment in segments:
                    hidden = segment.forward(hidden)
                loss = mean_loss(logits_of(self.model, batch), batch.labels)
            close = torch.isclose(hidden, loss, rtol=1e-3, atol=1e-6, equal_nan=True)
            self._is_chain = bool(close)
        return cut(self.model, self.weights, batch, whole=not self._is_chain)

    def _measure_fisher(self, batch: CalibrationBatch, keys: list[Key], bar: tqdm) -> None:
        index = keys[0][1]
        probes = sorted({probe for _, _, probe in keys})
        generators = (self._generator("", index, probe) for probe in probes)
        passes = fisher_traces(self.model, self.weights, batch, generators)
        for probe, traces in zip(probes, passes, strict=True):
            self._record({(name, index, probe): [trace] for name, trace in traces.items()})
            bar.update(1)

    def _measure_hessian(self, batch: CalibrationBatch, keys: list[Key], bar: tqdm) -> None:
        hidden, segments = self._cut(batch)
        hessian = HessianBatch(
            hidden, segments, vectors_at_once=self.settings.vectors_at_once, on_progress=bar.update
        )
        place = {name: k for k, s in enumerate(segments) for name in s.weights}
        keys = sorted(keys, key=lambda key: place[key[0]])
        if self.settings.fixed:
            for key in keys:
                self._record({key: self._hutchpp(hessian, key)})
            return
        for start in range(0, len(keys), DIRECTIONS_PER_WALK):
            group = keys[start : start + DIRECTIONS_PER_WALK]
            directions = [(key[0], self._direction(key)) for key in group]
            forms = hessian.quadratic_forms(directions)
            self._record({key: [form] for key, form in zip(group, forms, strict=True)})

    def _direction(self, key: Key) -> Callable[[], torch.Tensor]:
        weight = self.weights[key[0]]
        return lambda: rademacher(weight.numel(), self._generator(*key), weight)

    def _hutchpp(self, hessian: HessianBatch, key: Key) -> list[float]:
        name, weight = key[0], self.weights[key[0]]
        estimate = hutchpp_by_forms(
            lambda vectors: hessian.products(name, vectors),
            lambda vectors: hessian.quadratic_forms([(name, vector) for vector in vectors]),
            weight.numel(),
            rank=self.settings.rank,
            num_probes=self.settings.num_probes,
            generator=self._generator(*key),
            like=weight.detach(),
        )
        return [estimate.trace, estimate.standard_error]

    def _generator(self, name: str, batch: int, probe: int) -> torch.Generator:
        text = f"{self.settings.seed or 0}/{name}/{batch}/{probe}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        return torch.Generator(self.device).manual_seed(seed)

    def _record(self, measured: dict[Key, list[float]]) -> None:
        for (name, batch, _), values in measured.items():
            if not all(math.isfinite(v) for v in values):
                raise FloatingPointError(
                    f"the curvature of {name} on calibration batch {batch} is {values[0]}; "
                    "check the weights, and the data of that batch"
                )
        self.journal.add(measured)
