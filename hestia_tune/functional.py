"""Offer the methods as plain functions on tensors, without modules, steps or configs.

All functions take a latent weight (out_features, in_features) in float64, float32, bfloat16 or
float16, on any device. They share these options:

    group_size    Weights that share a scale: a positive int that divides in_features, "channel" or
                  "tensor" (`hestia_tune.methods.groups`).
    num_stages    Residual stages of a complex weight, 1 to 4. Both of its dimensions are even.
    granularity   "tensor", or the number of complex columns that share scales.

The formulas run in float64 for a float64 weight, and in float32 for every other dtype. Returned
weights have the shape and the dtype of the latent weight. All functions raise InputTypeError if
the weight is not floating point or an option has the wrong type. They raise InputError if an option
is out of range or does not fit the weight.
"""

from collections.abc import Iterable

from torch import Tensor

from hestia_tune.methods.fairy2i import Fairy2iMethod, Granularity
from hestia_tune.methods.groups import GroupSize
from hestia_tune.methods.hestia import TernaryMethod
from hestia_tune.methods.method import Scalar, effective_weight, require_float


def relaxed_ternary(
    weight: Tensor, tau: Scalar, pressure: Scalar = 1.0, *, group_size: GroupSize = 128
) -> Tensor:
    """Return the effective weight (1 - p)·W + p·H(W; tau) (Eqs. 7-9), differentiable in ``weight``.

    The gradient is the closed form of Lemma 4.1, with a detached scale; the backward pass saves
    only ``weight``. Under ``torch.compile``, pass ``tau`` and ``pressure`` as 0-D tensors, because
    the compiler would treat a float as a constant and compile again for every value.

    Args:
        weight: The latent weight W, (out_features, in_features), floating point.
        tau: The temperature, in units of the squared normalized weight (W/gamma)^2, at least 0. 0
            gives the hard weight with a straight-through gradient.
        pressure: The pressure p, in [0, 1]. 0 gives ``weight`` itself, 1 the relaxed weight.
        group_size: Weights that share a scale: a divisor of in_features, "channel" or "tensor".

    Returns:
        The effective weight, in the shape and dtype of ``weight``.

    Raises:
        InputTypeError: If the weight is not floating point, or an option has the wrong type.
        InputError: If an option is out of range or does not fit the weight. `hard_ternary` and
            `ternary_codes` raise the same errors.
    """
    return effective_weight(weight, tau, pressure, TernaryMethod(group_size=group_size))


def hard_ternary(weight: Tensor, *, group_size: GroupSize = 128) -> Tensor:
    """Return the hard weight gamma·clip(round(W/gamma), -1, 1) (Eq. 2). No gradient flows.

    Each entry is -gamma, 0 or gamma, where gamma is the mean absolute value of a group (Eq. 1),
    rounded to bfloat16. A group of zeros stays zero.

    Args:
        weight: The latent weight, (out_features, in_features), floating point.
        group_size: As in `relaxed_ternary`.
    """
    require_float(weight)
    return TernaryMethod(group_size=group_size).hard(weight)


def ternary_codes(weight: Tensor, *, group_size: GroupSize = 128) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales whose product is `hard_ternary`, with the same arguments.

    Returns:
        codes: int8 in {-1, 0, 1}, shaped like ``weight``.
        scales: bfloat16, (out_features, in_features / group_size), (out_features, 1) for
            "channel", (1, 1) for "tensor".
    """
    require_float(weight)
    return TernaryMethod(group_size=group_size).codes(weight)


def relaxed_fairy2i(
    weight: Tensor,
    tau: Scalar,
    pressure: Scalar = 1.0,
    *,
    num_stages: int = 2,
    granularity: Granularity = "tensor",
) -> Tensor:
    """Return the effective weight of Fairy2i-H, differentiable in ``weight``.

    The weight is rewritten as two complex matrices of half the size. Each of ``num_stages`` stages
    replaces the entries of what the previous stages left by a code 1, i, -1 or -i times a scale.

    Args:
        weight: The latent weight, (out_features, in_features), both even.
        tau: The temperature in squared radians, at least 0.
        pressure: As in `relaxed_ternary`.
        num_stages: Residual stages, 1 to 4. Each costs one bit per weight.
        granularity: "tensor", or the number of complex columns that share scales, which divides
            in_features / 2.

    Returns:
        The effective weight, in the shape and dtype of ``weight``.

    Raises:
        InputTypeError: If the weight is not floating point, or an option has the wrong type.
        InputError: If an option is out of range or does not fit the weight. `hard_fairy2i` and
            `fairy2i_codes` raise the same errors.
    """
    method = Fairy2iMethod(num_stages=num_stages, granularity=granularity)
    return effective_weight(weight, tau, pressure, method)


def hard_fairy2i(
    weight: Tensor, *, num_stages: int = 2, granularity: Granularity = "tensor"
) -> Tensor:
    """Return the sum of the hard stages as a real weight. No gradient flows.

    `relaxed_fairy2i` describes the arguments and the errors.
    """
    require_float(weight)
    return Fairy2iMethod(num_stages=num_stages, granularity=granularity).hard(weight)


def fairy2i_codes(
    weight: Tensor, *, num_stages: int = 2, granularity: Granularity = "tensor"
) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales of `hard_fairy2i`, in the layout of `Fairy2iMethod.codes`.

    `relaxed_fairy2i` describes the arguments and the errors.
    """
    require_float(weight)
    return Fairy2iMethod(num_stages=num_stages, granularity=granularity).codes(weight)


def optimal_temperature(
    weights: Tensor | Iterable[Tensor], *, group_size: GroupSize = 128
) -> float:
    """Return the tau that minimizes the mean squared relaxation error over all ``weights``.

    Args:
        weights: One latent weight, or several. The function reads them one at a time.
        group_size: As in `relaxed_ternary`.

    Returns:
        tau within [0.001, 4], to about 1e-4; 0.351 for Gaussian weights (Sec. 5.1).

    Raises:
        InputTypeError: If a weight is not floating point.
        InputError: If there are no weights, all are zero, or one has NaN or infinity.
    """
    several = [weights] if isinstance(weights, Tensor) else weights
    return TernaryMethod(group_size=group_size).fit_temperature(several)
