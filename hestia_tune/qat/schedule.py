"""Pressure, temperature and learning rate as functions of the step; the driver that hands the
first two to layers.

Legend: t global step (optimizer steps done so far), T total steps, rho compress ratio,
T_comp = rho·T (a real number, not rounded), alpha sensitivity strength, s sensitivity score.

Training step t uses the values at t, so the last one, T - 1, is still slightly soft; at t = T the
pressure is 1 and the temperature 0, which is the hard model. Everything follows from the global
step, so a resumed run needs no state of its own.
"""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hestia_tune.config import ScheduleConfig, Section, require_number
from hestia_tune.errors import InputError, InputTypeError

if TYPE_CHECKING:
    from hestia_tune.qat.linear import QuantizedLinear


class AnnealingSchedule:
    """Both schedules for one run.

    Args:
        total_steps: T, at least 1.
        rho, tau_init, alpha, hard_fraction: see `hestia_tune.config.ScheduleConfig`; tau_init a
            number.

    Raises:
        InputError: on options out of range.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        rho: float = 0.2,
        tau_init: float = 0.3,
        alpha: float = 0.4,
        hard_fraction: float = 0.0,
    ):
        if isinstance(total_steps, bool) or not isinstance(total_steps, int):
            raise InputTypeError(f"total_steps must be an int; got {total_steps!r}")
        if total_steps < 1:
            raise InputError(f"total_steps must be at least 1; got {total_steps}")
        config = ScheduleConfig(
            rho=rho, tau_init=tau_init, alpha=alpha, hard_fraction=hard_fraction
        )
        if isinstance(config.tau_init, str):
            raise InputTypeError(
                'tau_init must be a number here; resolve "auto" by optimal_temperature'
            )
        if config.rho == 1:
            warnings.warn(
                "schedule.rho 1 leaves no step to anneal: the pressure rises over the whole run, "
                "straight into the hard model; the paper uses 0.2",
                stacklevel=2,
            )
        self.total_steps, self.tau_init = total_steps, float(config.tau_init)
        self.rho, self.alpha = config.rho, config.alpha
        self.hard_fraction = config.hard_fraction

    @classmethod
    def of(cls, total_steps: int, section: Section, **changes: float) -> "AnnealingSchedule":
        """With the options that a section has under the names of `ScheduleConfig`, or others."""
        names = [field.name for field in dataclasses.fields(ScheduleConfig)]
        return cls(total_steps, **{name: getattr(section, name) for name in names} | changes)

    def pressure(self, step: int) -> float:
        """p_t = min(1, t / (rho·T)), or 1 if rho is 0 (Eq. 8)."""
        if self.rho == 0 or step >= self.total_steps:
            return 1.0
        return min(1.0, step / (self.rho * self.total_steps))

    def temperature(self, step: int, score: float = 0.0) -> float:
        """That of a tensor with sensitivity ``score``: e^{alpha·s} (Eq. 13: a more sensitive one is
        hotter at every step) times tau_init until T_comp, then (tau_init/2)·(1 +
        cos(pi·(t - T_comp)/(T_hard - T_comp))) until T_hard = (1 - hard_fraction)·T (Eq. 12, where
        it is T), then 0."""
        compress_steps = self.rho * self.total_steps
        hard_from = (1.0 - self.hard_fraction) * self.total_steps
        if step >= hard_from:
            return 0.0
        base = self.tau_init
        if step > compress_steps:
            progress = (step - compress_steps) / (hard_from - compress_steps)
            base = 0.5 * base * (1.0 + math.cos(math.pi * progress))
        return base * math.exp(self.alpha * score)


class ScheduleDriver:
    """Writes pressure and temperature into the quantized linears of a prepared model.

    Args:
        schedule: what to write.
        layers: fully qualified name -> quantized linear (see `hestia_tune.quantized_linears`), or
            any module with a ``weight_fake_quantizer`` that has the 0-D buffers ``tau`` and
            ``pressure``.
        scores: sensitivity score per name, or None for the uniform schedule (every score 0, the
            paper's "w/o Hessian").
        after_write: called when the values have changed, for what depends on them
            (`hestia_tune.qat.shards.refresh`).

    Attributes:
        layers: as given.

    Raises:
        InputError: if there are no layers, or the names of ``scores`` are not those of ``layers``.
    """

    def __init__(
        self,
        schedule: AnnealingSchedule,
        layers: Mapping[str, "QuantizedLinear"],
        scores: Mapping[str, float] | None = None,
        after_write: Callable[[], None] | None = None,
    ):
        if not layers:
            raise InputError("the model has no quantized layers; prepare it first")
        if scores is not None and set(scores) != set(layers):
            odd = sorted(set(scores) ^ set(layers))
            raise InputError(f"sensitivity scores and quantized layers differ in {odd[:3]}")
        self.schedule = schedule
        self.layers = dict(layers)
        self._after_write = after_write or (lambda: None)
        self._scores = {name: 0.0 if scores is None else scores[name] for name in layers}

    def temperatures(self, step: int) -> dict[str, float]:
        """Temperature of every layer at ``step``, by name."""
        return {name: self.schedule.temperature(step, s) for name, s in self._scores.items()}

    def set_step(self, step: int) -> None:
        """Call before the forward of training step ``step``, and never between it and backward."""
        self.write(self.temperatures(step), self.schedule.pressure(step))

    def write(self, temperatures: Mapping[str, float], pressure: float) -> None:
        """Sets the temperature of every layer, by name, and the pressure of all.

        One copy to the device and one fused kernel, however many layers there are.
        """
        taus = [temperatures[name] for name in self.layers]
        fakes = [layer.weight_fake_quantizer for layer in self.layers.values()]
        buffers = [fake.tau for fake in fakes] + [fake.pressure for fake in fakes]
        values = torch.tensor(taus + [pressure] * len(taus), dtype=torch.float32)
        torch._foreach_copy_(
            buffers, list(values.to(buffers[0].device, non_blocking=True).unbind())
        )
        self._after_write()

    @contextlib.contextmanager
    def _temporarily(self, pressure: float, *, is_hard: bool) -> Iterator[None]:
        fakes = [layer.weight_fake_quantizer for layer in self.layers.values()]
        before = [(fake.tau.clone(), fake.pressure.clone()) for fake in fakes]
        for fake in fakes:
            fake.is_hard = is_hard
        self.write(dict.fromkeys(self.layers, 0.0), pressure)
        try:
            yield
        finally:
            for fake, (old_tau, old_pressure) in zip(fakes, before, strict=True):
                fake.is_hard = False
                fake.tau.copy_(old_tau)
                fake.pressure.copy_(old_pressure)
            self._after_write()

    def hard(self):
        """Context in which the model computes with hard weights, those of `Method.hard`."""
        return self._temporarily(1.0, is_hard=True)

    def latent(self):
        """Context in which the model computes with its latent weights (pressure 0)."""
        return self._temporarily(0.0, is_hard=False)


def get_wsd_schedule(
    optimizer: Optimizer,
    num_training_steps: int,
    warmup_ratio: float = 0.01,
    decay_ratio: float = 0.2,
    min_lr_ratio: float = 0.0,
    last_epoch: int = -1,
) -> LambdaLR:
    """Warmup-stable-decay schedule (``lr_scheduler._component_``).

    The factor of the peak rises linearly over the first ceil(warmup_ratio·T) steps (the first step
    already learns), stays at 1, and falls linearly over the last ceil(decay_ratio·T) steps; the
    value ``min_lr_ratio`` would be reached at step T, one after the last.

    Args:
        optimizer: the optimizer whose learning rate is the peak.
        num_training_steps: T, filled in by the recipe.
        warmup_ratio: fraction of T spent rising, in [0, 1].
        decay_ratio: fraction of T spent falling, in [0, 1]; with ``warmup_ratio`` at most 1.
        min_lr_ratio: what the decay ends at, relative to the peak, in [0, 1].
        last_epoch: index of the last step done, filled in by the recipe.

    Raises:
        InputError: on ratios out of range.
    """
    for name, value in (
        ("warmup_ratio", warmup_ratio),
        ("decay_ratio", decay_ratio),
        ("min_lr_ratio", min_lr_ratio),
    ):
        require_number(f"lr_scheduler.{name}", value, 0, 1, "it is a fraction")
    if warmup_ratio + decay_ratio > 1:
        raise InputError(
            f"warmup_ratio + decay_ratio must be at most 1; got {warmup_ratio} + {decay_ratio}"
        )

    warmup_steps = math.ceil(warmup_ratio * num_training_steps)
    decay_steps = math.ceil(decay_ratio * num_training_steps)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        remaining = num_training_steps - step
        if remaining >= decay_steps:
            return 1.0
        return min_lr_ratio + (1.0 - min_lr_ratio) * max(0, remaining) / decay_steps

    return LambdaLR(optimizer, factor, last_epoch)
