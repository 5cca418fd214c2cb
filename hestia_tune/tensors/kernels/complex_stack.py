"""A complex weight as a ternary one, so that every kernel can multiply by it.

The real and imaginary parts of U and W (`hestia_tune.methods.fairy2i`) are ternary in every stage.
Stacked they are a matrix (4n, T·m), T stages side by side, each with groups of its own, and with
x = (x1, x2), each repeated T times, two rows of one product give all that is needed:

    y1 = Re U·x1 - Im U·x2 + Re W·x1 + Im W·x2
    y2 = Im U·x1 + Re U·x2 + Im W·x1 - Re W·x2

Codes and scales stay exact. The matrix has T ternary weights for a real one: at T = 2 a kernel
takes the memory and, by its two rows, some four times the time that a ternary weight takes.
"""

import torch

from hestia_tune.tensors.fairy2i_tensor import Fairy2iTensor
from hestia_tune.tensors.kernels import Kernel
from hestia_tune.tensors.ternary_tensor import TernaryTensor


def stacked(weight: Fairy2iTensor) -> TernaryTensor:
    """Re U, Im U, Re W and Im W, one above the other: (4n, num_stages · m)."""
    codes, scale = weight.codes(), weight.scale  # (T, 2, n, m), (T, 2, 2, n or 1, groups)
    parts = [(codes == i).to(torch.int8) - (codes == i + 2).to(torch.int8) for i in (0, 1)]
    digits = torch.stack(parts, 2)  # (T, U or W, Re or Im, n, m)
    rows = 4 * codes.shape[2]
    scale = scale.expand(-1, -1, -1, codes.shape[2], -1)
    digits, scale = (part.permute(1, 2, 3, 0, 4).reshape(rows, -1) for part in (digits, scale))
    return TernaryTensor.from_codes(digits, scale, dtype=weight.dtype)


class ComplexStack(Kernel):
    """A kernel of the stacked matrix of a `Fairy2iTensor`; see the module.

    Args:
        weight: the complex weight.
        make: makes the kernel of the stack.
    """

    def __init__(self, weight, make):
        super().__init__(weight)
        stack = stacked(weight)
        self._inner, self._stages = make(stack), weight.qdata.shape[0]
        self.name, self.max_rows = self._inner.name, self._inner.max_rows
        self.num_bytes = self._inner.num_bytes
        self._inner.watch(weight)  # and no longer keeps the stack, unless its library reads it

    def product(self, x):
        rows = len(x)
        halves = x.view(2 * rows, -1).repeat(1, self._stages)  # (2·rows, T·m)
        product = self._inner.product(halves).to(x.dtype).view(rows, 2, 4, -1)
        (re_u1, im_u1, re_w1, im_w1), (re_u2, im_u2, re_w2, im_w2) = product.permute(1, 2, 0, 3)
        top = (re_u1 - im_u2) + (re_w1 + im_w2)
        bottom = (im_u1 + re_u2) + (im_w1 - re_w2)
        return torch.cat([top, bottom], 1)  # (rows, 2n)
