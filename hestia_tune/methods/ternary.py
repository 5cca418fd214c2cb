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
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from hestia_tune.methods.base import Method, compute_dtype
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


def _scale(blocks: torch.Tensor) -> torch.Tensor:
    """gamma = mean|w| + eps (Eq. 1) of each (..., group), bfloat16-rounded; shape (..., 1)."""
    total = blocks.detach().abs().sum(-1, keepdim=True, dtype=torch.float64)
    scale = (total / blocks.shape[-1] + SCALE_EPS).to(torch.float32)
    return round_to_bfloat16(scale).to(compute_dtype(blocks))


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
    """Codes {-1, 0, 1} with an absolute-mean scale per group (AbsMean of BitNet b1.58).

    Args:
        group_size: weights along in_features that share a scale (128 in the paper), or "channel",
            or "tensor".

    Raises:
        TypeError, ValueError: on a wrong ``group_size``.
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

    def __post_init__(self):
        validate_group_size(self.group_size)

    def check_layer(self, in_features: int, out_features: int, name: str) -> None:
        check_divides(self.group_size, in_features, name)

    def _blocks(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = block_view(weight, self.group_size)
        return blocks.to(compute_dtype(weight)), _scale(blocks)

    def effective_weight(self, weight, tau, pressure):
        w, scale = self._blocks(weight)
        tau, pressure = tau.to(w.dtype), pressure.to(w.dtype)
        log_e1, _, _, inv_d = _softmax_terms(w, scale, tau.clamp(min=MIN_TAU))
        soft_mean = torch.sign(w) * (-torch.expm1(log_e1)) * inv_d
        mean = torch.where(tau > 0, soft_mean, _hard_code(w, scale))
        effective = (1.0 - pressure) * w + pressure * (scale * mean)
        return effective.to(weight.dtype).view_as(weight)

    def vjp(self, grad, weight, tau, pressure):
        w, scale = self._blocks(weight)
        tau, pressure = tau.to(w.dtype), pressure.to(w.dtype)
        safe_tau = tau.clamp(min=MIN_TAU)
        _, e1, e2, inv_d = _softmax_terms(w, scale, safe_tau)
        variance = (4.0 * e1 * inv_d + (e2 * inv_d) * (1.0 + e1)) * inv_d
        slope = torch.where(tau > 0, (2.0 / safe_tau) * variance, torch.ones_like(w))
        jacobian = (1.0 - pressure) + pressure * slope
        grad_w = block_view(grad, self.group_size).to(w.dtype) * jacobian
        return grad_w.to(weight.dtype).view_as(weight)

    def hard(self, weight):
        w, scale = self._blocks(weight.detach())
        return (scale * _hard_code(w, scale)).to(weight.dtype).view_as(weight)

    def codes(self, weight):
        w, scale = self._blocks(weight.detach())
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
            w, scale = self._blocks(weight.detach())
            part = relaxation_histogram((w.abs() / scale).flatten(), scale.expand_as(w).flatten())
            histogram = part if histogram is None else histogram + part
        if histogram is None:
            raise ValueError("tau_init auto needs at least one weight; got none")
        return temperature_from_histogram(histogram)
