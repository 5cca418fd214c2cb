"""Learned step size quantization (arXiv 1902.08153), ternary: Q(w) = a·clip(round(w/a), -1, 1).

The slopes are those of `LearnedStepMethod` with reach 1 and outside 1. The gradient of a step is
divided by the square root of the group's size. The paper divides by sqrt(N·Q_P), with Q_P = 1 here
and N the size of the whole weight, which has one step.

The paper starts at 2·mean|w|/sqrt(Q_P). The start "absmax" is the one of ParetoQ's code.
"""

from dataclasses import dataclass
from typing import ClassVar

from hestia_tune.methods.straight_through import LearnedStepMethod


@dataclass(frozen=True, kw_only=True)
class LSQMethod(LearnedStepMethod):
    """Codes {-1, 0, 1} times a learned step; arguments as `LearnedStepMethod`'s."""

    name: ClassVar[str] = "lsq"
