"""Warmup-stable-decay learning rate, as a torchtune lr-scheduler component."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hestia_tune.config import require_number


def wsd_factor(
    step: int,
    num_training_steps: int,
    warmup_ratio: float,
    decay_ratio: float,
    min_lr_ratio: float = 0.0,
) -> float:
    """Factor of the peak learning rate at training step ``step`` (0-based).

    Rises linearly over the first ceil(warmup_ratio·T) steps (the first step already learns), stays
    at 1, and falls linearly over the last ceil(decay_ratio·T) steps; the value ``min_lr_ratio``
    would be reached at step T, one after the last.
    """
    warmup_steps = math.ceil(warmup_ratio * num_training_steps)
    decay_steps = math.ceil(decay_ratio * num_training_steps)
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    remaining = num_training_steps - step
    if remaining >= decay_steps:
        return 1.0
    return min_lr_ratio + (1.0 - min_lr_ratio) * max(0, remaining) / decay_steps


def get_wsd_schedule(
    optimizer: Optimizer,
    num_training_steps: int,
    warmup_ratio: float = 0.01,
    decay_ratio: float = 0.2,
    min_lr_ratio: float = 0.0,
    last_epoch: int = -1,
) -> LambdaLR:
    """Warmup-stable-decay schedule (``lr_scheduler._component_``); see `wsd_factor`.

    Args:
        optimizer: the optimizer whose learning rate is the peak.
        num_training_steps: T, filled in by the recipe.
        warmup_ratio: fraction of T spent rising, in [0, 1].
        decay_ratio: fraction of T spent falling, in [0, 1]; with ``warmup_ratio`` at most 1.
        min_lr_ratio: what the decay ends at, relative to the peak, in [0, 1].
        last_epoch: index of the last step done, filled in by the recipe.

    Raises:
        TypeError, ValueError: on ratios out of range.
    """
    ratios = {
        "warmup_ratio": warmup_ratio,
        "decay_ratio": decay_ratio,
        "min_lr_ratio": min_lr_ratio,
    }
    for name, value in ratios.items():
        require_number(f"lr_scheduler.{name}", value, 0, 1, "it is a fraction")
    if warmup_ratio + decay_ratio > 1:
        raise ValueError(
            f"warmup_ratio + decay_ratio must be at most 1; got {warmup_ratio} + {decay_ratio}"
        )

    def factor(step: int) -> float:
        return wsd_factor(step, num_training_steps, warmup_ratio, decay_ratio, min_lr_ratio)

    return LambdaLR(optimizer, factor, last_epoch)
