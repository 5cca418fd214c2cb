"""Quantize to complex weights in {1, i, -1, -i} by Fairy2i, hard and relaxed (Sec. 5.3).

A real weight (2n, 2m) acts on x = (x1, x2) as y = U·x + W·conj(x) acts on x1 + i·x2, with one pair
of complex (n, m) matrices:

    A = [[A11, A12], [A21, A22]]
    U = 1/2·[(A11 + A22) + i(A21 - A12)]        A11 = Re U + Re W    A12 = Im W - Im U
    W = 1/2·[(A11 - A22) + i(A12 + A21)]        A21 = Im U + Im W    A22 = Re U - Re W

Rows i and n + i, and columns j and m + j, share an entry of U and W. The map is linear, lossless
and, up to the factor 2, orthogonal: the adjoint of `merge` is 2·`split`, and the adjoint of `split`
is `merge`/2. So a gradient travels through merge(f(split(A))) as merge(f'(split(gradient))).
Bfloat16 has no complex type, so U and W travel stacked, as their real and imaginary parts.

One stage replaces an entry z by the axis that is nearest in angle, times one of two scales. The
scale s_re is the mean of |Re z| over the entries whose axis is real, and s_im likewise. Stage t
quantizes the rest of stage t-1, R_t = R_{t-1} - Q(R_{t-1}). The weight is the sum of the stages: T
bits per real number.

The relaxation is a softmax over the axes with logits -delta^2/tau, where delta is the wrapped angle
to each axis. Folding z by its symmetries leaves one angle phi in [0, pi/4] to the nearest axis. The
other axes are at pi/2 - phi, pi/2 + phi and pi - phi. With k = pi/tau and g = pi/4 - phi, relative
to the nearest axis,

    eb = exp(-k·g)    ec = exp(-k·(pi/2 - g))    ed = exp(-k·(pi/2 + 2g)) = eb^2·exp(-k·pi/2)
    near = (1 - ed)/D      far = (eb - ec)/D     D = 1 + eb + ec + ed

are the components along the nearest axis and along the other one. No exponent is positive, so the
components are stable for every tau > 0. Their slopes in phi, with all cancellation removed, are

    near' = -k·(eb - ec + ed·(eb + 3·ec + 4))/D^2
    far'  =  k·(eb·(1 - ed) + ec·(1 + 3·ed) + 4·eb·ec)/D^2

The angle enters as g = atan((hi - lo)/(hi + lo)), where hi and lo are the larger and the smaller of
|Re z| and |Im z|. At a boundary g is exactly 0, so ties stay ties at every temperature.

Stages compose by putting the relaxation H in the place of Q, in the residual too:
R_t = R_{t-1} - H(R_{t-1}; tau). The sum is then smooth wherever one stage is smooth, and tends to
the hard sum for tau -> 0. The residual of the hard code would jump at every boundary, at every
temperature. Scales are detached, and the Jacobians chain. Let J_t be the Jacobian of stage t, and G
the gradient of the sum. Then a_t = a_{t+1} + J_t^T·(G - a_{t+1}) with a_{T+1} = 0, and a_1 is the
gradient of z.

The method handles special cases this way:

    boundaries   An axis owns its clockwise boundary, [-pi/4, pi/4) for 1, as in the original
                 Fairy2i. So both axes get equally many ties, which are frequent in weights of few
                 bits. |Re z| and |Im z| are compared, with no rounding.
    zero         Zero has angle 0, and so code 1. It counts in s_re, with |Re| 0.
    empty sets   An empty set of entries has the smallest scale, 1e-8.
    the kink     At the kink of the wrapped angle to the opposite axis, the slope is the mean of
                 both sides.
    modulus 0    The derivative of an angle is 1/|z|. It is exact down to 2^-20 of the larger
                 scale. From there it falls linearly to 0, so that gradients are finite.
    not finite   One NaN or infinity makes all entries that share its scales NaN.

Scales are float64 sums rounded to bfloat16, like the ternary method's scales. Sums of scales need
not be bfloat16 numbers. So stages are added in order in float32, `merge` adds U and W, and the
result is rounded once to the weight's dtype. `dequantize_codes` does the same, to the last bit.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hestia_tune.errors import InputError
from hestia_tune.methods.groups import SCALE_EPS, round_to_bfloat16
from hestia_tune.methods.hestia import MIN_TAU
from hestia_tune.methods.method import (
    Method,
    SumOverRanks,
    check_count,
    compute_dtype,
    require_matrix,
)

Granularity = int | str
Complex = tuple[Tensor, Tensor]

MAX_STAGES = 4
# The smallest modulus, in scales, at which the derivative of the angle is exact.
_MIN_MODULUS = 2.0**-20


def add(a: Complex, b: Complex) -> Complex:
    """Return a + b."""
    return a[0] + b[0], a[1] + b[1]


def subtract(a: Complex, b: Complex) -> Complex:
    """Return a - b."""
    return a[0] - b[0], a[1] - b[1]


def split(weight: Tensor) -> Complex:
    """Return the widely-linear pair of a real matrix.

    Args:
        weight: The matrix (2n, 2m), in any floating-point dtype, with any strides.

    Returns:
        The real and the imaginary parts, each (2, n, m) in the dtype of ``weight``: first U,
        then W.

    Raises:
        InputError: If ``weight`` is not a matrix. (`Fairy2iMethod.check_layer` refuses odd sizes.)
    """
    require_matrix(weight)
    top, bottom = weight.chunk(2)
    (a11, a12), (a21, a22) = top.chunk(2, 1), bottom.chunk(2, 1)
    # A compiler would write the result of `torch.stack` to memory, but not a broadcast sign.
    sign = 1 - 2 * torch.arange(2, dtype=weight.dtype, device=weight.device).view(2, 1, 1)
    return 0.5 * (a11 + sign * a22), 0.5 * (a21 - sign * a12)


def merge(re: Tensor, im: Tensor) -> Tensor:
    """Return the real matrix (2n, 2m) of a pair, which undoes `split`.

    Each entry is one sum of two numbers. ``re`` and ``im`` are (2, n, m): first U, then W.
    """
    left = torch.cat([re[0] + re[1], im[1] + im[0]])
    right = torch.cat([im[1] - im[0], re[0] - re[1]])
    return torch.cat([left, right], dim=1)


def _nearest(z: Complex) -> tuple[Tensor, Tensor, Tensor]:
    """Return whether the nearest axis is real, and the larger and smaller of |Re z| and |Im z|."""
    abs_re, abs_im = z[0].abs(), z[1].abs()
    tie_is_real = (z[0] > 0) != (z[1] >= 0)  # Zero too is real.
    real = (abs_re > abs_im) | ((abs_re == abs_im) & tie_is_real)
    return real, torch.maximum(abs_re, abs_im), torch.minimum(abs_re, abs_im)


def _scales(z: Complex, over_rows: bool, total: SumOverRanks | None = None) -> Complex:
    """Return s_re and s_im, (2, n or 1, groups, 1), rounded to bfloat16.

    Args:
        z: The residual (2, n, groups, group).
        over_rows: Whether all rows share one scale.
        total: Sums a tensor over the ranks, if other ranks hold more rows of the weight.
    """
    real, hi, _ = _nearest(z)
    parts = [
        torch.where(members, value, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
        for value in (hi, torch.ones_like(hi))
        for members in (real, ~real)
    ]
    sums = torch.stack(parts)  # (totals and counts of both axes, 2, n, groups, 1)
    if over_rows:
        sums = sums.sum(2, keepdim=True)
        sums = sums if total is None else total(sums)
    means = sums[0] / sums[2].clamp(min=1.0), sums[1] / sums[3].clamp(min=1.0)
    poison = (means[0] + means[1]) * 0.0  # NaN on both axes if one is not finite
    s_re, s_im = (
        round_to_bfloat16((mean.clamp(min=SCALE_EPS) + poison).to(torch.float32)).to(hi.dtype)
        for mean in means
    )
    return s_re, s_im


def _digits(z: Complex) -> Complex:
    """Return the real and the imaginary part of the hard code, in {-1, 0, 1}."""
    real, hi, _ = _nearest(z)
    one = torch.ones_like(hi)
    re, im = (torch.where(part < 0, -one, one) for part in z)
    return torch.where(real, re, 0.0), torch.where(real, 0.0, im)


def _signs(z: Complex, hi: Tensor) -> Complex:
    """Return the signs of the parts. Zero has angle 0, so its real part counts as positive."""
    return torch.where(hi == 0, torch.ones_like(hi), torch.sign(z[0])), torch.sign(z[1])


def _softmax_terms(hi: Tensor, lo: Tensor, tau: Tensor):
    """Return k, eb, ec, ed and 1/D of the module docstring."""
    gap = torch.atan(torch.where(hi == 0, torch.ones_like(hi), (hi - lo) / (hi + lo)))
    k = math.pi / tau
    eb = torch.exp(-k * gap)
    ec = torch.exp(-k * (math.pi / 2 - gap))
    ed = eb * eb * torch.exp(-k * (math.pi / 2))
    return k, eb, ec, ed, 1.0 / (1.0 + eb + ec + ed)


def _relax(z: Complex, tau: Tensor) -> Complex:
    """Return the relaxed code, pi_0 - pi_2 and pi_1 - pi_3."""
    real, hi, lo = _nearest(z)
    _, eb, ec, ed, inv_d = _softmax_terms(hi, lo, tau)
    near, far = (1.0 - ed) * inv_d, (eb - ec) * inv_d
    sign_re, sign_im = _signs(z, hi)
    return sign_re * torch.where(real, near, far), sign_im * torch.where(real, far, near)


def _relax_vjp(grad: Complex, z: Complex, scales: Complex, tau: Tensor) -> Complex:
    """Return J^T·grad of one relaxed stage.

    The Jacobian J has rank 1 per entry, along the derivative of the angle.
    """
    grad_re, grad_im = grad[0] * scales[0], grad[1] * scales[1]
    real, hi, lo = _nearest(z)
    k, eb, ec, ed, inv_d = _softmax_terms(hi, lo, tau)
    near_slope = -(eb - ec + ed * (eb + 3.0 * ec + 4.0))
    far_slope = eb * (1.0 - ed) + ec * (1.0 + 3.0 * ed) + 4.0 * eb * ec
    grad_near = torch.where(real, grad_re, grad_im)
    grad_far = torch.where(real, grad_im, grad_re)
    sign_re, sign_im = _signs(z, hi)
    slope = sign_re * sign_im * near_slope * grad_near + far_slope * grad_far
    floor = _MIN_MODULUS * torch.maximum(*scales)
    slope = k * (inv_d * inv_d) * slope / torch.maximum(hi * hi + lo * lo, floor * floor)
    # The angle to the nearest axis grows with |smaller part|, so the larger part gives the sign.
    slope = slope * torch.where(real, sign_re, -sign_im)
    return -z[1] * slope, z[0] * slope


def _merged(stages: Iterable[Complex]) -> Tensor:
    """Return the real matrix of the sum of the stages, added in order."""
    re, im = functools.reduce(add, stages)
    return merge(re.flatten(2), im.flatten(2))


@dataclass(frozen=True, kw_only=True)
class Fairy2iMethod(Method):
    """Fairy2i (arXiv 2512.02901): complex codes {1, i, -1, -i} in residual stages.

    Both dimensions of the weight are even.

    A hard weight changes if it is quantized again: it does not determine its codes.

    Args:
        num_stages: Residual stages, 1 to 4, each of one bit per real weight. The paper uses 2.
        granularity: "tensor" for one pair of scales for U and one for W, as in the paper; or the
            number of complex columns, a divisor of in_features / 2, that share a pair per row.

    Raises:
        InputTypeError: If an option has a wrong type.
        InputError: If an option has a wrong value.
    """

    name: ClassVar[str] = "fairy2i"
    component: ClassVar[str] = "Fairy2iQATQuantizer"
    is_one_operator: ClassVar[bool] = True
    codes_follow_from_hard: ClassVar[bool] = False
    pairs_rows: ClassVar[bool] = True
    code_values = (1, 1j, -1, -1j)
    num_stages: int = 2
    granularity: Granularity = "tensor"

    def __post_init__(self):
        rule = f"num_stages must be an int from 1 to {MAX_STAGES}"
        check_count(rule, self.num_stages, most=MAX_STAGES)
        rule = 'granularity must be "tensor" or a positive int, the complex columns of a scale'
        check_count(rule, self.granularity, ("tensor",))

    @property
    def scales_span_rows(self) -> bool:
        """Whether a scale covers several rows."""
        return self.granularity == "tensor"

    def check_layer(self, in_features: int, out_features: int, name: str) -> None:
        if in_features % 2 or out_features % 2:
            raise InputError(
                f"a complex weight needs even in_features and out_features; got {in_features} and "
                f"{out_features} of {name}; leave the layer out with `exclude`, or set "
                "`skip_incompatible: true`"
            )
        columns = in_features // 2
        if isinstance(self.granularity, int) and columns % self.granularity:
            raise InputError(
                f"granularity {self.granularity} does not divide the {columns} complex columns "
                f'(in_features {in_features} / 2) of {name}; use one that does, or "tensor"'
            )

    def _split(self, weight: Tensor) -> Complex:
        """Return the parts of U and W, (2, n, groups, group), in the dtype of formulas."""
        self.check_layer(weight.shape[-1], weight.shape[0], "the weight")
        re, im = split(weight.to(compute_dtype(weight)))
        group = self.granularity if isinstance(self.granularity, int) else re.shape[-1]
        return re.unflatten(-1, (-1, group)), im.unflatten(-1, (-1, group))

    def _stages(
        self, z: Complex, quantize: Callable[[Complex], Complex], total: SumOverRanks | None = None
    ) -> list[tuple[Complex, Complex, Complex]]:
        """Return residual, scales and output of every stage. ``quantize`` makes the codes."""
        stages = []
        for _ in range(self.num_stages):
            scales, code = _scales(z, self.scales_span_rows, total), quantize(z)
            output = scales[0] * code[0], scales[1] * code[1]
            stages.append((z, scales, output))
            z = subtract(z, output)
        return stages

    def effective_weight(self, weight, tau, pressure, parameters=(), total=None):
        z = self._split(weight)
        tau, pressure = tau.to(z[0].dtype), pressure.to(z[0].dtype)
        safe_tau = tau.clamp(min=MIN_TAU)

        def quantize(z):
            soft, hard = _relax(z, safe_tau), _digits(z)
            return torch.where(tau > 0, soft[0], hard[0]), torch.where(tau > 0, soft[1], hard[1])

        stages = self._stages(z, quantize, total)
        quantized = _merged(output for *_, output in stages)
        # The contiguous tensor comes first, so that the sum is contiguous for every weight.
        effective = pressure * quantized + (1.0 - pressure) * weight.to(quantized.dtype)
        return effective.to(weight.dtype)

    def vjp(self, grad, weight, tau, pressure, parameters=(), total=None):
        z = self._split(weight)
        tau, pressure = tau.to(z[0].dtype), pressure.to(z[0].dtype)
        safe_tau = tau.clamp(min=MIN_TAU)
        grad = grad.to(z[0].dtype)
        grad_re, grad_im = split(grad)
        grad_total = grad_re.view_as(z[0]), grad_im.view_as(z[0])
        stages = self._stages(z, lambda z: _relax(z, safe_tau), total)
        grad_z = torch.zeros_like(z[0]), torch.zeros_like(z[1])
        for residual, scales, _ in reversed(stages):
            rest = subtract(grad_total, grad_z)
            grad_z = add(grad_z, _relax_vjp(rest, residual, scales, safe_tau))
        pulled_back = pressure * _merged([grad_z]) + (1.0 - pressure) * grad
        return (torch.where(tau > 0, pulled_back, grad).to(weight.dtype),)

    def hard(self, weight, parameters=(), total=None):
        stages = self._stages(self._split(weight.detach()), _digits, total)
        return _merged(output for *_, output in stages).to(weight.dtype)

    def codes(self, weight, parameters=()):
        """Return the powers of i and the scales of every stage; `dequantize_codes` returns `hard`.

        Returns:
            codes: int8 in {0, 1, 2, 3}, (num_stages, 2, out_features / 2, in_features / 2). The
                second axis is U, W.
            scales: bfloat16, (num_stages, 2, 2, 1, 1) for "tensor", (num_stages, 2, 2,
                out_features / 2, groups) for an int. The second axis is U, W, the third s_re, s_im.
        """
        stages = self._stages(self._split(weight.detach()), _digits)
        digits = [_digits(residual) for residual, *_ in stages]
        codes = [torch.where(im == 0, 1 - re, 2 - im).flatten(2) for re, im in digits]
        scales = torch.stack([torch.stack(pair, 1) for _, pair, _ in stages]).squeeze(-1)
        return torch.stack(codes).to(torch.int8), scales.to(torch.bfloat16)


def dequantize_codes(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the hard weight (out_features, in_features) of `Fairy2iMethod.codes`.

    It equals `Fairy2iMethod.hard` to the last bit. ``dtype`` is the dtype of the result, and of the
    weight that was quantized.
    """
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    scales = scales.to(compute).unsqueeze(-1)
    codes = codes.unflatten(-1, (scales.shape[-2], -1))
    re = scales[:, :, 0] * ((codes == 0).to(compute) - (codes == 2).to(compute))
    im = scales[:, :, 1] * ((codes == 1).to(compute) - (codes == 3).to(compute))
    return _merged(zip(re, im, strict=True)).to(dtype)
