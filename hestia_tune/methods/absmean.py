"""AbsMean with a straight-through gradient: BitNet b1.58, and the paper's "w/o" row.

Q(w) = gamma·clip(round(w/gamma), -1, 1), gamma = mean|w| of the latent weights as they are (Eqs. 1,
2), dQ/dw = 1. The same as the ternary method at temperature 0. With the group size "tensor" it is
the rule of TriLM (Spectra, arXiv 2407.12327).
"""

from dataclasses import dataclass
from typing import ClassVar

from hestia_tune.methods.groups import mean_scale, nearest_code
from hestia_tune.methods.straight_through import StraightThroughMethod


@dataclass(frozen=True, kw_only=True)
class AbsMeanMethod(StraightThroughMethod):
    """Codes {-1, 0, 1} times mean|w| of the group; ``group_size`` as in `GroupMethod`."""

    name: ClassVar[str] = "absmean"

    def scale_and_code(self, w, parameters, total, is_final):
        scale = mean_scale(w, total, keep_hard=is_final)
        return scale, nearest_code(w, scale)
