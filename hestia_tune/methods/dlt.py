"""Dual learnable ternarization (TernaryLLM, arXiv 2406.07177): Q(w) = a·T + c, a and c learned.

T is LSQ's code clip(round(w/a), -1, 1), a group's offset c starts at 0, and dQ/dc = 1; the other
slopes are LSQ's. The levels c - a, c, c + a are rounded to bfloat16, so that a dense hard model is
exact, but they are no products of a scale and a code: there is no packed format.
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
