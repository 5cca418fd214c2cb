"""Quantize by Hestia: hard weights (Eq. 2) and their softmax relaxation (Eqs. 7-9), by codebook.

Legend: w weight, gamma scale, z = w/gamma, a = |z|, q code in {-1, 0, 1}, tau temperature,
p pressure. With

    e1 = exp(-4a/tau)    e2 = exp((1 - 2a)/tau)    D = 1 + e1 + e2

the softmax gives the nearer outer code the weight 1/D, zero e2/D, and the farther outer code e1/D.
So the formulas never materialize the softmax over the codebook:

    H      = gamma · sign(z) · (1 - e1)/D                  (Eq. 8)
    dH/dw  = (2/tau) · (4·e1/D + (e2/D)·(1 + e1))/D        (Lemma 4.1)

Lemma 4.1 has the variance E[q^2] - E[q]^2. Here it is one fraction with positive terms. In float32,
the difference would lose all its digits where the softmax is confident, which is where annealing
ends.

Two choices make results independent of device, compiler and summation order. First, the absolute
values are summed in float64 before gamma is rounded to bfloat16. A float32 sum of 128 weights
changes with its order, and flips the rounding of a few scales in every large weight. Second, the
hard code is the exact comparison |w| > gamma/2 instead of round(w/gamma). A compiler may compute
round(w/gamma) with an approximate division. A tie |w| = gamma/2 gives the code 0, like rounding
half to even.

There is one learned parameter of each kind per group. A learned step delta (twice the threshold
between 0 and the outer codes) and an offset b choose the codes, and gamma only multiplies them.
With u = (w - b)/delta in place of z, H = gamma·mu(u), and

    dH/dw = (gamma/delta)·mu'(u)    dH/ddelta = -u·dH/dw    dH/db = -dH/dw    dH/dgamma = mu(u)

These slopes are exact under the relaxation. Without a learned step, delta is gamma, and
dH/dgamma = mu - u·mu'. At tau 0, mu' is the slope 1 of a straight-through rounding. For the
learned parameters it is 1 only up to 1.5 steps, because the code is clipped beyond. So dH/dgamma
is round(u) - u, and beyond 1.5 steps the code, much as in LSQ. The rounding of gamma to bfloat16
passes gradients unchanged.

An even number of codes has 1 bit, {-1, 1}, or 2 bits, {-1.5, -0.5, 0.5, 1.5}. With z = w/s and
levels q,

    pi_q  proportional to exp(-(z - q)^2/tau)    H = s·E[q]    dH/dw = (2/tau)·Var[q]

For {-1, 1} this gives H = s·tanh(2z/tau) with s = mean|w|. This s also leaves the least squared
error. All weights of a hard group have one magnitude, and s is this magnitude. For four levels, s
is the scale with the least squared error. The paper's rebuttal reports 2 bits, but does not say
which grid it used. Var[q] is the sum over pairs of levels of pi·pi'·(q - q')^2. Its terms are
positive, so it keeps its digits where one level is certain.

The paper chooses tau_init by minimizing the global mean squared error between the weights and
their relaxation (Sec. 5.1). The error is the sum of (w - H(w; tau))^2 over all weights of all
layers. With z = |w|/gamma it is the sum of gamma^2·(z - mu(z; tau))^2. So the ternary method reads
the weights once, layer by layer, and fills a histogram of z weighted by gamma^2. The search over
tau needs only the histogram.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import combinations
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hestia_tune.errors import InputError
from hestia_tune.methods.groups import (
    BINARY,
    SYMMETRIC,
    GroupMethod,
    Levels,
    least_squares_scale,
    mean_scale,
    nearest_code,
    round_scale,
    scale_of_hard,
)
from hestia_tune.methods.method import require_float, search_temperature

# exp(80) is finite in float32 and bfloat16. Beyond it, the softmax gives a nonzero code less than
# 1e-34.
_MAX_EXPONENT = 80.0
# The hard code is round(u) up to here, in steps. Beyond, it is clipped and u no longer matters.
_ROUNDED_WITHIN = 1.5
# This bound keeps 2/tau finite in float32. A cosine over 10^9 steps stays far above it.
MIN_TAU = 1e-30
# Bins of z in the histogram of weights.
NUM_BINS = 8192
# Beyond 8 scales the relaxation is 1 for every temperature of the search.
MAX_Z = 8.0
_CODES = {"binary": BINARY, "int2": SYMMETRIC}


def _softmax_terms(w: Tensor, step: Tensor, tau: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return -4a/tau, e1, e2 and 1/D of the module docstring, with a = |w|/step.

    The terms are stable for every tau > 0.
    """
    a = w.abs() / step
    log_e1 = -4.0 * a / tau
    e1 = log_e1.exp()
    e2 = ((1.0 - 2.0 * a) / tau).clamp(max=_MAX_EXPONENT).exp()
    return log_e1, e1, e2, 1.0 / (1.0 + e1 + e2)


def _mean(shifted: Tensor, step: Tensor, tau: Tensor, log_e1: Tensor, inv_d: Tensor) -> Tensor:
    """Return mu of the module docstring, given two of the `_softmax_terms`.

    At tau 0 it is the hard code.
    """
    soft = torch.sign(shifted) * (-torch.expm1(log_e1)) * inv_d
    return torch.where(tau > 0, soft, nearest_code(shifted, step))


@dataclass(frozen=True, kw_only=True)
class TernaryMethod(GroupMethod):
    """Codes {-1, 0, 1} with a scale per group.

    A layer holds these parameters, all (out_features, groups): ``scale_logit`` (t),
    ``threshold_logit`` (s) and ``offset`` (o), if they are learned; and then ``scale_start`` (g),
    which is not trained.

    Args:
        group_size: See `GroupMethod`; 128 in the paper.
        scale: "absmean", mean|w| of the current latent weights (Eq. 1; AbsMean of BitNet b1.58);
            or "learned", 2·sigmoid(t)·g with a parameter t per group that starts at 0.
        threshold: "half" of the scale (Eq. 2), or "learned", sigmoid(s)·g with a parameter s that
            starts at 0.
        offset: "none"; or "learned", where w - o·g chooses the codes, with a parameter o that
            starts at 0.
        start: How the pretrained weights determine g: by their "absmean", or by the scale of
            "least_squares". A group that is hard already keeps its scale with either.
        codebook: "ternary". `EvenMethod` has the other codebooks of the component.

    Raises:
        InputError: If an option is wrong.
    """

    name: ClassVar[str] = "ternary"
    component: ClassVar[str] = "HestiaQATQuantizer"
    scale: Literal["absmean", "learned"] = field(default="absmean", metadata={"optional": True})
    threshold: Literal["half", "learned"] = field(default="half", metadata={"optional": True})
    offset: Literal["none", "learned"] = field(default="none", metadata={"optional": True})
    start: Literal["absmean", "least_squares"] = field(
        default="absmean", metadata={"optional": True}
    )
    codebook: Literal["ternary"] = field(default="ternary", metadata={"optional": True})

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
        """The names of the parameters that a layer holds beside its weight, in order."""
        return (*self.trained_parameters, "scale_start") if self.trained_parameters else ()

    @property
    def trained_parameters(self) -> tuple[str, ...]:
        """The names of the learned parameters."""
        names = {"scale": "scale_logit", "threshold": "threshold_logit", "offset": "offset"}
        return tuple(name for key, name in names.items() if getattr(self, key) == "learned")

    def initial_parameters(self, weight):
        if not self.trained_parameters:
            return ()
        w = self.blocks(weight.detach())
        start = (mean_scale if self.start == "absmean" else least_squares_scale)(w)
        hard_scale = scale_of_hard(w, self.levels)
        start = torch.where(hard_scale > 0, hard_scale, start).squeeze(-1).to(torch.float32)
        return *(torch.zeros_like(start) for _ in self.trained_parameters), start

    def _groups(self, w, parameters, total=None, keep_hard=False):
        """Return gamma and delta, (rows, groups, 1) or (1, 1, 1), and w - b.

        If they are not learned, delta is gamma and b is 0.
        """
        named = zip(self.parameter_names, parameters, strict=True)
        values = {name: value.unsqueeze(-1) for name, value in named}
        if self.scale == "learned":
            scale = learned_factor(values["scale_logit"]) * values["scale_start"]
            scale = round_scale(scale, self.levels).to(w.dtype)
        else:
            scale = mean_scale(w, total, keep_hard=keep_hard)
        step, shifted = scale, w
        if self.threshold == "learned":
            step = learned_factor(values["threshold_logit"]) * values["scale_start"]
            step = step.to(w.dtype)
        if self.offset == "learned":
            shifted = w - (values["offset"] * values["scale_start"]).to(w.dtype)
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
            if name != "offset":
                inner = learned_factor_vjp(inner, parameter)
            grads.append(inner.to(parameter.dtype))
        return [*grads, torch.zeros_like(start)]

    def fit_temperature(self, weights):
        """Return the tau that minimizes the mean squared relaxation error over all ``weights``.

        Unlike `Method.fit_temperature`, it reads every weight once, one at a time.

        Returns:
            tau within [0.001, 4], to about 1e-4; 0.351 for Gaussian weights.

        Raises:
            InputTypeError: If a weight is not floating point.
            InputError: If there are no weights, all are zero, or one has NaN or infinity.
        """
        histogram = None
        for weight in weights:
            require_float(weight)
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


@dataclass(frozen=True, kw_only=True)
class EvenMethod(GroupMethod):
    """Two or four levels, relaxed.

    Args:
        group_size: See `GroupMethod`; not "tensor" with "int2".
        codebook: "binary" or "int2".

    Raises:
        InputError: If an option is wrong.
    """

    name: ClassVar[str] = "even"
    component: ClassVar[str] = "HestiaQATQuantizer"
    codebook: Literal["binary", "int2"] = "binary"

    def __post_init__(self):
        super().__post_init__()
        if self.codebook == "int2":
            self.require_rows("the codebook int2")

    @property
    def levels(self) -> Levels:
        """The codes."""
        return _CODES[self.codebook]

    def scale_and_code(self, w, parameters, total, is_final):
        if self.codebook == "binary":
            scale = mean_scale(w, total, keep_hard=is_final, levels=BINARY)
        else:
            scale = least_squares_scale(w, SYMMETRIC)
        return scale, nearest_code(w, scale, self.levels)

    def _softmax(self, w, scale, tau):
        """Return the levels q, their weights pi, (rows, groups, group) each, and s.

        The product s·q equals scale·code.
        """
        unit = 1 if self.codebook == "binary" else 2  # A code is this factor times its level.
        levels = [code / unit for code in _CODES[self.codebook]]
        return levels, softmax(w / (unit * scale), levels, tau), unit * scale

    def relaxed(self, w, tau, parameters, total):
        scale, code = self.scale_and_code(w, parameters, total, False)
        levels, pi, unit = self._softmax(w, scale, tau.clamp(min=MIN_TAU))
        soft = unit * mean_level(levels, pi)
        return torch.where(tau > 0, soft, self.values(scale, code, parameters))

    def slopes(self, w, tau, parameters, total):
        scale, _ = self.scale_and_code(w, parameters, total, False)
        safe_tau = tau.clamp(min=MIN_TAU)
        levels, pi, _ = self._softmax(w, scale, safe_tau)
        return (torch.where(tau > 0, (2.0 / safe_tau) * variance(levels, pi), torch.ones_like(w)),)


def softmax(z: Tensor, levels: Sequence[float], tau: Tensor) -> list[Tensor]:
    """Return pi_q, proportional to exp(-(z - q)^2/tau), of every level q (Eq. 7).

    Args:
        z: The weights in units of the scale.
        levels: The levels.
        tau: The temperature, 0-D, at least `MIN_TAU`.
    """
    logits = [(2.0 * z - q) * q / tau for q in levels]  # Without z^2, which all of them share.
    top = reduce(torch.maximum, logits)
    terms = [torch.exp(logit - top) for logit in logits]
    total = sum(terms)
    return [term / total for term in terms]


def mean_level(levels: Sequence[float], pi: Sequence[Tensor]) -> Tensor:
    """Return E[q] of `softmax` (Eq. 8)."""
    return reduce(torch.add, [q * p for q, p in zip(levels, pi, strict=True)])


def variance(levels: Sequence[float], pi: Sequence[Tensor]) -> Tensor:
    """Return Var[q] of `softmax`, as a sum over pairs of levels; see the module docstring."""
    pairs = combinations(zip(levels, pi, strict=True), 2)
    return reduce(torch.add, [(q - r) ** 2 * p * s for (q, p), (r, s) in pairs])


def learned_factor(logit: Tensor) -> Tensor:
    """Return the factor 2·sigmoid(logit) of a learned scale or threshold. A logit starts at 0."""
    return 2.0 * torch.sigmoid(logit)


def learned_factor_vjp(grad: Tensor, logit: Tensor) -> Tensor:
    """Return the gradient of ``logit``, given the gradient of its `learned_factor`."""
    sigmoid = torch.sigmoid(logit)
    return grad * 2.0 * sigmoid * (1.0 - sigmoid)


def relaxation_histogram(z: Tensor, scale: Tensor) -> Tensor:
    """Return the sums of gamma^2 and of gamma^2·z per bin of z: (2, NUM_BINS) float64, on the CPU.

    Args:
        z: |w|/gamma of every weight, flat.
        scale: gamma of every weight, flat.
    """
    mass = scale.double().square()
    index = (z * (NUM_BINS / MAX_Z)).long().clamp_(max=NUM_BINS - 1)
    sums = [torch.bincount(index, weights=m, minlength=NUM_BINS) for m in (mass, mass * z)]
    return torch.stack(sums).cpu()


def temperature_from_histogram(histogram: Tensor) -> float:
    """Return the tau that minimizes the relaxation error of a sum of `relaxation_histogram`."""
    mass, moment = histogram
    filled = mass > 0
    mass, z = mass[filled], moment[filled] / mass[filled]  # (filled bins,)

    def errors(taus: Sequence[float]) -> list[float]:
        tau = torch.tensor(taus, dtype=torch.float64).view(-1, 1, 1)
        logits = -torch.stack([(z - 1) ** 2, z**2, (z + 1) ** 2]) / tau  # (taus, 3, bins)
        pi = logits.softmax(1)
        return (mass * (z - (pi[:, 0] - pi[:, 2])) ** 2).sum(-1).tolist()

    return search_temperature(errors, rounds=6, points=33)
