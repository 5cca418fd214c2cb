"""The method of two bits and four levels: codes {-1, 0, 1, 2} times a scale that has a sign.

A file of two bits has four codes, and a ternary weight leaves one of them unused. With the code 2
the weight takes the same bytes and the same time. A group whose large weights are negative has a
negative scale, so its levels are {1, 0, -1, -2} times the magnitude of the scale. For Gaussian
weights in groups of 64, the least relative squared error is .122; it is .182 for ternary codes.

With z = w/s and the codes q, the relaxation is that of the paper (Eqs. 5, 6) with another codebook,
and Lemma 1 holds for every codebook:

    pi_q  proportional to exp(-(z - q)^2/tau)    H = s·E[q]    dH/dw = (2/tau)·Var[q]

The scale is never chosen again during training, because another sign would change every code of its
group. `initial_parameters` searches both signs for the scale with the least squared error, and the
method starts at a share of it. Then the scale follows mean|w| of its group, or it is learned:

    absmean    s = r·mean|w|          r, the ratio at the start, does not change
    learned    s = 2·sigmoid(t)·g     g is the scale at the start, and t starts at 0
                                      dH/ds = E[q] - z·(2/tau)·Var[q]

At tau 0, the slope of the rounding is 1 for dH/dw. For dH/ds it is 1 only from -1.5 to 2.5 scales,
because the code is clipped beyond, much as in LSQ. A code times a bfloat16 scale is a bfloat16
number, because the codes are powers of two.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hestia_tune.errors import InputError, require_number
from hestia_tune.methods.groups import SCALE_EPS, GroupMethod, round_to_bfloat16
from hestia_tune.methods.hestia import MIN_TAU, softmax, variance

_CODES = (-1, 0, 1, 2)
# Beyond this many scales, the softmax has one code at every temperature up to 100. The bound keeps
# its logits finite.
_MAX_Z = 1e4
_ROW_WEIGHTS = 2**22  # How many weights are sorted together.


def nearest_signed_code(w: Tensor, scale: Tensor) -> Tensor:
    """Return the code in {-1, 0, 1, 2} whose product with a scale is nearest, in w's dtype.

    A tie takes the code nearer to 0. The code is NaN if the weight or the scale is NaN.

    Args:
        w: The weights (..., group).
        scale: The scales, with their signs (..., 1).
    """
    size, turned = scale.abs(), torch.where(scale < 0, -w, w)
    code = w * (0.0 * scale)  # A constant would lose a NaN.
    for bound in (0.5, 1.5):
        code = code + (turned > bound * size).to(w.dtype)
    return code - (turned < -0.5 * size).to(w.dtype)


def signed_least_squares_scale(blocks: Tensor) -> Tensor:
    """Return the scale s, of either sign, with the least sum (w - s·q)^2; float32 (..., 1).

    Let s > 0 fall from infinity. A weight leaves the code 0 at s = 2|w|, and a positive one gets
    the code 2 at s = w/1.5. Between two such points the codes q are fixed, and the best s is N/D
    with N = sum w·q and D = sum q^2, where the sum falls by N^2/D. The function sorts the points,
    adds up N and D, and takes the best. It does the same for -w.

    Args:
        blocks: The weights (rows, groups, group).
    """
    rows = max(1, _ROW_WEIGHTS // max(1, blocks[:1].numel()))
    return torch.cat([_signed_least_squares_scale(part) for part in blocks.split(rows)])


def _signed_least_squares_scale(blocks: Tensor) -> Tensor:
    """Return the scales of some rows; see `signed_least_squares_scale`."""
    size, found = blocks.detach().abs(), []
    for sign in (1, -1):
        larger = (sign * blocks > 0).to(size.dtype)  # The weights that may get the code 2.
        order = torch.cat([2 * size, larger * size / 1.5], -1).argsort(-1, descending=True)
        by_n = torch.cat([size, larger * size], -1).gather(-1, order)
        by_d = torch.cat([torch.ones_like(size), 3 * larger], -1).gather(-1, order)
        n, d = (part.cumsum(-1, dtype=torch.float64) for part in (by_n, by_d))
        d = d.clamp(min=1.0)  # It is 0 only at points of zeros.
        gain, index = (n.square() / d).max(-1, keepdim=True)
        found.append((sign * n.gather(-1, index) / d.gather(-1, index), gain))
    (positive, gain), (negative, other) = found
    # Clearly better, so the order of a sum does not decide.
    return torch.where(other > gain * (1 + 1e-12), negative, positive).to(torch.float32)


def signed_scale_of_hard(blocks: Tensor) -> Tensor:
    """Return the scales of groups that are hard already, and 0 for all other groups; (..., 1).

    A group is hard if it is a scale times codes {-1, 0, 1, 2}. If two scales fit, it is the larger.
    """
    low, high = blocks.detach().aminmax(dim=-1, keepdim=True)
    largest = torch.where(high >= -low, high, low)
    found = torch.zeros_like(largest)
    for scale in (largest / 2, largest.abs()):
        is_hard = nearest_signed_code(blocks, scale) * scale == blocks
        rounded = round_to_bfloat16(scale.to(torch.float32)) == scale
        found = torch.where(is_hard.all(-1, keepdim=True) & rounded, scale, found)
    return found


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
    levels: ClassVar[int] = 4
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
    def code_values(self) -> tuple[complex, ...]:
        """Return the codes of a weight."""
        return _CODES

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Return the names of the parameters that a layer holds beside its weight, in order."""
        return ("scale_logit", "scale_start") if self.scale == "learned" else ("scale_ratio",)

    @property
    def trained_parameters(self) -> tuple[str, ...]:
        """Return the names of the learned parameters."""
        return ("scale_logit",) if self.scale == "learned" else ()

    def initial_parameters(self, weight):
        w = self.blocks(weight.detach())
        share = 1.0 if self.start == "least_squares" else float(self.start)
        hard_scale = signed_scale_of_hard(w)
        start = torch.where(hard_scale != 0, hard_scale, share * signed_least_squares_scale(w))
        if self.scale == "learned":
            start = torch.where(start.abs() < SCALE_EPS, SCALE_EPS, start)  # A group of zeros.
            start = start.squeeze(-1).to(torch.float32)
            return torch.zeros_like(start), start
        mean = _mean(w)
        ratio = torch.where(mean > 0, start / mean, 1.0)
        return (ratio.squeeze(-1).to(torch.float32),)

    def _scale(self, w, parameters):
        """Return the scales (rows, groups, 1), rounded to bfloat16, in the dtype of ``w``."""
        if self.scale == "learned":
            logit, start = (value.unsqueeze(-1) for value in parameters)
            scale = 2.0 * torch.sigmoid(logit) * start
        else:
            scale = parameters[0].unsqueeze(-1) * _mean(w)
        size = scale.abs().clamp(min=SCALE_EPS)
        scale = torch.where(scale < 0, -size, size)
        return round_to_bfloat16(scale.to(torch.float32)).to(w.dtype)

    def scale_and_code(self, w, parameters, total, is_final):
        scale = self._scale(w, parameters)
        return scale, nearest_signed_code(w, scale)

    def hard_scale(self, scale):
        return scale  # The code 0 is the weight 0, so a group of zeros may have any scale.

    def relaxed(self, w, tau, parameters, total):
        scale, code = self.scale_and_code(w, parameters, total, False)
        z = (w / scale).clamp(-_MAX_Z, _MAX_Z)
        pi = softmax(z, _CODES, tau.clamp(min=MIN_TAU))
        soft = sum(q * p for q, p in zip(_CODES, pi, strict=True))
        return scale * torch.where(tau > 0, soft, code)

    def slopes(self, w, tau, parameters, total):
        scale, code = self.scale_and_code(w, parameters, total, False)
        safe_tau = tau.clamp(min=MIN_TAU)
        z = (w / scale).clamp(-_MAX_Z, _MAX_Z)
        pi = softmax(z, _CODES, safe_tau)
        slope = (2.0 / safe_tau) * variance(_CODES, pi)
        by_weight = torch.where(tau > 0, slope, torch.ones_like(w))
        if self.scale != "learned":
            return (by_weight,)
        mean = sum(q * p for q, p in zip(_CODES, pi, strict=True))
        rounded = code - torch.where((z > -1.5) & (z < 2.5), z, 0.0)
        return by_weight, torch.where(tau > 0, mean - z * slope, rounded)  # dH/dw, dH/ds

    def parameter_grads(self, sums, parameters):
        if self.scale != "learned":
            return [torch.zeros_like(value) for value in parameters]
        logit, start = parameters
        sigmoid = torch.sigmoid(logit)
        by_logit = sums[0] * start * 2.0 * sigmoid * (1.0 - sigmoid)
        return [by_logit.to(logit.dtype), torch.zeros_like(start)]


def _mean(w: Tensor) -> Tensor:
    """Return mean|w| of each group, summed in float64 as in `hestia_tune.methods.groups`."""
    return w.detach().abs().sum(-1, keepdim=True, dtype=torch.float64) / w.shape[-1]
