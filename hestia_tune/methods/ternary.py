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

A learned scale gets dH/dgamma = mu - z·mu'(z), exact under the relaxation. At tau 0 it is that of
gamma·round(w/gamma) with a straight-through rounding, round(z) - z, and the clipped code beyond
1.5 scales, much as in LSQ. The rounding of gamma to bfloat16 passes gradients as they are.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch

from hestia_tune.methods.base import Method, Total, compute_dtype
from hestia_tune.methods.granularity import (
    GroupSize,
    block_view,
    check_divides,
    validate_group_size,
)
from hestia_tune.methods.temperature import relaxation_histogram, temperature_from_histogram

SCALE_EPS = 1e-8
# exp(80) is finite in float32 and bfloat16; beyond it the weight of a nonzero code is below 1e-34.
_MAX_EXPONENT = 80.0
# The hard code is round(z) up to here, in scales; beyond, it is clipped and z no longer matters.
_ROUNDED_WITHIN = 1.5
# Keeps 2/tau finite in float32; a cosine over 10^9 steps stays far above it.
MIN_TAU = 1e-30


def round_to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """Rounds float32 to the nearest bfloat16 (ties to even), still float32.

    By its bits, because a compiler may drop a cast down and up again: inductor keeps bfloat16
    intermediates of a fused kernel in float32.
    """
    bits = x.view(torch.int32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)
    return torch.where(x.isnan(), x, rounded)  # the sum may carry a NaN's bits over to zero


def _mean_scale(
    blocks: torch.Tensor, total: Total | None = None, *, keep_ternary: bool = False
) -> torch.Tensor:
    """gamma = mean|w| + eps (Eq. 1) of each (..., group), bfloat16-rounded; shape (..., 1).

    Args:
        blocks: (rows, groups, group).
        total: sums over the other parts of a group, if this is one.
        keep_ternary: take gamma itself of a group that is gamma·{-1, 0, 1} already, gamma a
            bfloat16 number. Its mean is gamma times the share of nonzeros, so that quantizing it a
            second time would shrink it. By Cauchy-Schwarz, nonzero |w| are equal where
            (sum|w|)^2 = nonzeros·sum w^2; float64 holds both sides exactly for a bfloat16 gamma.
    """
    magnitude = blocks.detach().abs()
    sums = [magnitude.sum(-1, keepdim=True, dtype=torch.float64)]
    sums.append(torch.full_like(sums[0], blocks.shape[-1]))
    if keep_ternary:
        sums.append(magnitude.double().square().sum(-1, keepdim=True))
        sums.append((magnitude > 0).sum(-1, keepdim=True, dtype=torch.float64))
    if total is not None:
        sums = total(torch.stack(sums)).unbind()
    scale = round_to_bfloat16((sums[0] / sums[1] + SCALE_EPS).to(torch.float32))
    if keep_ternary:
        magnitudes, _, squares, nonzeros = sums
        gamma = magnitudes / nonzeros.clamp(min=1.0)
        rounded = round_to_bfloat16(gamma.to(torch.float32))
        ternary = (magnitudes * magnitudes == nonzeros * squares) & (rounded == gamma) & (gamma > 0)
        scale = torch.where(ternary, rounded, scale)
    return scale.to(compute_dtype(blocks))


def _hard_code(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """clip(round(w/gamma), -1, 1) without the division."""
    return torch.where(w.abs() > 0.5 * scale, torch.sign(w), torch.zeros_like(w))


def _softmax_terms(w: torch.Tensor, scale: torch.Tensor, tau: torch.Tensor):
    """(-4a/tau, e1, e2, 1/D) of the module docstring; stable for every tau > 0."""
    a = w.abs() / scale
    log_e1 = -4.0 * a / tau
    e1 = log_e1.exp()
    e2 = ((1.0 - 2.0 * a) / tau).clamp(max=_MAX_EXPONENT).exp()
    return log_e1, e1, e2, 1.0 / (1.0 + e1 + e2)


@dataclass(frozen=True, kw_only=True)
class TernaryMethod(Method):
    """Codes {-1, 0, 1} with a scale per group.

    Args:
        group_size: weights along in_features that share a scale (128 in the paper), or "channel",
            or "tensor".
        scale: "absmean", mean|w| of the latent weights as they are (Eq. 1; AbsMean of BitNet
            b1.58); or "learned", 2·sigmoid(t)·mean|w0| with a parameter t per group that starts at
            0 and mean|w0| of the pretrained weights.

    Parameters of a layer, both (out_features, groups), if the scale is learned: ``scale_logit``, t,
    and ``scale_start``, mean|w0|, which is not trained.

    Raises:
        TypeError, ValueError: on a wrong ``group_size`` or ``scale``.
    """

    name: ClassVar[str] = "ternary"
    packed_formats: ClassVar[tuple[str, ...]] = ("ternary", "intx")
    file_formats: ClassVar[tuple[str, ...]] = (
        "torchao",
        "huggingface",
        "compressed_tensors",
        "gguf",
    )
    group_size: GroupSize = 128
    scale: Literal["absmean", "learned"] = field(default="absmean", metadata={"optional": True})

    def __post_init__(self):
        validate_group_size(self.group_size)
        if self.scale not in ("absmean", "learned"):
            raise ValueError(f'scale must be "absmean" or "learned"; got {self.scale!r}')
        if self.scale == "learned" and self.group_size == "tensor":
            raise ValueError(
                'scale "learned" needs scales that lie within rows; got group_size "tensor"; use '
                '"channel" or an int'
            )

    def check_layer(self, in_features: int, out_features: int, name: str) -> None:
        check_divides(self.group_size, in_features, name)

    @property
    def scales_span_rows(self) -> bool:
        return self.group_size == "tensor"

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return ("scale_logit", "scale_start") if self.scale == "learned" else ()

    @property
    def trained_parameters(self) -> tuple[str, ...]:
        return self.parameter_names[:1]

    def initial_parameters(self, weight):
        if self.scale == "absmean":
            return ()
        blocks = block_view(weight.detach(), self.group_size).to(compute_dtype(weight))
        start = _mean_scale(blocks).squeeze(-1).to(torch.float32)
        return torch.zeros_like(start), start

    def _blocks(self, weight, parameters=(), total=None, keep_ternary=False):
        """w (rows, groups, group) and gamma (rows, groups, 1), in the dtype of the formulas."""
        w = block_view(weight, self.group_size).to(compute_dtype(weight))
        if self.scale == "absmean":
            total = total if self.group_size == "tensor" else None
            return w, _mean_scale(w, total, keep_ternary=keep_ternary)
        logit, start = parameters
        scale = (2.0 * torch.sigmoid(logit) * start).to(torch.float32)
        return w, round_to_bfloat16(scale).to(w.dtype).unsqueeze(-1)

    def effective_weight(self, weight, tau, pressure, parameters=(), total=None):
        w, scale = self._blocks(weight, parameters, total)
        tau, pressure = tau.to(w.dtype), pressure.to(w.dtype)
        log_e1, _, _, inv_d = _softmax_terms(w, scale, tau.clamp(min=MIN_TAU))
        soft_mean = torch.sign(w) * (-torch.expm1(log_e1)) * inv_d
        mean = torch.where(tau > 0, soft_mean, _hard_code(w, scale))
        effective = (1.0 - pressure) * w + pressure * (scale * mean)
        return effective.to(weight.dtype).view_as(weight)

    def vjp(self, grad, weight, tau, pressure, parameters=(), total=None):
        w, scale = self._blocks(weight, parameters, total)
        tau, pressure = tau.to(w.dtype), pressure.to(w.dtype)
        safe_tau = tau.clamp(min=MIN_TAU)
        log_e1, e1, e2, inv_d = _softmax_terms(w, scale, safe_tau)
        variance = (4.0 * e1 * inv_d + (e2 * inv_d) * (1.0 + e1)) * inv_d
        slope = torch.where(tau > 0, (2.0 / safe_tau) * variance, torch.ones_like(w))
        jacobian = (1.0 - pressure) + pressure * slope
        g = block_view(grad, self.group_size).to(w.dtype)
        grad_w = (g * jacobian).to(weight.dtype).view_as(weight)
        if self.scale == "absmean":
            return (grad_w,)
        # H = gamma·mu(w / gamma): dH/dgamma = mu - z·mu'(z), and dH/dw = mu'(z) = slope.
        z = w / scale
        soft = torch.sign(w) * (-torch.expm1(log_e1)) * inv_d - z * slope
        hard = _hard_code(w, scale) - torch.where(z.abs() < _ROUNDED_WITHIN, z, 0.0)
        grad_scale = (g * torch.where(tau > 0, soft, hard)).sum(-1) * pressure  # (rows, groups)
        logit, start = parameters
        sigmoid = torch.sigmoid(logit)
        grad_logit = grad_scale * 2.0 * start * sigmoid * (1.0 - sigmoid)
        return grad_w, grad_logit.to(logit.dtype), torch.zeros_like(start)

    def hard(self, weight, parameters=(), total=None):
        w, scale = self._blocks(weight.detach(), parameters, total, keep_ternary=True)
        return (scale * _hard_code(w, scale)).to(weight.dtype).view_as(weight)

    def codes(self, weight, parameters=()):
        w, scale = self._blocks(weight.detach(), parameters, keep_ternary=True)
        codes = _hard_code(w, scale).to(torch.int8).view_as(weight)
        return codes, scale.squeeze(-1).to(torch.bfloat16)

    def fit_temperature(self, weights):
        """As `Method.fit_temperature`, reading every weight once, one at a time.

        Returns:
            tau within [0.001, 4], to about 1e-4; 0.351 for Gaussian weights.
        """
        histogram = None
        for weight in weights:
            if not torch.isfinite(weight).all():
                raise ValueError("tau_init auto needs finite weights; got NaN or infinity")
            w, scale = self._blocks(weight.detach(), self.initial_parameters(weight))
            part = relaxation_histogram((w.abs() / scale).flatten(), scale.expand_as(w).flatten())
            histogram = part if histogram is None else histogram + part
        if histogram is None:
            raise ValueError("tau_init auto needs at least one weight; got none")
        return temperature_from_histogram(histogram)
