"""Methods without a temperature: they round, and the gradient passes unchanged.

The effective weight is (1 - p)·W + p·Q(W), with the pressure p. The methods read no temperature.

**Computed scales** (AbsMean, TWN, INT2, INT4). At every step the latent weights determine scale and
code. No gradient flows through the scale: dQ/dw = 1 for every w.

**Learned steps** (LSQ, SEQ, DLT). Q/a is a function of z = w/a, where a is the step of a group:

    dQ/dw = 1[|z| <= reach]
    dQ/da = (Q/a - z where |z| <= reach, else ±outside) / norm

The norm is the square root of the number of weights that share a step. Steps are rounded to
bfloat16 before anything is computed from them, codes included. The rounding passes gradients
unchanged.

**Embeddings** are rounded without training, to whole-number codes of 4, 5 or 8 bits. A third of a
small model's file is its embedding. `hestia_tune.models.folder.ModelFolder` rounds it while it is
read, for every file format in the same way. A weight is a code times the scale of its group of 32
weights, the block of the GGUF types Q4_0, Q5_0 and Q8_0:

    choice  codes        scale of a group
    int4    -8 to 7      near -w/8 of the largest w (`INT4Method`)
    int5    -16 to 15    near max|w|/15: of three numbers, the one with the least squared error
    int8    -127 to 127  the least power of two that is not below max|w|/127

Every product is a bfloat16 number, so every format that holds bfloat16 holds the rounded weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hestia_tune.errors import InputError, require_number
from hestia_tune.methods.groups import (
    INT4,
    SCALE_EPS,
    SYMMETRIC,
    TERNARY,
    GroupMethod,
    Levels,
    least_squares_scale,
    mean_scale,
    nearest_code,
    round_scale,
    round_to_bfloat16,
    scale_of_hard,
    signed_scale,
)

Start = Literal["absmax", "least_squares"]
# What `searched_scale` tries. A scale of 5 significant bits is rounded by up to 1/32, so multiples
# below 1.034 keep the scale below 1/7.5 of the largest weight.
_MULTIPLES = (1.0, 1.03, 0.95, 0.9, 0.85)


@dataclass(frozen=True, kw_only=True)
class StraightThroughMethod(GroupMethod):
    """A scale and a code for every weight, and dQ/dw = 1 for every w."""

    has_temperature: ClassVar[bool] = False

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
    """Ternary Weight Networks (arXiv 1605.04711): a threshold, and the mean |w| above it.

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
    """Symmetric two-bit integers: the rows INT2 of the tables in Hestia's paper.

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
    def levels(self) -> Levels:
        """The codes."""
        return TERNARY if self.start == "absmax" else SYMMETRIC

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
        scales.append(round_scale(torch.where(largest < 0, -size, size), INT4).to(blocks.dtype))
    return best_scale(blocks, scales, lambda scale: nearest_code(blocks, scale, INT4))


@dataclass(frozen=True, kw_only=True)
class INT4Method(StraightThroughMethod):
    """Four-bit integers: Q(w) = s·clip(round(w/s), -8, 7), with a signed scale s for each group.

    The scale gives the largest weight of the group the code -8. It is -w/8 of the largest weight w,
    or a nearby value with a smaller squared error. It has 5 significant bits, so
    that every product is a bfloat16 number. A second quantization does not change a hard weight. A
    group whose scale is at its bound becomes zeros.

    Args:
        group_size: See `GroupMethod`; not "tensor".

    Raises:
        InputError: If an option is wrong.
    """

    name: ClassVar[str] = "int4"
    levels: ClassVar[Levels] = INT4

    def __post_init__(self):
        super().__post_init__()
        self.require_rows("int4")

    def scale_and_code(self, w, parameters, total, is_final):
        scale = searched_scale(w)
        return scale, nearest_code(w, scale, self.levels)


@dataclass(frozen=True, kw_only=True)
class LearnedStepMethod(GroupMethod):
    """The base of the methods with a learned step (LSQ, SEQ, DLT).

    Q/a is a function of z = w/a, where a is the step of a group of n weights. With two constants of
    the method, reach and outside,

        dQ/dw = 1[|z| <= reach]
        dQ/da = (Q/a - z where |z| <= reach, else ±outside) / sqrt(n)

    ParetoQ's code divides the gradient of a step by the square root of the size of the whole matrix
    instead of the group's size. A group of pretrained weights that is hard already keeps its values
    with both starts: its step is chosen so that the scale stays.

    A layer holds the parameter ``step``, (out_features, groups), float32.

    Args:
        group_size: See `GroupMethod`; not "tensor".
        start: How the pretrained weights determine the step: "absmax", their largest |w|, as in
            ParetoQ's code; or "least_squares", where the codes leave the least squared error.

    Raises:
        InputError: If an option is wrong.
    """

    has_temperature: ClassVar[bool] = False
    trained_parameters = ("step",)
    # The scale divided by the step, reach and outside; see the module docstring.
    slope_rule: ClassVar[tuple[float, float, float]] = (1.0, 1.0, 1.0)
    start: Start = "absmax"

    def __post_init__(self):
        super().__post_init__()
        self.require_rows("a learned step")

    def initial_parameters(self, weight):
        w, ratio = self.blocks(weight.detach()), self.slope_rule[0]
        if self.start == "absmax":
            step = w.abs().amax(-1)
        else:
            step = least_squares_scale(w, self.levels).squeeze(-1) / ratio
        # ratio·(scale/ratio) rounds to the scale of a hard group.
        hard_scale = scale_of_hard(w, self.levels).squeeze(-1)
        return (torch.where(hard_scale > 0, hard_scale / ratio, step).to(torch.float32),)

    def scale_and_code(self, w, parameters, total, is_final):
        scale = (self.slope_rule[0] * parameters[0]).clamp(min=SCALE_EPS).unsqueeze(-1)
        scale = round_scale(scale, self.levels).to(w.dtype)
        return scale, nearest_code(w, scale, self.levels)

    def slopes(self, w, tau, parameters, total):
        scale, code = self.scale_and_code(w, parameters, total, False)
        ratio, reach, outside = self.slope_rule
        z = w * (ratio / scale)
        inside = z.abs() <= reach
        by_step = torch.where(inside, ratio * code - z, outside * torch.sign(z))
        return inside.to(w.dtype), by_step / sqrt(w.shape[-1])


@dataclass(frozen=True, kw_only=True)
class LSQMethod(LearnedStepMethod):
    """Learned step size quantization (arXiv 1902.08153), ternary: Q(w) = a·clip(round(w/a), -1, 1).

    In the gradients of `LearnedStepMethod`, reach and outside are 1. The gradient of a step is
    divided by the square root of its group's size. The paper of LSQ divides it by sqrt(N·Q_P), with
    Q_P = 1 here and N the size of the whole weight, which has one step. That paper starts at
    2·mean|w|/sqrt(Q_P). The start "absmax" is the start in ParetoQ's code.

    Args:
        group_size: See `GroupMethod`; not "tensor".
        start: See `LearnedStepMethod`.
    """

    name: ClassVar[str] = "lsq"


@dataclass(frozen=True, kw_only=True)
class SEQMethod(LearnedStepMethod):
    """Stretched elastic quantization of ParetoQ (arXiv 2502.02631), ternary or in two bits.

    With z = w/a clipped to ±0.99, levels share the range evenly:

        ternary  Q = a·round(1.5·z)/1.5            {-2/3, 0, 2/3}·a
        2 bits   Q = a·(round(2·z + 0.5) - 0.5)/2  {-3/4, -1/4, 1/4, 3/4}·a

    The threshold of ternary codes is a/3. In the gradients of `LearnedStepMethod`, reach is 0.99.
    Outside is 1 for ternary, as published, although the outer level is 2/3, and 3/4 for two bits.
    The ternary forward equals that of LSQ with the step 2a/3. The gradients differ. ParetoQ's code
    has one step per row. The start "absmax" is ParetoQ's.

    Args:
        bits: "ternary" or 2.
        group_size: See `GroupMethod`; not "tensor".
        start: See `LearnedStepMethod`.
    """

    name: ClassVar[str] = "seq"
    bits: Literal["ternary", 2] = "ternary"

    @property
    def levels(self) -> Levels:
        """The codes."""
        return SYMMETRIC if self.bits == 2 else TERNARY

    @property
    def slope_rule(self) -> tuple[float, float, float]:
        """The scale divided by the step, reach and outside; see the module docstring."""
        # Codes of four levels are ±1 and ±3, in units of a/4.
        return (1 / 4, 0.99, 3 / 4) if self.bits == 2 else (2 / 3, 0.99, 1.0)


@dataclass(frozen=True, kw_only=True)
class DLTMethod(LearnedStepMethod):
    """Dual learnable ternarization: Q(w) = a·T + c, with a learned step a and a learned offset c.

    T is LSQ's code clip(round(w/a), -1, 1). The offset of a group starts at 0, and dQ/dc = 1,
    without normalization. In the gradients of `LearnedStepMethod`, reach and outside are 1. This is
    the DLT in the code of Tencent's Sherry and AngelSlim. Their code divides the gradient of a step
    by the square root of the size of the whole matrix. TernaryLLM (arXiv 2406.07177) introduced the
    name, but its DLT differs: as in TWN, a threshold that follows from mean|w| chooses the codes,
    and the step only multiplies them. The start "absmax" is not from that paper.

    The levels c - a, c and c + a are rounded to bfloat16, so a dense hard model is exact. They are
    not products of a scale and a code, so no packed format holds them. A hard model with an offset
    changes if it is prepared again: the offset starts at 0, and the codes are chosen without it.

    A layer holds the parameters ``step`` and ``offset``, (out_features, groups), float32.

    Args:
        group_size: See `GroupMethod`; not "tensor".
        start: See `LearnedStepMethod`.
    """

    name: ClassVar[str] = "dlt"
    code_values: ClassVar[tuple[complex, ...]] = ()
    trained_parameters = "step", "offset"

    def initial_parameters(self, weight):
        (step,) = super().initial_parameters(weight)
        return step, torch.zeros_like(step)

    def values(self, scale, code, parameters):
        levels = parameters[1].unsqueeze(-1) + scale * code
        return round_to_bfloat16(levels.to(torch.float32)).to(scale.dtype)

    def slopes(self, w, tau, parameters, total):
        return *super().slopes(w, tau, parameters, total), torch.ones_like(w)


EMBEDDING_GROUP = 32
# Bits of a weight with its scale of 16 bits.
EMBEDDING_BITS = {"int4": 4.5, "int5": 5.5, "int8": 8.5}
_LEAST_SCALE = 2.0**-14  # of float16's normal range, which GGUF needs


def check_embedding_width(name: str, width: int) -> None:
    """Raise InputError if the rows of an embedding, ``width`` weights long, have a rest."""
    if width % EMBEDDING_GROUP:
        raise InputError(
            f"bits.embedding needs rows of a multiple of {EMBEDDING_GROUP} weights; {name} has "
            f"rows of {width}; leave bits.embedding out"
        )


def embedding_codes(weight: Tensor, choice: str) -> tuple[Tensor, Tensor]:
    """Return the codes of an embedding and the scales of its groups.

    A second rounding does not change a rounded embedding.

    Args:
        weight: The embedding (rows, width).
        choice: "int4", "int5" or "int8".

    Returns:
        The codes, int8 (rows, width), and the scales, bfloat16 (rows, width / 32).
    """
    weight = weight.float()
    blocks = weight.unflatten(-1, (-1, EMBEDDING_GROUP))
    if choice == "int4":
        _, scale, code = INT4Method(group_size=EMBEDDING_GROUP).quantized(weight)
    elif choice == "int5":
        scale = _scale_of_5_bits(blocks)
        code = _codes_of_5_bits(blocks, scale)
    else:
        # x = m * 2^e with m in [1/2, 1), so 2^e is the least power of two above x.
        largest = blocks.abs().amax(-1, keepdim=True).clamp(min=127 * _LEAST_SCALE)
        fraction, exponent = torch.frexp(largest / 127)
        scale = torch.ldexp(torch.ones_like(fraction), exponent - (fraction == 0.5).int())
        code = (blocks / scale).round()
    return code.flatten(-2).to(torch.int8), scale.squeeze(-1).to(torch.bfloat16)


def _codes_of_5_bits(blocks: Tensor, scale: Tensor) -> Tensor:
    return (blocks / scale).round().clamp(-16, 15)


def _scale_of_5_bits(blocks: Tensor) -> Tensor:
    """Return the scale of each group with the least squared error of three; shape (..., 1).

    The three scales have 4 significant bits, so every product is a bfloat16 number. The first is
    the largest such number up to max|w|/14. The other two are the numbers below it, and the last
    one is at most max|w|/16. So the largest magnitude of the codes in a group is 14, 15 or 16, and
    a second rounding tries the scale of the first rounding.
    """
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=14 * 1.25 * _LEAST_SCALE)
    bits = (largest / 14).view(torch.int32) >> 20
    scales = [((bits - step) << 20).view(torch.float32) for step in range(3)]
    return best_scale(blocks, scales, lambda scale: _codes_of_5_bits(blocks, scale))


def round_embedding(weight: Tensor, choice: str) -> Tensor:
    """Return the rounded embedding in the shape and dtype of ``weight``; see `embedding_codes`."""
    codes, scales = embedding_codes(weight, choice)
    return (
        (codes.unflatten(-1, (-1, EMBEDDING_GROUP)) * scales.float()[..., None])
        .view_as(weight)
        .to(weight)
    )
