"""Define methods without a temperature: they round, and the gradient passes unchanged.

The effective weight is (1 - p)·W + p·Q(W), with the pressure p. The methods read no temperature.
At every step the latent weights determine scale and code. No gradient flows through the scale:
dQ/dw = 1 for every w. Methods with a learned step are in `hestia_tune.methods.learned_step`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hestia_tune.errors import require_number
from hestia_tune.methods.groups import (
    SCALE_EPS,
    GroupMethod,
    least_squares_scale,
    mean_scale,
    nearest_code,
    round_scale,
    signed_scale,
)

Start = Literal["absmax", "least_squares"]
# What `searched_scale` tries. A scale of 5 significant bits is rounded by up to 1/32, so multiples
# below 1.034 keep the scale below 1/7.5 of the largest weight.
_MULTIPLES = (1.0, 1.03, 0.95, 0.9, 0.85)


@dataclass(frozen=True, kw_only=True)
class StraightThroughMethod(GroupMethod):
    """A scale and a code for every weight, and dQ/dw = 1 for every w."""

    def vjp(self, grad, weight, tau, pressure, parameters=(), total=None):
        return (grad.to(weight.dtype),)


@dataclass(frozen=True, kw_only=True)
class AbsMeanMethod(StraightThroughMethod):
    """AbsMean: BitNet b1.58, and the row "w/o" of the paper's ablation.

    Q(w) = gamma·clip(round(w/gamma), -1, 1) with gamma = mean|w| of the group (Eqs. 1, 2). AbsMean
    is the ternary method at temperature 0. With the group size "tensor" it is the rule of TriLM
    (Spectra, arXiv 2407.12327).

    Args:
        group_size: See `GroupMethod`.
    """

    name: ClassVar[str] = "absmean"

    def scale_and_code(self, w, parameters, total, is_final):
        scale = mean_scale(w, total, keep_hard=is_final)
        return scale, nearest_code(w, scale)


@dataclass(frozen=True, kw_only=True)
class TWNMethod(StraightThroughMethod):
    """Ternary Weight Networks (arXiv 1605.04711): a threshold, and the mean of larger weights.

    With t = delta·mean|w| of a group, Q(w) = s·sign(w) where |w| >= t, and 0 elsewhere. The scale s
    is the mean of the |w| that are not below t. A hard weight has one magnitude besides 0, so a
    second quantization does not change it. The exception is delta 0, where zeros count in s.

    Args:
        group_size: See `GroupMethod`.
        delta: The threshold in units of mean|w|, in [0, 1]. The paper of TWN uses 0.7, later code
            0.75.

    Raises:
        InputError: If an option is wrong.
    """

    name: ClassVar[str] = "twn"
    delta: float = 0.75

    def __post_init__(self):
        super().__post_init__()
        require_number("delta", self.delta, 0, 1, "0.7 in the paper of TWN, 0.75 in later code")

    def scale_and_code(self, w, parameters, total, is_final):
        def mean(kept: Tensor) -> Tensor:
            sums = [torch.where(kept, w.abs(), 0.0).sum(-1, keepdim=True, dtype=torch.float64)]
            sums.append(kept.sum(-1, keepdim=True, dtype=torch.float64))
            if total is not None:
                sums = total(torch.stack(sums)).unbind()
            return sums[0] / sums[1].clamp(min=1.0)

        # All weights, NaN too. A compiler would count a tensor of ones by a kernel of its own.
        threshold = (self.delta * mean(~(w.abs() < 0.0))).to(w.dtype)
        # "Not below" instead of "at least", so that a NaN stays in the mean.
        kept = ~(w.abs() < threshold)
        scale = round_scale(mean(kept).clamp(min=SCALE_EPS), self.levels).to(w.dtype)
        return scale, torch.where(kept, torch.sign(w), torch.zeros_like(w))


@dataclass(frozen=True, kw_only=True)
class INT2Method(StraightThroughMethod):
    """Symmetric two-bit integers: the rows INT2 of the paper's tables.

    The start "absmax" is the rule that the paper's authors released: s = max|w| and
    Q(w) = s·clip(round(w/s), -2, 1). No w/s is below -1, so the code -2 never occurs, and the rule
    is ternary with the threshold s/2. The start "least_squares" has four levels
    {-1.5, -0.5, 0.5, 1.5}·s, with the s that leaves the least squared error. For Gaussian weights
    this s is their standard deviation, to half a percent.

    Args:
        group_size: See `GroupMethod`; not "tensor".
        start: "absmax" or "least_squares", the rule for the scale at every step.

    Raises:
        InputError: If an option is wrong.
    """

    name: ClassVar[str] = "int2"
    start: Start = "absmax"

    def __post_init__(self):
        super().__post_init__()
        self.require_rows("int2")

    @property
    def levels(self) -> int:
        """Return how many codes there are."""
        return 3 if self.start == "absmax" else 4

    def scale_and_code(self, w, parameters, total, is_final):
        if self.start == "absmax":
            largest = w.abs().amax(-1, keepdim=True).clamp(min=SCALE_EPS)
            scale = round_scale(largest, self.levels).to(w.dtype)
        else:
            scale = least_squares_scale(w, self.levels)
        return scale, nearest_code(w, scale, self.levels)


def best_scale(
    blocks: Tensor, scales: Sequence[Tensor], codes: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the scale of each group with the least squared error; shape (..., 1).

    A scale must lower the error clearly, so the order of a sum does not decide.

    Args:
        blocks: The weights (..., group).
        scales: The scales to try, each (..., 1). An earlier one wins a tie.
        codes: Returns the codes (..., group) for a scale.
    """
    best, least = scales[0], torch.full_like(scales[0], torch.inf, dtype=torch.float64)
    for scale in scales:
        difference = (blocks - scale * codes(scale)).double()
        error = difference.square().sum(-1, keepdim=True)
        is_better = error < least * (1 - 1e-12)
        best, least = torch.where(is_better, scale, best), torch.where(is_better, error, least)
    return best


def searched_scale(blocks: Tensor) -> Tensor:
    """Return a scale of codes from -8 to 7 with a small squared error, rounded; shape (..., 1).

    The function tries a few multiples of `signed_scale`. A smaller scale cuts the largest weights
    off and rounds all others more finely. With every multiple, the largest weight has the code -8.
    The first multiple keeps a hard weight as it is.
    """
    largest, scales = signed_scale(blocks), []
    for multiple in _MULTIPLES:
        size = (multiple * largest.abs()).clamp(min=SCALE_EPS)
        scales.append(round_scale(torch.where(largest < 0, -size, size), 16).to(blocks.dtype))
    return best_scale(blocks, scales, lambda scale: nearest_code(blocks, scale, 16))


@dataclass(frozen=True, kw_only=True)
class INT4Method(StraightThroughMethod):
    """Four-bit integers: Q(w) = s·clip(round(w/s), -8, 7), with a signed scale s for each group.

    The scale gives the largest weight of the group the code -8. It is -w/8 of the largest weight w,
    or a near number with a smaller squared error (`searched_scale`). It has 5 significant bits, so
    that every product is a bfloat16 number. A second quantization does not change a hard weight. A
    group whose scale is at its bound becomes zeros.

    Args:
        group_size: See `GroupMethod`; not "tensor".

    Raises:
        InputError: If an option is wrong.
    """

    name: ClassVar[str] = "int4"
    levels: ClassVar[int] = 16

    def __post_init__(self):
        super().__post_init__()
        self.require_rows("int4")

    def scale_and_code(self, w, parameters, total, is_final):
        scale = searched_scale(w)
        return scale, nearest_code(w, scale, self.levels)
