"""Quantize by Tequila (arXiv 2509.23809): AbsMean, with a bias made of the dead weights.

A dead weight is a weight of code 0. The product with its code gives it no signal of its own. In
Tequila, a dead weight is also part of a bias of its row:

    y = x·Q(W)^T + b    b = epsilon·(sum of the w with code 0, of a row)

The bias does not depend on x. So the gradient of a dead weight is g + epsilon·(sum of dL/dy over
the tokens), and the gradient of every other weight is g. The bias is rounded to bfloat16 before it
is used. In the hard model, every linear has this bias.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from hestia_tune.errors import require_number
from hestia_tune.methods.groups import round_to_bfloat16
from hestia_tune.methods.straight_through import AbsMeanMethod


@dataclass(frozen=True, kw_only=True)
class TequilaMethod(AbsMeanMethod):
    """Codes {-1, 0, 1} times mean|w| of the group, and a bias of the weights with code 0.

    Args:
        group_size: See `GroupMethod`.
        epsilon: The factor of the bias, in [0, 1]. The paper uses 1e-3.

    Raises:
        InputError: If an option is wrong.
    """

    name: ClassVar[str] = "tequila"
    extra_names: ClassVar[tuple[str, ...]] = ("bias",)
    epsilon: float = 1e-3

    def __post_init__(self):
        super().__post_init__()
        require_number("epsilon", self.epsilon, 0, 1, "1e-3 as published")

    def extras(self, weight, pressure, total=None):
        """Return the bias (rows,), to be added to every output. It is 0 at pressure 0."""
        w, _, code = self.quantized(weight, (), total)
        dead = torch.where(code == 0, w, 0.0).view_as(weight)  # (rows, in_features)
        bias = pressure * self.epsilon * dead.sum(-1, dtype=torch.float64)
        return (round_to_bfloat16(bias.to(torch.float32)).to(w.dtype),)

    def extras_vjp(self, grads, weight, pressure, total=None):
        w, _, code = self.quantized(weight, (), total)
        dead = (code == 0).to(w.dtype).view_as(weight)
        slope = (pressure * self.epsilon).to(w.dtype)
        (grad,) = grads
        return (slope * grad.to(w.dtype).unsqueeze(-1) * dead).to(weight.dtype)
