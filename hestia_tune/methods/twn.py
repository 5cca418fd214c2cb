"""Ternary Weight Networks (arXiv 1605.04711): a threshold, and the mean of what exceeds it.

With delta the option and t = delta·mean|w| of a group, Q(w) = s·sign(w) where |w| >= t, else 0, and
s the mean of those |w|: both of the latent weights as they are, detached. dQ/dw = 1 for every w.
A hard weight has one magnitude besides 0, which is its s, so quantizing it again changes nothing.
With a delta of 0 it changes the weight, because zeros then count in s.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from hestia_tune.config import require_number
from hestia_tune.methods.groups import SCALE_EPS, round_scale
from hestia_tune.methods.straight_through import StraightThroughMethod


@dataclass(frozen=True, kw_only=True)
class TWNMethod(StraightThroughMethod):
    """Codes {-1, 0, 1} times the mean of the |w| above a threshold.

    Args:
        group_size: as in `GroupMethod`.
        delta: the threshold in units of mean|w|, in [0, 1]; 0.7 in its paper, 0.75 in later code.
    """

    name: ClassVar[str] = "twn"
    delta: float = 0.75

    def __post_init__(self):
        super().__post_init__()
        require_number("delta", self.delta, 0, 1, "0.7 in the paper of TWN, 0.75 in later code")

    def scale_and_code(self, w, parameters, total, is_final):
        def mean(kept: torch.Tensor) -> torch.Tensor:
            sums = [torch.where(kept, w.abs(), 0.0).sum(-1, keepdim=True, dtype=torch.float64)]
            sums.append(kept.sum(-1, keepdim=True, dtype=torch.float64))
            if total is not None:
                sums = total(torch.stack(sums)).unbind()
            return sums[0] / sums[1].clamp(min=1.0)

        threshold = (self.delta * mean(torch.ones_like(w, dtype=torch.bool))).to(w.dtype)
        # Not below: NaN stays in the mean.
        kept = ~(w.abs() < threshold)
        scale = round_scale(mean(kept).clamp(min=SCALE_EPS), self.levels).to(w.dtype)
        return scale, torch.where(kept, torch.sign(w), torch.zeros_like(w))
