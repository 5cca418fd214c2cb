"""The initial temperature that costs a model's own weights the least.

The paper picks tau_init by minimising the global mean squared error between the weights and their
relaxation, sum of (w - H(w; tau))^2 over all weights of all layers (Sec. 4.1). With z = |w|/gamma
that is a sum of gamma^2·(z - mu(z; tau))^2, so one pass over the weights fills a histogram of z
weighted by gamma^2, and the search over tau then works on the histogram alone: the weights are
read once, layer by layer, and histograms of several processes simply add up.
"""

import math
from collections.abc import Iterable, Sequence

import torch

from hestia_tune.quantizers.base import Quantizer
from hestia_tune.quantizers.granularity import GroupSize
from hestia_tune.quantizers.ternary import TernaryQuantizer

NUM_BINS = 8192
# Beyond 8 scales the relaxation is 1 for every temperature in the search range.
MAX_Z = 8.0
SEARCH_RANGE = (1e-3, 4.0)


def relaxation_histogram(weight: torch.Tensor, *, group_size: GroupSize = 128) -> torch.Tensor:
    """(2, NUM_BINS) float64: per bin of |w|/gamma, the sums of gamma^2 and of gamma^2·|w|/gamma."""
    z, scale = TernaryQuantizer(group_size=group_size).normalized(weight.detach())
    mass = scale.double().square()
    index = (z * (NUM_BINS / MAX_Z)).long().clamp_(max=NUM_BINS - 1)
    return torch.stack(
        [torch.bincount(index, weights=m, minlength=NUM_BINS) for m in (mass, mass * z)]
    )


def temperature_from_histogram(histogram: torch.Tensor) -> float:
    """Minimises the relaxation error of a `relaxation_histogram` over tau.

    Raises:
        ValueError: if all weights are zero, or any is not finite.
    """
    mass, moment = histogram.cpu()
    total = mass.sum()
    if not torch.isfinite(moment.sum()) or moment.sum() <= 0:
        raise ValueError(
            "tau_init auto needs finite weights that are not all zero; "
            f"their summed squared scale is {total.item()}; give tau_init a number instead"
        )
    filled = mass > 0
    mass, z = mass[filled], moment[filled] / mass[filled]

    def errors(tau: torch.Tensor) -> torch.Tensor:
        logits = -torch.stack([(z - 1) ** 2, z**2, (z + 1) ** 2]) / tau.view(-1, 1, 1)
        pi = logits.softmax(1)
        return (mass * (z - (pi[:, 0] - pi[:, 2])) ** 2).sum(-1)

    low, high = (torch.tensor(bound, dtype=torch.float64).log() for bound in SEARCH_RANGE)
    for _ in range(6):  # each round narrows the bracket around the best of 33 points 16-fold
        grid = torch.linspace(low.item(), high.item(), 33, dtype=torch.float64)
        best = int(errors(grid.exp()).argmin())
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 32)]
    return float(((low + high) / 2).exp())


def optimal_temperature(
    weights: torch.Tensor | Iterable[torch.Tensor], *, group_size: GroupSize = 128
) -> float:
    """tau that minimises the mean squared relaxation error over all ``weights`` together.

    Args:
        weights: one (out_features, in_features) tensor, or several; read one at a time.
        group_size: as the quantizer's.

    Returns:
        tau within [0.001, 4], to about 1e-4; 0.351 for Gaussian weights.

    Raises:
        ValueError: on no weights, all-zero weights, or NaN or infinity among them.
    """
    tensors = [weights] if isinstance(weights, torch.Tensor) else weights
    histogram = None
    for weight in tensors:
        if not torch.isfinite(weight).all():
            raise ValueError("optimal_temperature needs finite weights; got NaN or infinity")
        part = relaxation_histogram(weight, group_size=group_size).cpu()
        histogram = part if histogram is None else histogram + part
    if histogram is None:
        raise ValueError("optimal_temperature needs at least one weight; got none")
    return temperature_from_histogram(histogram)


def fitted_temperature(weights: Sequence[torch.Tensor], quantizer: Quantizer) -> float:
    """`optimal_temperature` for any quantizer, by evaluating it: some 40 passes over the weights.

    Args:
        weights: latent weights (out_features, in_features) of all layers.
        quantizer: the method.

    Raises:
        ValueError: if the weights are not finite, or all zero.
    """

    def error(tau: float) -> float:
        total = 0.0
        for weight in weights:
            values = weight.detach()
            scalars = (torch.tensor(v, device=values.device) for v in (tau, 1.0))
            difference = values - quantizer.effective_weight(values, *scalars)
            total += float(difference.square().sum(dtype=torch.float64))
        return total

    low, high = (math.log(bound) for bound in SEARCH_RANGE)
    for _ in range(4):  # each round narrows the bracket around the best of 11 points 5-fold
        grid = [low + (high - low) * k / 10 for k in range(11)]
        errors = [error(math.exp(value)) for value in grid]
        if not all(math.isfinite(e) for e in errors) or max(errors) == 0:
            raise ValueError(
                "tau_init auto needs finite weights that are not all zero; give tau_init a number"
            )
        best = errors.index(min(errors))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 10)]
    return math.exp((low + high) / 2)
