"""Methods that round and pass the gradient on by a rule of their own: no temperature.

The effective weight is (1 - p)·W + p·Q(W), with p the pressure; what a temperature would be is not
read. A subclass gives a scale and a code for every weight, and, unless its gradient is that of the
identity, the slopes of its rule. Scales are rounded before anything is computed from them, codes
included, and the rounding passes gradients as they are.
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
)

Start = Literal["absmax", "least_squares"]


def check_start(value: str) -> None:
    """Raises ValueError unless ``value`` is a `Start`."""
    if value not in ("absmax", "least_squares"):
        raise ValueError(f'start must be "absmax" or "least_squares"; got {value!r}')


@dataclass(frozen=True, kw_only=True)
class StraightThroughMethod(GroupMethod):
    """What these methods share; the shapes below are those of `GroupMethod.blocks`."""

    has_temperature: ClassVar[bool] = False

    def slopes(
        self, w: torch.Tensor, scale: torch.Tensor, code: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """dQ/dw, and dQ/d(parameter) of each parameter, at every weight; nothing for identity."""
        return ()

    def effective_weight(self, weight, tau, pressure, parameters=(), total=None):
        w, scale, code = self.quantized(weight, parameters, total)
        pressure = pressure.to(w.dtype)
        effective = (1.0 - pressure) * w + pressure * self.values(scale, code, parameters)
        return effective.to(weight.dtype).view_as(weight)

    def vjp(self, grad, weight, tau, pressure, parameters=(), total=None):
        if type(self).slopes is StraightThroughMethod.slopes:
            return (grad.to(weight.dtype),)
        w, scale, code = self.quantized(weight, parameters, total)
        slope, *others = self.slopes(w, scale, code)
        g, pressure = self.blocks(grad).to(w.dtype), pressure.to(w.dtype)
        grad_w = (g * ((1.0 - pressure) + pressure * slope)).to(weight.dtype).view_as(weight)
        grads = [pressure * (g * other).sum(-1) for other in others]  # (rows, groups)
        return grad_w, *(v.to(p.dtype) for v, p in zip(grads, parameters, strict=True))


@dataclass(frozen=True, kw_only=True)
class LearnedStepMethod(StraightThroughMethod):
    """A step a per group that is learned, and Q/a a function of z = w/a: LSQ and its relatives.

        dQ/dw = 1[|z| <= reach]
        dQ/da = (Q/a - z where |z| <= reach, else ±outside) / norm

    with norm the square root of the number of weights that share a step.

    Args:
        group_size: as in `GroupMethod`, but not "tensor".
        start: a of the pretrained weights, so that it is their largest |w| ("absmax", as
            published), or that the codes leave the "least_squares".

    Parameters of a layer: ``step``, (out_features, groups), float32.

    Raises:
        TypeError, ValueError: on a wrong option.
    """

    start: Start = "absmax"

    def __post_init__(self):
        super().__post_init__()
        check_start(self.start)
        self.require_rows("a learned step")

    @property
    def facts(self) -> tuple[float, float, float]:
        """scale/a, reach, outside."""
        return 1.0, 1.0, 1.0

    @property
    def trained_parameters(self) -> tuple[str, ...]:
        return ("step",)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return self.trained_parameters

    def initial_parameters(self, weight):
        w, ratio = self.blocks(weight.detach()), self.facts[0]
        if self.start == "absmax":
            step = w.abs().amax(-1)
        else:
            step = least_squares_scale(w, self.levels).squeeze(-1) / ratio
        return (step.to(torch.float32),)

    def scale_and_code(self, w, parameters, total, is_final):
        scale = (self.facts[0] * parameters[0]).clamp(min=SCALE_EPS).unsqueeze(-1)
        scale = round_scale(scale, self.levels).to(w.dtype)
        return scale, nearest_code(w, scale, self.levels)

    def slopes(self, w, scale, code):
        ratio, reach, outside = self.facts
        z = w * (ratio / scale)
        inside = z.abs() <= reach
        by_step = torch.where(inside, ratio * code - z, outside * torch.sign(z))
        return inside.to(w.dtype), by_step / sqrt(w.shape[-1])
