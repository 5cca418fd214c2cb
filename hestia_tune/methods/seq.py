"""Stretched elastic quantization of ParetoQ (arXiv 2502.02631), ternary and in two bits.

With z = w/a clipped to ±0.99,

    ternary   Q = a·round(1.5·z)/1.5                 levels {-2/3, 0, 2/3}·a, threshold a/3
    2 bits    Q = a·(round(2·z + 0.5) - 0.5)/2       levels {-3/4, -1/4, 1/4, 3/4}·a

so that the levels share the range evenly. The slopes are those of `LearnedStepMethod` with reach
0.99; outside is 1 for ternary, though its outer level is 2/3 (so it is published), and 3/4 for two
bits. The forward of the ternary one is that of LSQ with the step 2a/3; its gradients differ.

ParetoQ's code has one step per row and divides its gradient by the square root of the size of the
whole matrix. Here the gradient is divided by the square root of the group's size. The start
"absmax" is ParetoQ's.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from hestia_tune.methods.straight_through import LearnedStepMethod


@dataclass(frozen=True, kw_only=True)
class SEQMethod(LearnedStepMethod):
    """Three or four evenly stretched levels times a learned step.

    Args:
        bits: "ternary" or 2.
        group_size, start: as `LearnedStepMethod`'s.
    """

    name: ClassVar[str] = "seq"
    bits: Literal["ternary", 2] = "ternary"

    @property
    def levels(self) -> int:
        return 4 if self.bits == 2 else 3

    @property
    def facts(self) -> tuple[float, float, float]:
        # Codes of four levels are ±1 and ±3, in units of a/4.
        return (1 / 4, 0.99, 3 / 4) if self.bits == 2 else (2 / 3, 0.99, 1.0)
