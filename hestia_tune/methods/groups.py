"""Provide codes, scales and their rounding for methods with one scale per group.

A weight is a scale times a code. ``levels`` are the codes of a method:

    BINARY     -1, 1          The nearest code is the sign.
    TERNARY    -1, 0, 1       The code is 0 up to half a scale.
    TWO_BIT    -1, 0, 1, 2    The nearest integer. The scale has a sign: where the large weights of
                              a group are negative, 2 times the scale is negative.
    SYMMETRIC  -3, -1, 1, 3   The outer codes lie beyond two scales. In steps of two, the levels
                              are {-1.5, -0.5, 0.5, 1.5}.
    INT4       -8, ..., 7     The nearest integer. The scale has a sign, so that the largest weight
                              of a group, positive or negative, has the code -8.

Every product must be a bfloat16 number, so that every export is exact. A bfloat16 scale has 8
significant bits. Three times such a scale has up to 10, so symmetric scales are rounded to 6. This
rounding costs a relative error of at most 1/64 of the scale, 3e-5 of the weights' squared error.
Scales of TWO_BIT are rounded in the same way, because MLX computes 2s as 3s - s, in bfloat16. For
the same reason, scales of INT4 are rounded to 5 bits.

Scales are sums in float64, so that they depend neither on the device nor on the order. Comparisons
find the codes, because comparisons are exact. A compiler may approximate a division.

Scales have a lower bound, `SCALE_EPS`, so that no formula divides by zero. A scale at the bound
belongs to a group of zeros, or to a group whose weights or step are below the bound. Binary and
symmetric levels have no code 0, and INT4 could lack its code -8, from which a file's reader takes
the scale. The hard weights of such a group have the scale 0, and stay zeros in every file format.

The group size says which weights share a scale. Every formula sees a weight (out_features,
in_features) as a 3-D block view (rows, groups, group), and one scale covers the last axis. A row
shard of the weight can be quantized on its own, unless the group size is "tensor".

    int g      (out_features, in_features / g, g)    The paper uses 128.
    "channel"  (out_features, 1, in_features)
    "tensor"   (1, 1, out_features * in_features)

A weight is hard if every group is a scale times codes. The group size is not stored in a dense
weight, so `find_group_size` searches for it. A dense weight is refused after its first rows. A hard
weight is read once or twice. Training that begins at full pressure never sees the latent weight
itself. It sees what the method makes of it. A method whose scale is mean|w| makes a hard weight
smaller, because the mean counts zeros. So `latent_of_hard` stretches the weight first.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hestia_tune.errors import InputError
from hestia_tune.methods.method import (
    Method,
    SumOverRanks,
    check_count,
    compute_dtype,
    require_matrix,
)

GroupSize = int | str
SCALE_EPS = 1e-8
_TINY = torch.finfo(torch.float32).tiny
# The bound, rounded to the 5, 6 or 8 significant bits of a scale, is at most this number.
_LEAST_SCALE = SCALE_EPS * (1 + 2**-5)
BINARY = (-1, 1)
TERNARY = (-1, 0, 1)
TWO_BIT = (-1, 0, 1, 2)
SYMMETRIC = (-3, -1, 1, 3)
INT4 = tuple(range(-8, 8))
Levels = tuple[int, ...]
# All levels, the fewest first.
CODEBOOKS: tuple[Levels, ...] = (BINARY, TERNARY, TWO_BIT, SYMMETRIC, INT4)
# How many significant bits of a bfloat16 scale stay zero.
_SPARE_BITS = {BINARY: 0, TERNARY: 0, TWO_BIT: 2, SYMMETRIC: 2, INT4: 3}
# The smallest and the largest magnitude of a code, for levels whose scale has no sign.
_MAGNITUDES = {BINARY: (1.0, 1.0), TERNARY: (0.0, 1.0), SYMMETRIC: (1.0, 3.0)}
_SORTED = 2**22  # How many weights `_signed_least_squares` sorts together.


# How many rows decide that a weight is dense, before all rows are looked at.
_FIRST_ROWS = 8


def validate_group_size(group_size: GroupSize) -> None:
    """Check the option itself by `check_count`, before any weight is known."""
    words = ("channel", "tensor")
    check_count('group_size must be a positive int, "channel" or "tensor"', group_size, words)


def check_divides(
    group_size: GroupSize,
    in_features: int,
    name: str = "the weight",
    *,
    widths: Iterable[int] = (),
    allows_tensor: bool = True,
) -> None:
    """Raise InputError, with the layer and the usable sizes, if groups do not tile a row.

    Args:
        group_size: The group size.
        in_features: The length of the rows.
        name: Name of the layer, for the error.
        widths: The lengths of all rows that have this group size. A usable size divides them all.
        allows_tensor: Whether a scale may cover several rows.
    """
    if isinstance(group_size, int) and in_features % group_size:
        common = gcd(in_features, *widths)
        usable = [size for size in range(32, common + 1, 32) if common % size == 0]
        sizes = [*map(str, usable), '"channel"', *(['"tensor"'] if allows_tensor else [])]
        choice = " or ".join(filter(None, [", ".join(sizes[:-1]), sizes[-1]]))
        raise InputError(
            f"group_size {group_size} does not divide in_features {in_features} of {name}; "
            f"use {'one of ' if len(sizes) > 1 else ''}{choice}"
        )


def group_width(group_size: GroupSize, in_features: int) -> int:
    """Return how many consecutive weights of a row share a scale: an int of them, or the row."""
    return group_size if isinstance(group_size, int) else in_features


def block_view(weight: Tensor, group_size: GroupSize, groups: int = -1) -> Tensor:
    """View (out_features, in_features) as (rows, groups, group); see the module docstring.

    A caller may pass the number of groups in a row, if a tensor has this size. A compiler then
    knows that in_features is a multiple of it.
    """
    require_matrix(weight)
    if group_size == "tensor":
        return weight.reshape(1, 1, -1)
    check_divides(group_size, weight.shape[1])
    return weight.unflatten(1, (groups, group_width(group_size, weight.shape[1])))


def round_to_bfloat16(x: Tensor, spare_bits: int = 0) -> Tensor:
    """Round float32 to the nearest bfloat16 (ties to even) and return it in float32.

    The function works on the bits, because a compiler may drop a cast down and up again: inductor
    keeps bfloat16 intermediates of a fused kernel in float32.

    Args:
        x: Numbers in float32.
        spare_bits: How many of bfloat16's 8 significant bits stay zero, to leave room for a factor.
    """
    dropped = 16 + spare_bits
    bits = x.view(torch.int32)
    rounded = bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)
    rounded = (rounded & -(1 << dropped)).view(torch.float32)
    return torch.where(x.isnan(), x, rounded)  # The sum may carry a NaN's bits over to zero.


def round_scale(scale: Tensor, levels: Levels) -> Tensor:
    """Round a scale so that its product with every code is a bfloat16 number.

    Args:
        scale: The scale, in any float dtype.
        levels: The codes.

    Returns:
        The rounded scale, in float32.
    """
    return round_to_bfloat16(scale.to(torch.float32), _SPARE_BITS[levels])


def mean_scale(
    blocks: Tensor,
    total: SumOverRanks | None = None,
    *,
    keep_hard: bool = False,
    levels: Levels = TERNARY,
) -> Tensor:
    """Return gamma = mean|w| + eps (Eq. 1) of each group, rounded to bfloat16; shape (..., 1).

    Args:
        blocks: The weights (rows, groups, group).
        total: Sums a tensor over all parts of a group, if this process holds only a part.
        keep_hard: Whether to return gamma itself for a group that is hard already, if gamma is a
            bfloat16 number. The mean of a group gamma·{-1, 0, 1} is gamma times the share of
            nonzeros, so a second quantization would shrink the group. By Cauchy-Schwarz, the
            nonzero |w| are equal where (sum|w|)^2 = nonzeros·sum w^2. Float64 holds both sides
            exactly for a bfloat16 gamma.
        levels: TERNARY; or BINARY, whose hard groups have no zeros.
    """
    magnitude = blocks.detach().abs()
    sums = [magnitude.sum(-1, keepdim=True, dtype=torch.float64)]
    sums.append(torch.full_like(sums[0], blocks.shape[-1]))
    if keep_hard:
        sums.append(magnitude.double().square().sum(-1, keepdim=True))
        sums.append((magnitude > 0).sum(-1, keepdim=True, dtype=torch.float64))
    if total is not None:
        sums = total(torch.stack(sums)).unbind()
    scale = round_scale(sums[0] / sums[1] + SCALE_EPS, levels)
    if keep_hard:
        magnitudes, count, squares, nonzeros = sums
        kept = nonzeros.clamp(min=1.0) if levels == TERNARY else count
        gamma = magnitudes / kept
        rounded = round_scale(gamma, levels)
        is_hard = (magnitudes * magnitudes == kept * squares) & (rounded == gamma) & (gamma > 0)
        scale = torch.where(is_hard, rounded, scale)
    return scale.to(compute_dtype(blocks))


def least_squares_scale(blocks: Tensor, levels: Levels = TERNARY) -> Tensor:
    """Return the scale s whose codes q leave the least sum (w - s·q)^2, rounded; shape (..., 1).

    Let low and high be the magnitudes of the codes. If the k largest |w| of a group of n get a
    high code, then

        s = N/D    N = low·sum|w| + (high - low)·(sum of the k largest)
                   D = low^2·n + (high^2 - low^2)·k

    and the sum falls by N^2/D. The function searches for the best k. It takes the first of equally
    good ones, so that a hard weight keeps its scale. `_signed_least_squares` is for TWO_BIT.
    """
    if levels == TWO_BIT:
        rows = max(1, _SORTED // max(1, blocks[:1].numel()))
        parts = [_signed_least_squares(part) for part in blocks.detach().split(rows)]
        return round_scale(bounded(torch.cat(parts)), levels).to(compute_dtype(blocks))
    low, high = _MAGNITUDES[levels]
    largest = blocks.detach().abs().sort(-1, descending=True).values
    sums = F.pad(largest.cumsum(-1, dtype=torch.float64), (1, 0))  # of the k largest, k = 0 ... n
    n = blocks.shape[-1]
    counts = torch.arange(n + 1, device=blocks.device, dtype=torch.float64)
    numerator = low * sums[..., -1:] + (high - low) * sums
    denominator = (low * low * n + (high * high - low * low) * counts).clamp(min=1e-300)
    gain = numerator.square() / denominator
    is_best = gain >= gain.amax(-1, keepdim=True) * (1.0 - 1e-12)
    best = is_best.to(torch.uint8).argmax(-1, keepdim=True)
    scale = numerator.gather(-1, best) / denominator[best]
    return round_scale(scale.clamp(min=SCALE_EPS), levels).to(compute_dtype(blocks))


def _signed_least_squares(blocks: Tensor) -> Tensor:
    """Return the scale s of either sign whose codes {-1, 0, 1, 2} leave the least squared error.

    Let s > 0 fall from infinity. A weight leaves the code 0 at s = 2|w|, and a positive one gets
    the code 2 at s = w/1.5. Between two such points the codes q are fixed, and the best s is N/D
    with N = sum w·q and D = sum q^2, where the sum falls by N^2/D. The function sorts the points,
    adds up N and D, and takes the best. It does the same for -w.

    Args:
        blocks: The weights (rows, groups, group).
    """
    size, number, found = blocks.abs(), blocks.shape[-1], []
    order = torch.cat([2 * size, size / 1.5], -1).argsort(-1, descending=True)
    w, is_second = blocks.gather(-1, order % number), order >= number
    for sign in (1, -1):
        happens = ~is_second | (sign * w > 0)
        n = (w.abs() * happens).cumsum(-1, dtype=torch.float64)
        d = ((1.0 + 2.0 * is_second) * happens).cumsum(-1).clamp(min=1.0)
        gain, index = (n.square() / d).max(-1, keepdim=True)
        found.append((sign * n.gather(-1, index) / d.gather(-1, index), gain))
    (positive, gain), (negative, other) = found
    # Clearly better, so the order of a sum does not decide.
    return torch.where(other > gain * (1 + 1e-12), negative, positive)


def bounded(scale: Tensor) -> Tensor:
    """Return a scale with its sign, and a magnitude of at least `SCALE_EPS`."""
    size = scale.abs().clamp(min=SCALE_EPS)
    return torch.where(scale < 0, -size, size)


def signed_scale(blocks: Tensor) -> Tensor:
    """Return the scale that gives the largest weight of each group the code -8; shape (..., 1)."""
    low, high = blocks.detach().aminmax(dim=-1, keepdim=True)
    return torch.where(high > -low, high, low) * (-1 / 8)


def unit_of(blocks: Tensor, levels: Levels) -> Tensor:
    """Return the only scale by which groups can be hard; shape (..., 1).

    If the codes leave a choice, it is a larger scale with smaller codes, where they are exact.

    Args:
        blocks: The weights (..., group), hard or not.
        levels: The codes.
    """
    if levels == INT4:
        return signed_scale(blocks)
    low, high = blocks.detach().aminmax(dim=-1, keepdim=True)
    if levels == TWO_BIT:
        largest = torch.where(high >= -low, high, low)
        is_one = nearest_code(blocks, largest.abs(), levels) * largest.abs() == blocks
        return torch.where(is_one.all(-1, keepdim=True), largest.abs(), largest / 2)
    if levels == SYMMETRIC:  # The smallest code is ±1, or ±3 if all codes are ±3.
        low = blocks.detach().abs().amin(-1, keepdim=True)
        return torch.where(round_scale(low, levels) == low, low, low / 3)
    return torch.maximum(high, -low)


def scale_of_hard(blocks: Tensor, levels: Levels) -> Tensor:
    """Return the scales of groups that are a scale times codes already, and 0 for all other groups.

    A method that starts from these scales keeps the codes. It changes no weight whose scale has as
    few bits as `round_scale` leaves.

    Args:
        blocks: The weights (..., group).
        levels: The codes.

    Returns:
        The scales (..., 1), rounded by `round_scale`.
    """
    scale = unit_of(blocks, levels)
    is_hard = (nearest_code(blocks, scale, levels) * scale == blocks).all(-1, keepdim=True)
    return torch.where(is_hard, round_scale(scale, levels).to(scale.dtype), 0.0)


def nearest_code(w: Tensor, scale: Tensor, levels: Levels = TERNARY) -> Tensor:
    """Return the code whose product with the scale is nearest to ``w``, in the dtype of ``w``.

    A tie takes the inner code. Without a code 0, the weight 0 takes the positive code. The code is
    NaN if the weight or the scale is NaN.
    """
    magnitude = w.abs()
    zero = magnitude * (0.0 * scale)  # A constant would lose a NaN.
    if levels == TERNARY:
        return torch.where(magnitude > 0.5 * scale, torch.sign(w), zero)
    size, turned = scale.abs(), torch.where(scale < 0, -w, w)
    if levels == TWO_BIT:
        above = torch.gt(turned, 0.5 * size).to(w.dtype) + torch.gt(turned, 1.5 * size).to(w.dtype)
        return zero + above - torch.lt(turned, -0.5 * size).to(w.dtype)
    if levels == INT4:
        # The quotient may be rounded to a neighbor, so comparisons decide.
        code = (magnitude / size.clamp(min=_TINY)).round()
        code = code + (magnitude > (code + 0.5) * size).to(w.dtype)
        code = code - (magnitude <= (code - 0.5) * size).to(w.dtype)
        return torch.where(turned < 0, -code.clamp(0, 8), code.clamp(0, 7))
    if levels not in (BINARY, SYMMETRIC):
        raise ValueError(f"there is no rounding to the codes {levels}; known are {CODEBOOKS}")
    one = zero + 1.0
    sign = torch.where(w < 0, -one, one)
    return sign if levels == BINARY else torch.where(magnitude > 2.0 * scale, 3.0 * sign, sign)


@dataclass(frozen=True, kw_only=True)
class GroupMethod(Method):
    """A method whose hard weights are scale times code, with a scale per group.

    A subclass defines the scale and the code of every weight (`scale_and_code`). If it relaxes
    weights, it also defines the relaxation (`relaxed`) and its `slopes`.

    Args:
        group_size: Weights along in_features that share a scale (128 in the paper), or "channel",
            or "tensor".

    Raises:
        InputError: If an option is wrong.
    """

    # The codes; see the module docstring.
    levels: ClassVar[Levels] = TERNARY
    group_size: GroupSize = 128

    def __post_init__(self):
        super().__post_init__()
        validate_group_size(self.group_size)

    @property
    def code_values(self) -> tuple[complex, ...]:
        """The codes of a weight."""
        return self.levels

    @property
    def scales_span_rows(self) -> bool:
        """Whether a scale covers several rows."""
        return self.group_size == "tensor"

    def check_layer(self, in_features: int, out_features: int, name: str) -> None:
        self.check_widths({name: in_features})

    def check_widths(self, widths: Mapping[str, int]) -> None:
        """Raise InputError if groups do not tile the rows of a layer.

        Args:
            widths: Name -> in_features of every layer with this method. The error suggests sizes
                that fit all of them.
        """
        for name, in_features in widths.items():
            if isinstance(self.group_size, int) and in_features % self.group_size:
                check_divides(
                    self.group_size,
                    in_features,
                    name,
                    widths=widths.values(),
                    allows_tensor=self._allows_tensor(),
                )

    def _allows_tensor(self) -> bool:
        """Return whether the method has a group size "tensor"."""
        try:
            replace(self, group_size="tensor")
        except InputError:
            return False
        return True

    def blocks(self, weight: Tensor, parameters: Sequence[Tensor] = ()) -> Tensor:
        """Return a weight or its gradient as (rows, groups, group) in the dtype of formulas.

        With the method's ``parameters``, (rows, groups) each, a compiled formula is one kernel.
        """
        groups = parameters[0].shape[1] if parameters else -1
        return block_view(weight, self.group_size, groups).to(compute_dtype(weight))

    def unblock(self, blocks: Tensor, weight: Tensor) -> Tensor:
        """Return `blocks` in the shape and dtype of ``weight``, from which they were made."""
        blocks = blocks.to(weight.dtype)
        # A compiler does not know that groups fill rows. It would make `view_as` a second kernel.
        return blocks.view_as(weight) if self.scales_span_rows else blocks.flatten(1)

    def require_rows(self, what: str) -> None:
        """Raise InputError if a scale covers several rows. ``what`` names the reason."""
        if self.scales_span_rows:
            raise InputError(
                f'{what} needs scales that lie within rows; got group_size "tensor"; use "channel" '
                "or an int"
            )

    @abstractmethod
    def scale_and_code(
        self, w: Tensor, parameters: Sequence[Tensor], total: SumOverRanks | None, is_final: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the scale, (rows, groups, 1) or (1, 1, 1), and all codes, in the dtype of ``w``.

        Args:
            w: The weights (rows, groups, group).
            parameters: The method's parameters, (rows, groups) each.
            total: Sums a tensor over the ranks that share the weight. None unless the group size
                is "tensor".
            is_final: Whether the result is for the deployable weight. ``w`` may then be hard
                already.
        """

    def values(self, scale: Tensor, code: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Return the hard weights of codes."""
        return self.hard_scale(scale) * code

    def hard_scale(self, scale: Tensor) -> Tensor:
        """Return the scales of hard weights.

        A scale at its bound becomes 0 for levels without a code 0, so that zeros stay zeros.
        """
        if self.levels in (TERNARY, TWO_BIT):
            return scale
        return torch.where(scale.abs() <= _LEAST_SCALE, 0.0, scale)

    def relaxed(
        self, w: Tensor, tau: Tensor, parameters: Sequence[Tensor], total: SumOverRanks | None
    ) -> Tensor:
        """Return H(w; tau), shaped like ``w``.

        This default is for methods without a temperature. It returns the hard weights. ``tau`` is
        0-D, in the dtype of ``w``. `scale_and_code` describes the other arguments.
        """
        return self.values(*self.scale_and_code(w, parameters, total, False), parameters)

    def slopes(
        self, w: Tensor, tau: Tensor, parameters: Sequence[Tensor], total: SumOverRanks | None
    ) -> tuple[Tensor, ...]:
        """Return dH/dw and the input of `parameter_grads`, at every weight.

        `relaxed` describes the arguments.
        """
        raise NotImplementedError

    def parameter_grads(self, sums: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of all parameters.

        Args:
            sums: The gradients from all `slopes` except the first, summed per group, (rows,
                groups).
            parameters: The method's parameters.
        """
        return [each.to(p.dtype) for each, p in zip(sums, parameters, strict=True)]

    def effective_weight(self, weight, tau, pressure, parameters=(), total=None):
        w, total = self.blocks(weight, parameters), total if self.scales_span_rows else None
        tau, pressure = tau.to(w.dtype), pressure.to(w.dtype)
        quantized = self.relaxed(w, tau, parameters, total)
        effective = (1.0 - pressure) * w + pressure * quantized
        return self.unblock(effective, weight)

    def vjp(self, grad, weight, tau, pressure, parameters=(), total=None):
        w, total = self.blocks(weight, parameters), total if self.scales_span_rows else None
        tau, pressure = tau.to(w.dtype), pressure.to(w.dtype)
        slope, *others = self.slopes(w, tau, parameters, total)
        g = self.blocks(grad, parameters).to(w.dtype)
        grad_w = self.unblock(g * ((1.0 - pressure) + pressure * slope), weight)
        sums = [pressure * (g * other).sum(-1) for other in others]  # (rows, groups)
        return grad_w, *self.parameter_grads(sums, parameters)

    def quantized(
        self, weight: Tensor, parameters: Sequence[Tensor] = (), total: SumOverRanks | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the `blocks`, the scale and the code of the deployable weight."""
        w, total = self.blocks(weight.detach()), total if self.scales_span_rows else None
        return w, *self.scale_and_code(w, parameters, total, True)

    def hard(self, weight, parameters=(), total=None):
        _, scale, code = self.quantized(weight, parameters, total)
        return self.unblock(self.values(scale, code, parameters), weight)

    def codes(self, weight, parameters=()):
        _, scale, code = self.quantized(weight, parameters)
        scale = self.hard_scale(scale).squeeze(-1)
        return code.to(torch.int8).view_as(weight), scale.to(torch.bfloat16)


def is_hard(
    weight: Tensor,
    group_size: GroupSize,
    levels: Levels = TERNARY,
    *,
    any_scale: bool = False,
) -> bool:
    """Return whether a weight is a scale times codes in every group.

    With BINARY and TERNARY, the scale may be any number: rounding it to bfloat16 keeps the weight
    hard. With other codes, it must be rounded already as `round_scale` does.

    Args:
        weight: The weight (out_features, in_features).
        group_size: An int that divides in_features, "channel" or "tensor".
        levels: The codes.
        any_scale: Whether the scale may be any number with all codes.
    """

    def fits(rows: Tensor) -> bool:
        blocks = block_view(rows, group_size).to(compute_dtype(rows))
        scale = unit_of(blocks, levels)
        if _SPARE_BITS[levels] and not any_scale:
            scale = round_scale(scale, levels).to(scale.dtype)
        return bool((nearest_code(blocks, scale, levels) * scale == blocks).all())

    return fits(weight[:_FIRST_ROWS]) and fits(weight)


def find_group_size(weight: Tensor, levels: Levels = TERNARY) -> GroupSize | None:
    """Return the largest group size at which a weight is hard.

    Args:
        weight: The weight (out_features, in_features).
        levels: The codes. With TWO_BIT, the scale may be any number too.

    Returns:
        "tensor", "channel", or the largest multiple of 32 that divides in_features and fits. None
        if nothing fits.
    """
    width = weight.shape[1]
    multiples = (size for size in range(width // 32 * 32, 0, -32) if width % size == 0)
    sizes: list[GroupSize] = ["tensor", "channel", *multiples]
    fits = partial(is_hard, weight, levels=levels, any_scale=levels == TWO_BIT)
    return next((size for size in sizes if fits(size)), None)


def find_codes(weight: Tensor) -> tuple[Levels, GroupSize] | tuple[None, None]:
    """Return the fewest levels and the largest group size at which a weight is hard.

    Args:
        weight: The weight (out_features, in_features).

    Returns:
        The codes and the group size; or None and None for another weight.
    """
    for levels in CODEBOOKS:
        if size := find_group_size(weight, levels):
            return levels, size
    return None, None


def rounded_hard(method: GroupMethod, weight: Tensor) -> Tensor:
    """Return a weight that is a scale times codes with the scales that a method can hold.

    Args:
        method: The method. Its groups have one scale each.
        weight: The weight, (out_features, in_features). `is_hard` is true, with ``any_scale`` if
            the method has the codes of TWO_BIT.
    """
    if method.levels != TWO_BIT:
        return weight.to(torch.bfloat16)
    latent = weight.float()
    return method.hard(latent, method.initial_parameters(latent)).to(torch.bfloat16)


def latent_of_hard(method: GroupMethod, weight: Tensor) -> Tensor:
    """Return a latent weight, float32, whose forward pass at full pressure is a hard weight.

    The equality is exact at tau 0, with the method's initial parameters. `GroupMethod.hard` of the
    latent weight is the hard weight too. If the hard weight itself has this property, it is
    returned. Otherwise each group of n weights, of which k are not zero, is multiplied by n/k. Its
    mean|w| is then the scale.

    Args:
        method: The method that will train the weight.
        weight: A weight that `is_hard` with the method's group size and levels. Its scales are
            bfloat16 numbers.
    """
    weight = weight.float()
    zero, one = weight.new_tensor(0.0), weight.new_tensor(1.0)
    parameters = method.initial_parameters(weight)
    if torch.equal(method.effective_weight(weight, zero, one, parameters), weight):
        return weight
    blocks = method.blocks(weight)
    nonzeros = (blocks != 0).sum(-1, keepdim=True).clamp(min=1)
    scale = blocks.abs().amax(-1, keepdim=True).double()
    magnitude = (scale - SCALE_EPS).clamp(min=0.0) * blocks.shape[-1] / nonzeros
    # An odd last bit is no bfloat16 number. Otherwise `mean_scale` could take it for a scale.
    magnitude = (magnitude.float().view(torch.int32) | 1).view(torch.float32)
    return (torch.sign(blocks) * magnitude).view_as(weight)
