"""The method of two bits and four levels: codes {-1, 0, 1, 2} times a scale that has a sign.

A file of two bits has four codes, and a ternary weight leaves one of them unused. With the code 2
the weight takes the same bytes and the same time. A group whose large weights are negative has a
negative scale, so its levels are {1, 0, -1, -2} times the magnitude of the scale. For Gaussian
weights in groups of 64, the least relative squared error is .122; it is .182 for ternary codes.

With z = w/s and the codes q, the relaxation is that of the paper (Eqs. 7, 8) with another codebook,
and Lemma 4.1 holds for every codebook:

    pi_q  proportional to exp(-(z - q)^2/tau)    H = s·E[q]    dH/dw = (2/tau)·Var[q]

The scale is never chosen again during training, because another sign would change every code of its
group. `initial_parameters` searches both signs for the scale with the least squared error, and the
method starts at a share of it. Then the scale follows mean|w| of its group, or it is learned:

    absmean    s = r·mean|w|          r, the ratio at the start, does not change
    learned    s = 2·sigmoid(t)·g     g is the scale at the start, and t starts at 0
                                      dH/ds = E[q] - z·(2/tau)·Var[q]

At tau 0, the slope of the rounding is 1 for dH/dw. For dH/ds it is 1 only from -1.5 to 2.5 scales,
because the code is clipped beyond, much as in LSQ. The rounding of the scale passes gradients
unchanged.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hestia_tune.errors import InputError, require_number
from hestia_tune.methods.groups import (
    SCALE_EPS,
    TWO_BIT,
    GroupMethod,
    Levels,
    bounded,
    least_squares_scale,
    nearest_code,
    round_scale,
    scale_of_hard,
)
from hestia_tune.methods.hestia import (
    MIN_TAU,
    learned_factor,
    learned_factor_vjp,
    mean_level,
    softmax,
    variance,
)

# Beyond this many scales, the softmax has one code at every temperature up to 100. The bound keeps
# its logits finite.
_MAX_Z = 1e4


@dataclass(frozen=True, kw_only=True)
class TwoBitMethod(GroupMethod):
    """Two bits, four levels: codes {-1, 0, 1, 2} with a signed scale per group.

    A layer holds these parameters, all (out_features, groups) in float32: ``scale_ratio`` (r),
    which is not trained; or if the scale is learned, ``scale_logit`` (t), and ``scale_start`` (g),
    which is not trained.

    Args:
        group_size: See `GroupMethod`; not "tensor".
        scale: "absmean", which follows mean|w| of the current latent weights; or "learned".
        start: The scale at the start, as a share of the scale with the least squared error, above 0
            and at most 2; or "least_squares", the share 1. A group that is hard already keeps its
            scale.

    Raises:
        InputError: If an option is wrong.
    """

    name: ClassVar[str] = "two_bit"
    levels: ClassVar[Levels] = TWO_BIT
    scale: Literal["absmean", "learned"] = field(default="absmean", metadata={"optional": True})
    start: float | str = field(default=0.75, metadata={"optional": True})

    def __post_init__(self):
        super().__post_init__()
        self.require_rows("a scale with a sign")
        if self.start != "least_squares":
            require_number("start", self.start, 0, 2, 'or "least_squares", which is 1')
        if self.start == 0:
            raise InputError('start must be above 0; got 0; use 0.75 or "least_squares"')

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The names of the parameters that a layer holds beside its weight, in order."""
        return ("scale_logit", "scale_start") if self.scale == "learned" else ("scale_ratio",)

    @property
    def trained_parameters(self) -> tuple[str, ...]:
        """The names of the learned parameters."""
        return ("scale_logit",) if self.scale == "learned" else ()

    def initial_parameters(self, weight):
        w = self.blocks(weight.detach())
        share = 1.0 if self.start == "least_squares" else float(self.start)
        hard_scale = scale_of_hard(w, self.levels)
        # Rounded here too, so that no product of r and mean|w| is halfway between two scales.
        best = round_scale(bounded(share * least_squares_scale(w, self.levels)), self.levels)
        start = torch.where(hard_scale != 0, hard_scale, best.to(w.dtype))
        if self.scale == "learned":
            start = start.squeeze(-1).to(torch.float32)
            return torch.zeros_like(start), start
        mean = _mean(w)
        # The bound of the scale would make the ratio of a tiny mean huge.
        ratio = torch.where(mean > SCALE_EPS, start / mean, 1.0)
        return (ratio.squeeze(-1).to(torch.float32),)

    def _scale(self, w, parameters):
        """Return the scales (rows, groups, 1), rounded, in the dtype of ``w``."""
        if self.scale == "learned":
            logit, start = (value.unsqueeze(-1) for value in parameters)
            scale = learned_factor(logit) * start
        else:
            scale = parameters[0].unsqueeze(-1) * _mean(w)
        return round_scale(bounded(scale), self.levels).to(w.dtype)

    def scale_and_code(self, w, parameters, total, is_final):
        scale = self._scale(w, parameters)
        return scale, nearest_code(w, scale, self.levels)

    def relaxed(self, w, tau, parameters, total):
        scale, code = self.scale_and_code(w, parameters, total, False)
        z = (w / scale).clamp(-_MAX_Z, _MAX_Z)
        pi = softmax(z, TWO_BIT, tau.clamp(min=MIN_TAU))
        return scale * torch.where(tau > 0, mean_level(TWO_BIT, pi), code)

    def slopes(self, w, tau, parameters, total):
        scale, code = self.scale_and_code(w, parameters, total, False)
        safe_tau = tau.clamp(min=MIN_TAU)
        z = (w / scale).clamp(-_MAX_Z, _MAX_Z)
        pi = softmax(z, TWO_BIT, safe_tau)
        slope = (2.0 / safe_tau) * variance(TWO_BIT, pi)
        by_weight = torch.where(tau > 0, slope, torch.ones_like(w))
        if self.scale != "learned":
            return (by_weight,)
        mean = mean_level(TWO_BIT, pi)
        rounded = code - torch.where((z > -1.5) & (z < 2.5), z, 0.0)
        return by_weight, torch.where(tau > 0, mean - z * slope, rounded)  # dH/dw, dH/ds

    def parameter_grads(self, sums, parameters):
        if self.scale != "learned":
            return [torch.zeros_like(value) for value in parameters]
        logit, start = parameters
        by_logit = learned_factor_vjp(sums[0] * start, logit)
        return [by_logit.to(logit.dtype), torch.zeros_like(start)]


def _mean(w: Tensor) -> Tensor:
    """Return mean|w| of each group, summed in float64 as in `hestia_tune.methods.groups`."""
    return w.detach().abs().sum(-1, keepdim=True, dtype=torch.float64) / w.shape[-1]
