"""Ternary weights: the hard method of Eq. 2 and its softmax relaxation (Eqs. 5-7).

Legend: w weight, gamma scale, z = w/gamma, a = |z|, q code in {-1, 0, 1}, tau temperature,
p pressure. With

    e1 = exp(-4a/tau)    e2 = exp((1 - 2a)/tau)    D = 1 + e1 + e2

the weights of the three codes are 1/D (the nearer outer code), e2/D (zero), e1/D (the farther
outer code), so that the softmax over the codebook is never materialised:

    H      = gamma · sign(z) · (1 - e1)/D                  (Eq. 6)
    dH/dw  = (2/tau) · (4·e1/D + (e2/D)·(1 + e1))/D        (Lemma 1)

The variance of Lemma 1, E[q^2] - E[q]^2, is written as one fraction with positive terms: as a
difference it would lose all its digits in float32 once an assignment is confident, which is
exactly where annealing ends.

Two choices make results independent of device, compiler and summation order. The absolute
values are summed in float64 before gamma is rounded to bfloat16 (a float32 sum of 128 weights
changes with its order, and flips the rounding of a few scales in every large weight). And the
hard code is the comparison |w| > gamma/2, which is exact, instead of round(w/gamma), which a
compiler may compute with an approximate division. A tie |w| = gamma/2 gives the code 0, as
rounding half to even does.

Learned parameters, one of each per group. A step delta of its own (twice the threshold between 0
and the outer codes) and an offset b choose the codes, and gamma only multiplies them: with
u = (w - b)/delta in place of z, H = gamma·mu(u), and

    dH/dw = (gamma/delta)·mu'(u)    dH/ddelta = -u·dH/dw    dH/db = -dH/dw    dH/dgamma = mu(u)

exact under the relaxation; without a step of its own delta is gamma, and dH/dgamma = mu - u·mu'.
At tau 0, where mu' is that of a straight-through rounding, 1, these parameters take it up to 1.5
steps, beyond which the code is clipped, much as in LSQ: round(u) - u, and then the code. The
rounding of gamma to bfloat16 passes gradients as they are.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from hestia_tune.errors import InputError
from hestia_tune.methods.groups import (
    GroupMethod,
    least_squares_scale,
    mean_scale,
    nearest_code,
    round_to_bfloat16,
    scale_of_hard,
)
from hestia_tune.methods.temperature import relaxation_histogram, temperature_from_histogram

# exp(80) is finite in float32 and bfloat16; beyond it the weight of a nonzero code is below 1e-34.
_MAX_EXPONENT = 80.0
# The hard code is round(u) up to here, in steps; beyond, it is clipped and u no longer matters.
_ROUNDED_WITHIN = 1.5
# Keeps 2/tau finite in float32; a cosine over 10^9 steps stays far above it.
MIN_TAU = 1e-30


def _softmax_terms(w: torch.Tensor, step: torch.Tensor, tau: torch.Tensor):
    """(-4a/tau, e1, e2, 1/D) of the module docstring, a = |w|/step; stable for every tau > 0."""
    a = w.abs() / step
    log_e1 = -4.0 * a / tau
    e1 = log_e1.exp()
    e2 = ((1.0 - 2.0 * a) / tau).clamp(max=_MAX_EXPONENT).exp()
    return log_e1, e1, e2, 1.0 / (1.0 + e1 + e2)


def _mean(shifted: torch.Tensor, step: torch.Tensor, tau: torch.Tensor, log_e1, inv_d):
    """mu of the module docstring, given two of `_softmax_terms`; at tau 0 the hard code."""
    soft = torch.sign(shifted) * (-torch.expm1(log_e1)) * inv_d
    return torch.where(tau > 0, soft, nearest_code(shifted, step))


@dataclass(frozen=True, kw_only=True)
class TernaryMethod(GroupMethod):
    """Codes {-1, 0, 1} with a scale per group.

    Args:
        group_size: as in `GroupMethod`; 128 in the paper.
        scale: "absmean", mean|w| of the latent weights as they are (Eq. 1; AbsMean of BitNet
            b1.58); or "learned", 2·sigmoid(t)·g with a parameter t per group that starts at 0.
        threshold: "half" of the scale (Eq. 2), or "learned", sigmoid(s)·g with a parameter s that
            starts at 0.
        offset: "none", or "learned": codes are chosen by w - o·g, with a parameter o that starts
            at 0.
        start: g of learned parameters, by the pretrained weights: their "absmean", or the scale
            of "least_squares". A group that is hard already keeps its scale with both.

    Parameters of a layer, all (out_features, groups): ``scale_logit`` (t), ``threshold_logit``
    (s) and ``offset`` (o), those that are learned; and then ``scale_start`` (g), not trained.
    """

    name: ClassVar[str] = "ternary"
    scale: Literal["absmean", "learned"] = field(default="absmean", metadata={"optional": True})
    threshold: Literal["half", "learned"] = field(default="half", metadata={"optional": True})
    offset: Literal["none", "learned"] = field(default="none", metadata={"optional": True})
    start: Literal["absmean", "least_squares"] = field(
        default="absmean", metadata={"optional": True}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.trained_parameters:
            self.require_rows("a learned scale, threshold or offset")
        elif self.start != "absmean":
            raise InputError(
                f'start "{self.start}" is where a learned scale, threshold or offset starts; '
                "nothing is learned; set scale: learned"
            )

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return (*self.trained_parameters, "scale_start") if self.trained_parameters else ()

    @property
    def trained_parameters(self) -> tuple[str, ...]:
        names = {"scale": "scale_logit", "threshold": "threshold_logit", "offset": "offset"}
        return tuple(name for key, name in names.items() if getattr(self, key) == "learned")

    def initial_parameters(self, weight):
        if not self.trained_parameters:
            return ()
        w = self.blocks(weight.detach())
        start = (mean_scale if self.start == "absmean" else least_squares_scale)(w)
        kept = scale_of_hard(w, self.levels)
        start = torch.where(kept > 0, kept, start).squeeze(-1).to(torch.float32)
        return *(torch.zeros_like(start) for _ in self.trained_parameters), start

    def _groups(self, w, parameters, total=None, keep_hard=False):
        """(gamma, delta, w - b): of (rows, groups, 1) the first two; delta is gamma and b nothing
        if they are not learned."""
        values = dict(zip(self.parameter_names, parameters, strict=True))
        start = values.get("scale_start", torch.empty(0))
        if self.scale == "learned":
            scale = (2.0 * torch.sigmoid(values["scale_logit"]) * start).to(torch.float32)
            scale = round_to_bfloat16(scale).to(w.dtype).unsqueeze(-1)
        else:
            scale = mean_scale(w, total, keep_hard=keep_hard)
        step, shifted = scale, w
        if self.threshold == "learned":
            step = (2.0 * torch.sigmoid(values["threshold_logit"]) * start).to(w.dtype)
            step = step.unsqueeze(-1)
        if self.offset == "learned":
            shifted = w - (values["offset"] * start).to(w.dtype).unsqueeze(-1)
        return scale, step, shifted

    def scale_and_code(self, w, parameters, total, is_final):
        scale, step, shifted = self._groups(w, parameters, total, is_final)
        return scale, nearest_code(shifted, step)

    def relaxed(self, w, tau, parameters, total):
        scale, step, shifted = self._groups(w, parameters, total)
        log_e1, _, _, inv_d = _softmax_terms(shifted, step, tau.clamp(min=MIN_TAU))
        return scale * _mean(shifted, step, tau, log_e1, inv_d)

    def slopes(self, w, tau, parameters, total):
        scale, step, shifted = self._groups(w, parameters, total)
        safe_tau = tau.clamp(min=MIN_TAU)
        log_e1, e1, e2, inv_d = _softmax_terms(shifted, step, safe_tau)
        variance = (4.0 * e1 * inv_d + (e2 * inv_d) * (1.0 + e1)) * inv_d
        slope = torch.where(tau > 0, (2.0 / safe_tau) * variance, torch.ones_like(w))
        ratio = scale / step if self.threshold == "learned" else 1.0  # gamma/delta
        by_weight = ratio * slope
        if not self.trained_parameters:
            return (by_weight,)
        u, mean = shifted / step, _mean(shifted, step, tau, log_e1, inv_d)
        slope = torch.where(tau > 0, slope, (u.abs() < _ROUNDED_WITHIN).to(w.dtype))
        by_parameter = {
            "scale_logit": mean if self.threshold == "learned" else mean - u * slope,  # dH/dgamma
            "threshold_logit": -ratio * u * slope,
            "offset": -ratio * slope,
        }
        return by_weight, *(by_parameter[name] for name in self.trained_parameters)

    def parameter_grads(self, sums, parameters):
        if not parameters:
            return []
        *trained, start = parameters
        grads = []
        for name, by_group, parameter in zip(self.trained_parameters, sums, trained, strict=True):
            inner = by_group * start
            if name != "offset":  # 2·sigmoid
                sigmoid = torch.sigmoid(parameter)
                inner = inner * 2.0 * sigmoid * (1.0 - sigmoid)
            grads.append(inner.to(parameter.dtype))
        return [*grads, torch.zeros_like(start)]

    def fit_temperature(self, weights):
        """As `Method.fit_temperature`, but reads every weight once, one at a time: tau within
        [0.001, 4], to about 1e-4; 0.351 for Gaussian weights."""
        histogram = None
        for weight in weights:
            if not torch.isfinite(weight).all():
                raise InputError("tau_init auto needs finite weights; got NaN or infinity")
            blocks = self.blocks(weight.detach())
            scale, *_ = self._groups(blocks, self.initial_parameters(weight))
            z, scale = blocks.abs() / scale, scale.expand_as(blocks)
            part = relaxation_histogram(z.flatten(), scale.flatten())
            histogram = part if histogram is None else histogram + part
        if histogram is None:
            raise InputError("tau_init auto needs at least one weight; got none")
        return temperature_from_histogram(histogram)
