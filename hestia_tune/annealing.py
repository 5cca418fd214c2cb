"""Pressure and temperature of every step (Eqs. 10, 14, 15), as arithmetic without torch.

Legend: t global step (optimizer steps done so far), T total steps, rho compress ratio,
T_comp = rho·T (a real number, not rounded), alpha sensitivity strength, s sensitivity score.

Training step t uses the values at t, so the last step, T - 1, is still slightly soft. At t = T the
pressure is 1 and the temperature 0: the hard model. All values follow from the global step, so a
resumed run needs no state of its own.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any

from hestia_tune.errors import InputError, InputTypeError, require_number

# Option -> its range, which the `schedule` section of a config and `AnnealingSchedule` share.
RANGES: dict[str, dict[str, Any]] = {
    "rho": {"low": 0, "high": 1, "remedy": "the paper uses 0.2"},
    "tau_init": {"low": 0, "high": 100, "remedy": 'or use "auto"'},
    "alpha": {"low": -4, "high": 4, "remedy": "the paper uses 0.4"},
    "hard_fraction": {"low": 0, "high": 0.9, "remedy": "0 is the paper's"},
}
SCHEDULE_OPTIONS = tuple(RANGES)


def check_shares(rho: float, hard_fraction: float) -> None:
    """Raise InputError if the rising pressure and the hard steps need more than all steps."""
    if hard_fraction and rho + hard_fraction > 1:
        raise InputError(
            f"schedule.rho + hard_fraction must be at most 1; got {rho} + {hard_fraction}; lower "
            "one of them"
        )


@dataclass(frozen=True)
class AnnealingSchedule:
    """Pressure and temperature of every step of a run (Eqs. 10, 14 and 15).

    Steps count from 0 to T - 1. At step T, after the last update, the pressure is 1 and the
    temperature 0.

    Args:
        total_steps: T, at least 1.
        rho: Fraction of the steps in which the pressure rises from 0 to 1, in [0, 1].
        tau_init: Temperature while the pressure rises, in units of the squared normalized weight
            (w/gamma)^2, in [0, 100].
        alpha: Strength of the sensitivity in the temperature, in [-4, 4].
        hard_fraction: Fraction of the steps, at the end, with temperature 0, in [0, 0.9]. If it is
            not 0, its sum with ``rho`` is at most 1.

    Raises:
        InputTypeError: If an option is not a number. Resolve "auto" first, by
            `hestia_tune.functional.optimal_temperature`.
        InputError: If an option is out of range.
    """

    total_steps: int
    rho: float = 0.2
    tau_init: float = 0.3
    alpha: float = 0.4
    hard_fraction: float = 0.0

    def __post_init__(self):
        if isinstance(self.total_steps, bool) or not isinstance(self.total_steps, int):
            raise InputTypeError(f"total_steps must be an int; got {self.total_steps!r}")
        if self.total_steps < 1:
            raise InputError(f"total_steps must be at least 1; got {self.total_steps}")
        if isinstance(self.tau_init, str):
            raise InputTypeError(
                'tau_init must be a number here; resolve "auto" by optimal_temperature'
            )
        for name, rule in RANGES.items():
            require_number(f"schedule.{name}", getattr(self, name), **rule)
        check_shares(self.rho, self.hard_fraction)
        if self.rho == 1:
            warnings.warn(
                "schedule.rho 1 leaves no step to anneal: the pressure rises over the whole run, "
                "straight into the hard model; the paper uses 0.2",
                stacklevel=3,
            )

    @classmethod
    def of(cls, total_steps: int, section: Any, **changes: float) -> "AnnealingSchedule":
        """Return the schedule of any object that has the options as attributes.

        Args:
            total_steps: T.
            section: The object, such as a `hestia_tune.config.ScheduleConfig`.
            **changes: Options that replace the object's.
        """
        options = {name: getattr(section, name) for name in SCHEDULE_OPTIONS}
        return cls(total_steps, **options | changes)

    def pressure(self, step: int) -> float:
        """Return p_t = min(1, t / (rho·T)), or 1 if rho is 0 (Eq. 10)."""
        if self.rho == 0 or step >= self.total_steps:
            return 1.0
        return min(1.0, step / (self.rho * self.total_steps))

    def temperature(self, step: int, score: float = 0.0) -> float:
        """Return the temperature of a tensor with the sensitivity score ``score``.

        It is e^{alpha·s} times a base (Eq. 15), so a more sensitive tensor is hotter at every step.
        The base is tau_init until T_comp = rho·T. Then it is (tau_init/2)·(1 +
        cos(pi·(t - T_comp)/(T_hard - T_comp))) until T_hard = (1 - hard_fraction)·T (Eq. 14, where
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
