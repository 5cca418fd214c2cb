"""Methods that round and pass the gradient on by a rule of their own: no temperature.

The effective weight is (1 - p)·W + p·Q(W), with p the pressure; what a temperature would be is not
read. A subclass gives a scale and a code for every weight. Scales are rounded before anything is
computed from them, codes included, and the rounding passes gradients as they are.
"""

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar, Literal

import torch

from hestia_tune.methods.groups import (
    SCALE_EPS,
    GroupMethod,
    least_squares_scale,
    nearest_code,
    round_scale,
    scale_of_hard,
)

Start = Literal["absmax", "least_squares"]


@dataclass(frozen=True, kw_only=True)
class StraightThroughMethod(GroupMethod):
    """A scale and a code of every weight, and dQ/dw = 1 for every w."""

    def vjp(self, grad, weight, tau, pressure, parameters=(), total=None):
        return (grad.to(weight.dtype),)


@dataclass(frozen=True, kw_only=True)
class LearnedStepMethod(GroupMethod):
    """A step a per group that is learned, and Q/a a function of z = w/a: LSQ and its relatives.

        dQ/dw = 1[|z| <= reach]
        dQ/da = (Q/a - z where |z| <= reach, else ±outside) / norm

    The norm is the square root of the number of weights that share a step. ParetoQ's code divides
    by the square root of the size of the whole matrix instead.

    A group of pretrained weights that is hard already keeps its values with both starts: a is such
    that its scale is the group's.

    Args:
        group_size: as in `GroupMethod`, but not "tensor".
        start: How the pretrained weights determine a: "absmax", their largest |w|, as in ParetoQ's
            code; or "least_squares", where the codes leave the least squared error.

    Parameters of a layer: ``step``, (out_features, groups), float32.

    Raises:
        InputError: on a wrong option.
    """

    trained_parameters = ("step",)
    # scale/a, reach, outside.
    facts: ClassVar[tuple[float, float, float]] = (1.0, 1.0, 1.0)
    start: Start = "absmax"

    def __post_init__(self):
        super().__post_init__()
        self.require_rows("a learned step")

    def initial_parameters(self, weight):
        w, ratio = self.blocks(weight.detach()), self.facts[0]
        if self.start == "absmax":
            step = w.abs().amax(-1)
        else:
            step = least_squares_scale(w, self.levels).squeeze(-1) / ratio
        kept = scale_of_hard(w, self.levels).squeeze(-1)  # ratio·(kept/ratio) is rounded to kept
        return (torch.where(kept > 0, kept / ratio, step).to(torch.float32),)

    def scale_and_code(self, w, parameters, total, is_final):
        scale = (self.facts[0] * parameters[0]).clamp(min=SCALE_EPS).unsqueeze(-1)
        scale = round_scale(scale, self.levels).to(w.dtype)
        return scale, nearest_code(w, scale, self.levels)

    def slopes(self, w, tau, parameters, total):
        scale, code = self.scale_and_code(w, parameters, total, False)
        ratio, reach, outside = self.facts
        z = w * (ratio / scale)
        inside = z.abs() <= reach
        by_step = torch.where(inside, ratio * code - z, outside * torch.sign(z))
        return inside.to(w.dtype), by_step / sqrt(w.shape[-1])
