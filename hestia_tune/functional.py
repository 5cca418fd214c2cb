"""The methods as plain functions on tensors, for use without modules, steps or configs.

All take a latent weight (out_features, in_features) in float64, float32, bfloat16 or float16, on
any device, and

    group_size    weights that share a scale: a positive int that divides in_features, "channel" or
                  "tensor" (`hestia_tune.methods.granularity`)
    num_stages    residual stages of a complex weight, 1 to 4; both of its dimensions are even
    granularity   "tensor", or the complex columns that share scales

Float64 is computed in float64, everything else in float32; weights that are returned have the shape
and dtype of the latent one. All raise TypeError on a weight that is not floating point, or options
of another type, and ValueError on values out of range or that do not fit the weight.
"""

from collections.abc import Iterable, Iterator

import torch

from hestia_tune.methods.base import Scalar, effective_weight, require_float
from hestia_tune.methods.fairy2i import Fairy2iMethod, Granularity
from hestia_tune.methods.granularity import GroupSize
from hestia_tune.methods.ternary import TernaryMethod

__all__ = [
    "fairy2i_codes",
    "hard_fairy2i",
    "hard_ternary",
    "optimal_temperature",
    "relaxed_fairy2i",
    "relaxed_ternary",
    "ternary_codes",
]


def relaxed_ternary(
    weight: torch.Tensor, tau: Scalar, pressure: Scalar = 1.0, *, group_size: GroupSize = 128
) -> torch.Tensor:
    """Effective weight (1 - p)·W + p·H(W; tau) (Eqs. 5-7), differentiable in ``weight``.

    Its gradient is the closed form of Lemma 1 (scale detached) and saves only ``weight``. Under
    ``torch.compile``, pass ``tau`` and ``pressure`` as 0-D tensors: a float would be compiled in.

    Args:
        tau: temperature in units of normalised weight squared, >= 0; 0 is the hard method
            with a straight-through gradient.
        pressure: in [0, 1]; 0 gives ``weight`` itself, 1 the relaxed ternary weight.
    """
    return effective_weight(weight, tau, pressure, TernaryMethod(group_size=group_size))


def hard_ternary(weight: torch.Tensor, *, group_size: GroupSize = 128) -> torch.Tensor:
    """Dequantized weight gamma·clip(round(W/gamma), -1, 1) (Eq. 2); no gradient flows.

    Each entry is -gamma, 0 or gamma, with gamma exactly representable in bfloat16.
    """
    require_float(weight)
    return TernaryMethod(group_size=group_size).hard(weight)


def ternary_codes(
    weight: torch.Tensor, *, group_size: GroupSize = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and scales whose product is `hard_ternary`.

    Returns:
        codes: int8 in {-1, 0, 1}, shaped like ``weight``.
        scales: bfloat16, (out_features, in_features / group_size), (out_features, 1) for
            "channel", (1, 1) for "tensor".
    """
    require_float(weight)
    return TernaryMethod(group_size=group_size).codes(weight)


def relaxed_fairy2i(
    weight: torch.Tensor,
    tau: Scalar,
    pressure: Scalar = 1.0,
    *,
    num_stages: int = 2,
    granularity: Granularity = "tensor",
) -> torch.Tensor:
    """Effective weight of Fairy2i-H; as `relaxed_ternary`, but tau in squared radians."""
    method = Fairy2iMethod(num_stages=num_stages, granularity=granularity)
    return effective_weight(weight, tau, pressure, method)


def hard_fairy2i(
    weight: torch.Tensor, *, num_stages: int = 2, granularity: Granularity = "tensor"
) -> torch.Tensor:
    """The sum of the hard stages as a real weight; no gradient flows."""
    require_float(weight)
    return Fairy2iMethod(num_stages=num_stages, granularity=granularity).hard(weight)


def fairy2i_codes(
    weight: torch.Tensor, *, num_stages: int = 2, granularity: Granularity = "tensor"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and scales of which `hard_fairy2i` is made, as `Fairy2iMethod.codes` gives them."""
    require_float(weight)
    return Fairy2iMethod(num_stages=num_stages, granularity=granularity).codes(weight)


def optimal_temperature(
    weights: torch.Tensor | Iterable[torch.Tensor], *, group_size: GroupSize = 128
) -> float:
    """tau that minimises the mean squared relaxation error over all ``weights`` together.

    Args:
        weights: one latent weight, or several; read one at a time.

    Returns:
        tau within [0.001, 4], to about 1e-4; 0.351 for Gaussian weights (Sec. 4.1).

    Raises:
        InputTypeError: on a weight that is not floating point.
        InputError: on no weights, all-zero weights, or NaN or infinity among them.
    """

    def checked() -> Iterator[torch.Tensor]:
        for weight in [weights] if isinstance(weights, torch.Tensor) else weights:
            require_float(weight)
            yield weight

    return TernaryMethod(group_size=group_size).fit_temperature(checked())
