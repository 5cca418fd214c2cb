"""Relax weights with an even number of codes: 1 bit, {-1, 1}, or 2 bits, {-1.5, -0.5, 0.5, 1.5}.

The relaxation is the one of Eqs. 5 and 6 with another codebook. With z = w/s and levels q,

    pi_q  proportional to exp(-(z - q)^2/tau)    H = s·E[q]    dH/dw = (2/tau)·Var[q]

For {-1, 1} this gives H = s·tanh(2z/tau) with s = mean|w|. This s also leaves the least squared
error. All weights of a hard group have one magnitude, and s is this magnitude.

For four levels, s is the scale with the least squared error. The paper's rebuttal reports 2 bits,
but does not say which grid it used. Var[q] is the sum over pairs of levels of pi·pi'·(q - q')^2.
Its terms are positive, so it keeps its digits where one level is certain
(`hestia_tune.methods.ternary`).
"""

from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from typing import ClassVar, Literal

import torch

from hestia_tune.methods.groups import GroupMethod, least_squares_scale, mean_scale, nearest_code
from hestia_tune.methods.ternary import MIN_TAU

_CODES = {"binary": (-1, 1), "int2": (-3, -1, 1, 3)}


@dataclass(frozen=True, kw_only=True)
class EvenMethod(GroupMethod):
    """Two or four levels, relaxed.

    Args:
        group_size: See `GroupMethod`; not "tensor" with "int2".
        codebook: "binary" or "int2".

    Raises:
        InputError: If an option is wrong.
    """

    name: ClassVar[str] = "even"
    codebook: Literal["binary", "int2"] = "binary"

    def __post_init__(self):
        super().__post_init__()
        if self.codebook == "int2":
            self.require_rows("the codebook int2")

    @property
    def levels(self) -> int:
        """Return how many codes there are."""
        return len(_CODES[self.codebook])

    def scale_and_code(self, w, parameters, total, is_final):
        if self.codebook == "binary":
            scale = mean_scale(w, total, keep_hard=is_final, levels=2)
        else:
            scale = least_squares_scale(w, 4)
        return scale, nearest_code(w, scale, self.levels)

    def _softmax(self, w, scale, tau):
        """Return the levels q, their weights pi, (rows, groups, group) each, and s.

        The product s·q equals scale·code.
        """
        unit = 1 if self.codebook == "binary" else 2  # A code is this factor times its level.
        levels = [code / unit for code in _CODES[self.codebook]]
        z = w / (unit * scale)
        logits = [(2.0 * z - q) * q / tau for q in levels]
        top = reduce(torch.maximum, logits)
        terms = [torch.exp(logit - top) for logit in logits]
        total = sum(terms)
        return levels, [term / total for term in terms], unit * scale

    def relaxed(self, w, tau, parameters, total):
        scale, code = self.scale_and_code(w, parameters, total, False)
        levels, pi, unit = self._softmax(w, scale, tau.clamp(min=MIN_TAU))
        soft = unit * sum(q * p for q, p in zip(levels, pi, strict=True))
        return torch.where(tau > 0, soft, self.values(scale, code, parameters))

    def slopes(self, w, tau, parameters, total):
        scale, _ = self.scale_and_code(w, parameters, total, False)
        safe_tau = tau.clamp(min=MIN_TAU)
        levels, pi, _ = self._softmax(w, scale, safe_tau)
        pairs = combinations(zip(levels, pi, strict=True), 2)
        variance = sum((q - r) ** 2 * p * s for (q, p), (r, s) in pairs)
        return (torch.where(tau > 0, (2.0 / safe_tau) * variance, torch.ones_like(w)),)
