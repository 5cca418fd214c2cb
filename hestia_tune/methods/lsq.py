"""Learned step size quantization (arXiv 1902.08153), ternary: Q(w) = a·clip(round(w/a), -1, 1).

The slopes are those of `LearnedStepMethod` with reach 1, outside 1 and norm the square root of the
number of weights that share a step: the paper's gradient scale 1/sqrt(N·Q_P), Q_P = 1. Its N is the
size of the weight, with one step for all of it.
"""

from dataclasses import dataclass
from typing import ClassVar

from hestia_tune.methods.straight_through import LearnedStepMethod


@dataclass(frozen=True, kw_only=True)
class LSQMethod(LearnedStepMethod):
    """Codes {-1, 0, 1} times a learned step; arguments as `LearnedStepMethod`'s."""

    name: ClassVar[str] = "lsq"
