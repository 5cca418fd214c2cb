"""Fairy2i: complex weights in {1, i, -1, -i}, in residual stages, hard and relaxed (Sec. 4.3).

A real weight (2n, 2m) acts on x = (x1, x2) as y = U·x + W·conj(x) acts on x1 + i·x2, with one pair
of complex (n, m) matrices:

    A = [[A11, A12], [A21, A22]]
    U = 1/2·[(A11 + A22) + i(A21 - A12)]        A11 = Re U + Re W    A12 = Im W - Im U
    W = 1/2·[(A11 - A22) + i(A12 + A21)]        A21 = Im U + Im W    A22 = Re U - Re W

Rows i and n + i, and columns j and m + j, share an entry of U and W. The map is linear, lossless
and, up to the factor 2, orthogonal: the adjoint of `merge` is 2·`split`, that of `split` is
`merge`/2. So a gradient travels through merge(f(split(A))) as merge(f'(split(gradient))). U and W
travel stacked, as their real and imaginary parts: bfloat16 has no complex type.

One stage replaces an entry z by the nearest axis in angle, times one of two scales: s_re, the mean
of |Re z| over the entries whose axis is real, and s_im likewise. Stage t quantizes what stage t-1
left, R_t = R_{t-1} - Q(R_{t-1}), and the weight is the sum of the stages: T bits per real number.

The relaxation is a softmax over the axes with logits -delta^2/tau, delta the wrapped angle to
each. Folding z by its symmetries leaves one angle phi in [0, pi/4] to the nearest axis; the others
are at pi/2 - phi, pi/2 + phi and pi - phi. With k = pi/tau and g = pi/4 - phi, relative to the
nearest,

    eb = exp(-k·g)    ec = exp(-k·(pi/2 - g))    ed = exp(-k·(pi/2 + 2g)) = eb^2·exp(-k·pi/2)
    near = (1 - ed)/D      far = (eb - ec)/D     D = 1 + eb + ec + ed

are the components along the nearest axis and along the other one: no exponent is positive, so they
are stable for every tau > 0. Their slopes in phi, with all cancellation removed,

    near' = -k·(eb - ec + ed·(eb + 3·ec + 4))/D^2
    far'  =  k·(eb·(1 - ed) + ec·(1 + 3·ed) + 4·eb·ec)/D^2

The angle enters as g = atan((hi - lo)/(hi + lo)), hi and lo the larger and smaller of |Re z| and
|Im z|: exactly 0 at a boundary, so ties stay ties however cold it is.

Stages compose by putting the relaxation H in the place of Q, in the residual too:
R_t = R_{t-1} - H(R_{t-1}; tau). The sum is then smooth wherever one stage is (the residual of the
hard code would jump at every boundary, at every temperature), and for tau -> 0 it is the hard one.
Scales are detached; the Jacobians chain, so with J_t that of stage t and G the gradient of the sum,
a_t = a_{t+1} + J_t^T·(G - a_{t+1}), a_{T+1} = 0, and a_1 is the gradient of z.

Decided once:

    boundaries   an axis owns its clockwise boundary, [-pi/4, pi/4) for 1, as in the original
                 Fairy2i: ties, frequent in weights stored in few bits, fall on both axes alike.
                 |Re z| and |Im z| are compared, with no rounding.
    zero         has angle 0: code 1. It counts, with |Re| 0, in s_re.
    empty sets   have the smallest scale, 1e-8.
    the kink     of the wrapped angle to the opposite axis: the slope is the mean of both sides.
    modulus 0    the derivative of an angle is 1/|z|: exact down to 2^-20 of the larger scale, from
                 there linearly down to 0, so that gradients are finite.
    not finite   one NaN or infinity makes all that shares its scales NaN.

Scales are float64 sums rounded to bfloat16, as the ternary method's. Sums of them need not be
bfloat16 numbers: stages are added in order in float32, `merge` adds U and W, and the result is
rounded once to the weight's dtype; `dequantize_codes` does the same, to the last bit.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from hestia_tune.errors import InputError
from hestia_tune.methods.base import Method, SumOverRanks, compute_dtype
from hestia_tune.methods.granularity import check_count
from hestia_tune.methods.groups import SCALE_EPS, round_to_bfloat16
from hestia_tune.methods.ternary import MIN_TAU

Granularity = int | str
Complex = tuple[torch.Tensor, torch.Tensor]

MAX_STAGES = 4
# The smallest modulus, in scales, at which the derivative of the angle is exact.
_MIN_MODULUS = 2.0**-20


def add(a: Complex, b: Complex) -> Complex:
    return a[0] + b[0], a[1] + b[1]


def subtract(a: Complex, b: Complex) -> Complex:
    return a[0] - b[0], a[1] - b[1]


def split(weight: torch.Tensor) -> Complex:
    """The widely-linear pair of a real matrix.

    Args:
        weight: (2n, 2m), any floating-point dtype, any strides.

    Returns:
        The real and the imaginary parts, each (2, n, m) in the dtype of ``weight``: first U,
        then W.

    Raises:
        InputError: if ``weight`` is not a matrix. (`Fairy2iMethod.check_layer` refuses odd ones.)
    """
    if weight.dim() != 2:
        raise InputError(
            f"weight must have the shape (out_features, in_features); got {tuple(weight.shape)}"
        )
    top, bottom = weight.chunk(2)
    (a11, a12), (a21, a22) = top.chunk(2, 1), bottom.chunk(2, 1)
    # A broadcast sign in place of `torch.stack`, which a compiler would write to memory.
    sign = 1 - 2 * torch.arange(2, dtype=weight.dtype, device=weight.device).view(2, 1, 1)
    return 0.5 * (a11 + sign * a22), 0.5 * (a21 - sign * a12)


def merge(re: torch.Tensor, im: torch.Tensor) -> torch.Tensor:
    """The real (2n, 2m) matrix of a pair, each entry one sum of two numbers; undoes `split`.

    Args:
        re, im: (2, n, m), first U, then W.
    """
    left = torch.cat([re[0] + re[1], im[1] + im[0]])
    right = torch.cat([im[1] - im[0], re[0] - re[1]])
    return torch.cat([left, right], dim=1)


def _nearest(z: Complex):
    """(whether the nearest axis is the real one, larger, smaller) of |Re z| and |Im z|."""
    abs_re, abs_im = z[0].abs(), z[1].abs()
    tie_is_real = (z[0] > 0) != (z[1] >= 0)  # also at zero
    real = (abs_re > abs_im) | ((abs_re == abs_im) & tie_is_real)
    return real, torch.maximum(abs_re, abs_im), torch.minimum(abs_re, abs_im)


def _scales(z: Complex, over_rows: bool, total: SumOverRanks | None = None) -> Complex:
    """(s_re, s_im) of (2, n, groups, group), bfloat16-rounded: (2, n or 1, groups, 1).

    Args:
        z: residual.
        over_rows: one scale for all rows.
        total: sums over other rows of the same weight, if these are not all.
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
    poison = (means[0] + means[1]) * 0.0  # not finite on one axis: NaN on both
    s_re, s_im = (
        round_to_bfloat16((mean.clamp(min=SCALE_EPS) + poison).to(torch.float32)).to(hi.dtype)
        for mean in means
    )
    return s_re, s_im


def _digits(z: Complex) -> Complex:
    """The hard code as its real and imaginary part, in {-1, 0, 1}."""
    real, hi, _ = _nearest(z)
    one = torch.ones_like(hi)
    signs = (torch.where(part < 0, -one, one) for part in z)
    return torch.where(real, next(signs), 0.0), torch.where(real, 0.0, next(signs))


def _signs(z: Complex, hi: torch.Tensor) -> Complex:
    """Signs of the parts; zero has angle 0, so its real part counts as positive."""
    return torch.where(hi == 0, torch.ones_like(hi), torch.sign(z[0])), torch.sign(z[1])


def _softmax_terms(hi: torch.Tensor, lo: torch.Tensor, tau: torch.Tensor):
    """(k, eb, ec, ed, 1/D) of the module docstring."""
    gap = torch.atan(torch.where(hi == 0, torch.ones_like(hi), (hi - lo) / (hi + lo)))
    k = math.pi / tau
    eb = torch.exp(-k * gap)
    ec = torch.exp(-k * (math.pi / 2 - gap))
    ed = eb * eb * torch.exp(-k * (math.pi / 2))
    return k, eb, ec, ed, 1.0 / (1.0 + eb + ec + ed)


def _relax(z: Complex, tau: torch.Tensor) -> Complex:
    """pi_0 - pi_2 and pi_1 - pi_3: the relaxed code."""
    real, hi, lo = _nearest(z)
    _, eb, ec, ed, inv_d = _softmax_terms(hi, lo, tau)
    near, far = (1.0 - ed) * inv_d, (eb - ec) * inv_d
    sign_re, sign_im = _signs(z, hi)
    return sign_re * torch.where(real, near, far), sign_im * torch.where(real, far, near)


def _relax_vjp(grad: Complex, z: Complex, scales: Complex, tau: torch.Tensor) -> Complex:
    """J^T·grad of one relaxed stage; J has rank 1 per entry, along the derivative of the angle."""
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
    # The angle to the nearest axis grows with |smaller part|: the sign is that of the larger one.
    slope = slope * torch.where(real, sign_re, -sign_im)
    return -z[1] * slope, z[0] * slope


def _sum_of_stages(stages: list[Complex]) -> Complex:
    """The stages added in order, (2, n, m)."""
    re, im = functools.reduce(add, stages)
    return re.flatten(2), im.flatten(2)


@dataclass(frozen=True, kw_only=True)
class Fairy2iMethod(Method):
    """Complex codes {1, i, -1, -i} in residual stages, for weights with even dimensions.

    A hard weight changes if it is quantized again: its codes do not follow from it.

    Args:
        num_stages: residual stages, 1 to 4, each one bit per real weight; the paper uses 2.
        granularity: "tensor" for one pair of scales for U and one for W (the paper's), or the
            number of complex columns, a divisor of in_features / 2, that share a pair per row.
    """

    name: ClassVar[str] = "fairy2i"
    is_one_operator: ClassVar[bool] = True
    codes_follow_from_hard: ClassVar[bool] = False
    pairs_rows: ClassVar[bool] = True
    packed_formats = ("fairy2i",)
    num_stages: int = 2
    granularity: Granularity = "tensor"

    def __post_init__(self):
        rule = f"num_stages must be an int from 1 to {MAX_STAGES}"
        check_count(rule, self.num_stages, most=MAX_STAGES)
        rule = 'granularity must be "tensor" or a positive int, the complex columns of a scale'
        check_count(rule, self.granularity, ("tensor",))

    @property
    def scales_span_rows(self) -> bool:
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

    def _split(self, weight: torch.Tensor) -> Complex:
        """Parts of U and W, (2, n, groups, group) in the compute dtype."""
        self.check_layer(weight.shape[-1], weight.shape[0], "the weight")
        re, im = split(weight.to(compute_dtype(weight)))
        group = re.shape[-1] if self.granularity == "tensor" else self.granularity
        return re.unflatten(-1, (-1, group)), im.unflatten(-1, (-1, group))

    def _stages(
        self, z: Complex, quantize: Callable[[Complex], Complex], total: SumOverRanks | None = None
    ):
        """(inputs, scales, outputs) of the stages; ``quantize`` maps a residual to its code."""
        inputs, scales, outputs = [z], [], []
        for _ in range(self.num_stages):
            scales.append(_scales(inputs[-1], self.granularity == "tensor", total))
            code = quantize(inputs[-1])
            outputs.append((scales[-1][0] * code[0], scales[-1][1] * code[1]))
            inputs.append(subtract(inputs[-1], outputs[-1]))
        return inputs, scales, outputs

    def effective_weight(self, weight, tau, pressure, parameters=(), total=None):
        z = self._split(weight)
        tau, pressure = tau.to(z[0].dtype), pressure.to(z[0].dtype)
        safe_tau = tau.clamp(min=MIN_TAU)

        def quantize(z):
            soft, hard = _relax(z, safe_tau), _digits(z)
            return torch.where(tau > 0, soft[0], hard[0]), torch.where(tau > 0, soft[1], hard[1])

        quantized = merge(*_sum_of_stages(self._stages(z, quantize, total)[2]))
        # The contiguous tensor stands first, so that the sum is contiguous whatever the weight is.
        effective = pressure * quantized + (1.0 - pressure) * weight.to(quantized.dtype)
        return effective.to(weight.dtype)

    def vjp(self, grad, weight, tau, pressure, parameters=(), total=None):
        z = self._split(weight)
        tau, pressure = tau.to(z[0].dtype), pressure.to(z[0].dtype)
        safe_tau = tau.clamp(min=MIN_TAU)
        grad = grad.to(z[0].dtype)
        grad_total = tuple(part.view_as(z[0]) for part in split(grad))
        inputs, scales, _ = self._stages(z, lambda z: _relax(z, safe_tau), total)
        grad_z = torch.zeros_like(z[0]), torch.zeros_like(z[1])
        for i in reversed(range(self.num_stages)):
            rest = subtract(grad_total, grad_z)
            grad_z = add(grad_z, _relax_vjp(rest, inputs[i], scales[i], safe_tau))
        pulled_back = pressure * merge(*_sum_of_stages([grad_z])) + (1.0 - pressure) * grad
        return (torch.where(tau > 0, pulled_back, grad).to(weight.dtype),)

    def hard(self, weight, parameters=(), total=None):
        outputs = self._stages(self._split(weight.detach()), _digits, total)[2]
        return merge(*_sum_of_stages(outputs)).to(weight.dtype)

    def codes(self, weight, parameters=()):
        """The powers of i and the scales of every stage; `dequantize_codes` gives `hard` back.

        Returns:
            codes: int8 in {0, 1, 2, 3}, (num_stages, 2, out_features / 2, in_features / 2); the
                second axis is U, W.
            scales: bfloat16, (num_stages, 2, 2, 1, 1) for "tensor", (num_stages, 2, 2,
                out_features / 2, groups) for an int; the second axis is U, W, the third s_re, s_im.
        """
        inputs, scales, _ = self._stages(self._split(weight.detach()), _digits)
        digits = [_digits(residual) for residual in inputs[:-1]]
        codes = [torch.where(im == 0, 1 - re, 2 - im).flatten(2) for re, im in digits]
        stacked = torch.stack([torch.stack(pair, 1) for pair in scales]).squeeze(-1)
        return torch.stack(codes).to(torch.int8), stacked.to(torch.bfloat16)


def dequantize_codes(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The hard weight of `Fairy2iMethod.codes`, equal to `hard` to the last bit.

    Args:
        codes, scales: as `Fairy2iMethod.codes` returns them.
        dtype: of the result, and of the weight that was quantized.

    Returns:
        (out_features, in_features).
    """
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    scales = scales.to(compute).unsqueeze(-1)
    codes = codes.unflatten(-1, (scales.shape[-2], -1))
    re = scales[:, :, 0] * ((codes == 0).to(compute) - (codes == 2).to(compute))
    im = scales[:, :, 1] * ((codes == 1).to(compute) - (codes == 3).to(compute))
    return merge(*_sum_of_stages(list(zip(re, im, strict=True)))).to(dtype)
