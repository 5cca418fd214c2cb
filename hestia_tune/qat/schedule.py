"""Writes pressure and temperature into quantized linears; the schedule of the learning rate.

`hestia_tune.annealing` has the formulas of pressure and temperature.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hestia_tune.annealing import AnnealingSchedule
from hestia_tune.errors import InputError, require_number

if TYPE_CHECKING:
    from hestia_tune.qat.linear import QuantizedLayer


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
            `hestia_tune.qat.leaves.Leaves.refresh`.

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
        before = [(fake.tau.clone(), fake.pressure.clone(), fake.is_hard) for fake in fakes]
        for name, fake in zip(self.layers, fakes, strict=True):
            fake.is_hard = name in hard
        self.write(dict.fromkeys(self.layers, 0.0), pressure)
        try:
            yield
        finally:
            for fake, (old_tau, old_pressure, was_hard) in zip(fakes, before, strict=True):
                fake.is_hard = was_hard
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

    The factor of the peak rises linearly over the first ceil(warmup_ratio·T) steps, from a first
    step above 0. Then the factor stays at 1. It falls linearly over the last ceil(decay_ratio·T)
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
