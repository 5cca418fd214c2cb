"""Compute pressure, temperature and learning rate from the step, and write the first two.

Legend: t global step (optimizer steps done so far), T total steps, rho compress ratio,
T_comp = rho·T (a real number, not rounded), alpha sensitivity strength, s sensitivity score.

Training step t uses the values at t, so the last step, T - 1, is still slightly soft. At t = T the
pressure is 1 and the temperature 0: the hard model. All values follow from the global step, so a
resumed run needs no state of its own.
"""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hestia_tune.config import ScheduleConfig, Section, require_number
from hestia_tune.errors import InputError, InputTypeError

if TYPE_CHECKING:
    from hestia_tune.qat.linear import QuantizedLayer

SCHEDULE_OPTIONS = tuple(field.name for field in dataclasses.fields(ScheduleConfig))


@dataclass(frozen=True)
class AnnealingSchedule(ScheduleConfig):
    """Compute the pressure and the temperature of every step of a run.

    Args:
        total_steps: T, at least 1.
        rho: See `hestia_tune.config.ScheduleConfig`, also for ``alpha`` and ``hard_fraction``.
        tau_init: The temperature while the pressure rises. It must be a number here.

    Raises:
        InputTypeError: If an option has a wrong type.
        InputError: If an option is out of range.
    """

    total_steps: int

    def __post_init__(self):
        if isinstance(self.total_steps, bool) or not isinstance(self.total_steps, int):
            raise InputTypeError(f"total_steps must be an int; got {self.total_steps!r}")
        if self.total_steps < 1:
            raise InputError(f"total_steps must be at least 1; got {self.total_steps}")
        super().__post_init__()
        if isinstance(self.tau_init, str):
            raise InputTypeError(
                'tau_init must be a number here; resolve "auto" by optimal_temperature'
            )
        if self.rho == 1:
            warnings.warn(
                "schedule.rho 1 leaves no step to anneal: the pressure rises over the whole run, "
                "straight into the hard model; the paper uses 0.2",
                stacklevel=3,
            )

    @classmethod
    def of(cls, total_steps: int, section: Section, **changes: float) -> "AnnealingSchedule":
        """Return the schedule of a section's options.

        Args:
            total_steps: T.
            section: A section with the options of `ScheduleConfig`, under the same names.
            **changes: Options that replace the section's options.
        """
        options = {name: getattr(section, name) for name in SCHEDULE_OPTIONS}
        return cls(total_steps, **options | changes)

    def pressure(self, step: int) -> float:
        """Return p_t = min(1, t / (rho·T)), or 1 if rho is 0 (Eq. 8)."""
        if self.rho == 0 or step >= self.total_steps:
            return 1.0
        return min(1.0, step / (self.rho * self.total_steps))

    def temperature(self, step: int, score: float = 0.0) -> float:
        """Return the temperature of a tensor with the sensitivity score ``score``.

        It is e^{alpha·s} times a base (Eq. 13), so a more sensitive tensor is hotter at every step.
        The base is tau_init until T_comp. Then it is (tau_init/2)·(1 +
        cos(pi·(t - T_comp)/(T_hard - T_comp))) until T_hard = (1 - hard_fraction)·T (Eq. 12, where
        T_hard is T), and 0 afterwards.
        """
        compress_steps = self.rho * self.total_steps
        hard_from = (1.0 - self.hard_fraction) * self.total_steps
        if step >= hard_from:
            return 0.0
        base = float(self.tau_init)
        if step > compress_steps:
            progress = (step - compress_steps) / (hard_from - compress_steps)
            base = 0.5 * base * (1.0 + math.cos(math.pi * progress))
        return base * math.exp(self.alpha * score)


class ScheduleDriver:
    """Writes pressure and temperature into the quantized linears of a prepared model.

    Args:
        schedule: The schedule of pressure and temperature.
        layers: Maps fully qualified names to quantized linears (see
            `hestia_tune.quantized_linears`). Any module will do if it has a
            ``weight_fake_quantizer`` with the 0-D buffers ``tau`` and ``pressure``.
        scores: Sensitivity score per name. None gives the uniform schedule, where every score is 0
            (the paper's "w/o Hessian").
        after_write: A function to call whenever the values have changed, for example
            `hestia_tune.qat.shards.refresh`.

    Attributes:
        layers: The given layers.

    Raises:
        InputError: If there are no layers, or ``scores`` and ``layers`` have different names.
    """

    def __init__(
        self,
        schedule: AnnealingSchedule,
        layers: Mapping[str, "QuantizedLayer"],
        scores: Mapping[str, float] | None = None,
        after_write: Callable[[], None] | None = None,
    ):
        if not layers:
            raise InputError("the model has no quantized layers; prepare it first")
        if scores is not None and set(scores) != set(layers):
            differing = sorted(set(scores) ^ set(layers))
            raise InputError(f"sensitivity scores and quantized layers differ in {differing[:3]}")
        self.schedule = schedule
        self.layers = dict(layers)
        self._after_write = after_write or (lambda: None)
        self._scores = {name: 0.0 if scores is None else scores[name] for name in layers}

    def temperatures(self, step: int) -> dict[str, float]:
        """Return the temperature of every layer at ``step``, by name."""
        return {name: self.schedule.temperature(step, s) for name, s in self._scores.items()}

    def set_step(self, step: int) -> None:
        """Write the values of training step ``step``.

        Call it before the forward of the step, and never between the forward and the backward.
        """
        self.write(self.temperatures(step), self.schedule.pressure(step))

    def write(self, temperatures: Mapping[str, float], pressure: float) -> None:
        """Set the temperature of every layer, by name, and the pressure of all layers.

        It costs one copy to the device and one fused kernel for any number of layers.
        """
        taus = [temperatures[name] for name in self.layers]
        fakes = [layer.weight_fake_quantizer for layer in self.layers.values()]
        buffers = [fake.tau for fake in fakes] + [fake.pressure for fake in fakes]
        values = torch.tensor(taus + [pressure] * len(taus), dtype=torch.float32)
        values = values.to(buffers[0].device, non_blocking=True)
        torch._foreach_copy_(buffers, list(values.unbind()))
        self._after_write()

    @contextlib.contextmanager
    def _temporarily(self, pressure: float, hard: Collection[str]) -> Iterator[None]:
        fakes = [layer.weight_fake_quantizer for layer in self.layers.values()]
        before = [(fake.tau.clone(), fake.pressure.clone()) for fake in fakes]
        for name, fake in zip(self.layers, fakes, strict=True):
            fake.is_hard = name in hard
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
        """Return a context in which the model computes with the hard weights of `Method.hard`."""
        return self._temporarily(1.0, self.layers)

    def latent(self, hard: Collection[str] = ()):
        """Return a context in which the model computes with its latent weights (pressure 0).

        Args:
            hard: Names of layers that compute with their hard weights instead.
        """
        return self._temporarily(0.0, hard)


def get_wsd_schedule(
    optimizer: Optimizer,
    num_training_steps: int,
    warmup_ratio: float = 0.01,
    decay_ratio: float = 0.2,
    min_lr_ratio: float = 0.0,
    last_epoch: int = -1,
) -> LambdaLR:
    """Return a warmup-stable-decay schedule (``lr_scheduler._component_``).

    The factor of the peak rises linearly over the first ceil(warmup_ratio·T) steps. The first step
    already learns. Then the factor stays at 1. It falls linearly over the last ceil(decay_ratio·T)
    steps, and would reach ``min_lr_ratio`` at step T, one after the last.

    Args:
        optimizer: The optimizer. Its learning rate is the peak.
        num_training_steps: T. The recipe fills it in.
        warmup_ratio: Fraction of T in which the factor rises, in [0, 1].
        decay_ratio: Fraction of T in which the factor falls, in [0, 1]. The sum of this ratio and
            ``warmup_ratio`` is at most 1.
        min_lr_ratio: The factor at the end of the decay, in [0, 1].
        last_epoch: Index of the last step done. The recipe fills it in.

    Raises:
        InputError: If a ratio is out of range.
    """
    ratios = dict(warmup_ratio=warmup_ratio, decay_ratio=decay_ratio, min_lr_ratio=min_lr_ratio)
    for name, value in ratios.items():
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
