"""Define the methods with a learned step per group: LSQ, SEQ and DLT.

The effective weight is (1 - p)·W + p·Q(W), with the pressure p. The methods read no temperature.
Q/a is a function of z = w/a, where a is the step:

    dQ/dw = 1[|z| <= reach]
    dQ/da = (Q/a - z where |z| <= reach, else ±outside) / norm

The norm is the square root of the number of weights that share a step. Steps are rounded to
bfloat16 before anything is computed from them, codes included. The rounding passes gradients
unchanged.
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
    round_to_bfloat16,
    scale_of_hard,
)
from hestia_tune.methods.straight_through import Start


@dataclass(frozen=True, kw_only=True)
class LearnedStepMethod(GroupMethod):
    """The base of the methods with a learned step.

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

    Reach and outside are 1. The paper of LSQ divides the gradient of a step by sqrt(N·Q_P), with
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

        ternary   Q = a·round(1.5·z)/1.5                 levels {-2/3, 0, 2/3}·a, threshold a/3
        2 bits    Q = a·(round(2·z + 0.5) - 0.5)/2       levels {-3/4, -1/4, 1/4, 3/4}·a

    Reach is 0.99. Outside is 1 for ternary, as published, although the outer level is 2/3, and 3/4
    for two bits. The ternary forward equals the forward of LSQ with the step 2a/3. The gradients
    differ. ParetoQ's code has one step per row. The start "absmax" is ParetoQ's.

    Args:
        bits: "ternary" or 2.
        group_size: See `GroupMethod`; not "tensor".
        start: See `LearnedStepMethod`.
    """

    name: ClassVar[str] = "seq"
    bits: Literal["ternary", 2] = "ternary"

    @property
    def levels(self) -> int:
        """Return how many codes there are."""
        return 4 if self.bits == 2 else 3

    @property
    def slope_rule(self) -> tuple[float, float, float]:
        """Return the scale divided by the step, reach and outside; see the module docstring."""
        # Codes of four levels are ±1 and ±3, in units of a/4.
        return (1 / 4, 0.99, 3 / 4) if self.bits == 2 else (2 / 3, 0.99, 1.0)


@dataclass(frozen=True, kw_only=True)
class DLTMethod(LearnedStepMethod):
    """Dual learnable ternarization: Q(w) = a·T + c, with a learned step a and a learned offset c.

    T is LSQ's code clip(round(w/a), -1, 1). The offset of a group starts at 0, and dQ/dc = 1,
    divided by nothing. Reach and outside are 1. This is the DLT in the code of Tencent's Sherry and
    AngelSlim. Their code divides the gradient of a step by the square root of the size of the whole
    matrix. TernaryLLM (arXiv 2406.07177) introduced the name, but its DLT differs: as in TWN, a
    threshold that follows from mean|w| chooses the codes, and a only multiplies them. The start
    "absmax" is not from that paper.

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
