"""The initial temperature that costs a model's own weights the least.

The paper picks tau_init by minimising the global mean squared error between the weights and their
relaxation, sum of (w - H(w; tau))^2 over all weights of all layers (Sec. 4.1). With z = |w|/gamma
that is a sum of gamma^2·(z - mu(z; tau))^2, so for the ternary method one pass over the weights
fills a histogram of z weighted by gamma^2, and the search over tau then works on the histogram
alone: the weights are read once, layer by layer.
"""

import math
from collections.abc import Callable, Sequence

import torch

from hestia_tune.errors import InputError

NUM_BINS = 8192
# Beyond 8 scales the relaxation is 1 for every temperature in the search range.
MAX_Z = 8.0
SEARCH_RANGE = (1e-3, 4.0)


def search_temperature(
    errors: Callable[[Sequence[float]], Sequence[float]], *, rounds: int, points: int
) -> float:
    """The tau in `SEARCH_RANGE` with the least error, by narrowing a logarithmic bracket.

    Args:
        errors: temperatures -> the relaxation error at each.
        rounds, points: so many times a grid of so many points; the bracket shrinks each time to
            the neighbours of the best.

    Raises:
        InputError: if the errors are not finite, or all zero.
    """
    low, high = (math.log(bound) for bound in SEARCH_RANGE)
    for round_number in range(rounds):
        grid = [low + (high - low) * k / (points - 1) for k in range(points)]
        found = [float(error) for error in errors([math.exp(value) for value in grid])]
        # (Later brackets may be free of error: of weights that are ternary already.)
        if round_number == 0 and not (max(found) > 0 and all(map(math.isfinite, found))):
            raise InputError(
                "tau_init auto needs finite weights that are not all zero; give tau_init a number"
            )
        best = found.index(min(found))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, points - 1)]
    return math.exp((low + high) / 2)


def relaxation_histogram(z: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(2, NUM_BINS) float64 on the CPU: per bin of z, the sums of gamma^2 and of gamma^2·z.

    Args:
        z: |w|/gamma of every weight, flat.
        scale: gamma of every weight, flat.
    """
    mass = scale.double().square()
    index = (z * (NUM_BINS / MAX_Z)).long().clamp_(max=NUM_BINS - 1)
    sums = [torch.bincount(index, weights=m, minlength=NUM_BINS) for m in (mass, mass * z)]
    return torch.stack(sums).cpu()


def temperature_from_histogram(histogram: torch.Tensor) -> float:
    """Minimises the relaxation error of a sum of `relaxation_histogram` over tau."""
    mass, moment = histogram
    filled = mass > 0
    mass, z = mass[filled], moment[filled] / mass[filled]  # (bins that are filled,)

    def errors(taus: Sequence[float]) -> list[float]:
        tau = torch.tensor(taus, dtype=torch.float64).view(-1, 1, 1)
        logits = -torch.stack([(z - 1) ** 2, z**2, (z + 1) ** 2]) / tau  # (taus, 3, bins)
        pi = logits.softmax(1)
        return (mass * (z - (pi[:, 0] - pi[:, 2])) ** 2).sum(-1).tolist()

    return search_temperature(errors, rounds=6, points=33)
