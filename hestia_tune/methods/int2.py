"""Symmetric two-bit integers with a straight-through gradient: INT2 of the paper's tables.

    absmax          s = max|w|, Q(w) = s·clip(round(w/s), -2, 1), as the paper's authors released
                    it. No w/s is below -1, so -2 is never used: a ternary rule with threshold s/2.
    least_squares   four levels {-1.5, -0.5, 0.5, 1.5}·s, with the s of the least squared error
                    (for Gaussian weights their standard deviation, to half a percent).

Both of the latent weights as they are, detached; dQ/dw = 1 for every w.
"""

from dataclasses import dataclass
from typing import ClassVar

from hestia_tune.methods.groups import SCALE_EPS, least_squares_scale, nearest_code, round_scale
from hestia_tune.methods.straight_through import Start, StraightThroughMethod


@dataclass(frozen=True, kw_only=True)
class INT2Method(StraightThroughMethod):
    """Ternary by the largest weight, or four levels by least squares.

    Args:
        group_size: as in `GroupMethod`, but not "tensor".
        start: "absmax" or "least_squares", the rule of the scale, at every step.
    """

    name: ClassVar[str] = "int2"
    start: Start = "absmax"

    def __post_init__(self):
        super().__post_init__()
        self.require_rows("int2")

    @property
    def levels(self) -> int:
        return 3 if self.start == "absmax" else 4

    def scale_and_code(self, w, parameters, total, is_final):
        if self.start == "absmax":
            largest = w.abs().amax(-1, keepdim=True).clamp(min=SCALE_EPS)
            scale = round_scale(largest, self.levels).to(w.dtype)
        else:
            scale = least_squares_scale(w, self.levels)
        return scale, nearest_code(w, scale, self.levels)
