"""Dual learnable ternarization: Q(w) = a·T + c, with a learned step a and a learned offset c.

T is LSQ's code clip(round(w/a), -1, 1). The offset c of a group starts at 0, and dQ/dc = 1, divided
by nothing. The other slopes and the starts of a are those of `LearnedStepMethod`. This is the DLT
in the code of Tencent's Sherry and AngelSlim. The slopes are Sherry's, which divides the gradient
of a step by the square root of the size of the whole matrix, and not of the group.

The DLT of TernaryLLM (arXiv 2406.07177), the paper that introduced the name, differs. There a
threshold that follows from mean|w| chooses the codes, as in TWN, and a only multiplies them. The
start "absmax" is not from that paper.

The levels c - a, c, c + a are rounded to bfloat16, so that a dense hard model is exact. They are no
products of a scale and a code, so that there is no packed format. A hard model with an offset
changes if it is prepared again: the offset starts at 0, and the codes are chosen without it.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from hestia_tune.methods.groups import round_to_bfloat16
from hestia_tune.methods.straight_through import LearnedStepMethod


@dataclass(frozen=True, kw_only=True)
class DLTMethod(LearnedStepMethod):
    """Codes {-1, 0, 1} times a learned step, plus a learned offset (``offset``, shaped as
    ``step``); arguments as `LearnedStepMethod`'s."""

    name: ClassVar[str] = "dlt"
    packed_formats: ClassVar[tuple[str, ...]] = ()
    file_formats: ClassVar[tuple[str, ...]] = ("huggingface",)
    trained_parameters = "step", "offset"

    def initial_parameters(self, weight):
        (step,) = super().initial_parameters(weight)
        return step, torch.zeros_like(step)

    def values(self, scale, code, parameters):
        levels = parameters[1].unsqueeze(-1) + scale * code
        return round_to_bfloat16(levels.to(torch.float32)).to(scale.dtype)

    def slopes(self, w, tau, parameters, total):
        return *super().slopes(w, tau, parameters, total), torch.ones_like(w)
