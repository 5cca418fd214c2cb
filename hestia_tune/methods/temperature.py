"""Find the initial temperature at which the relaxation changes a model's own weights the least.

The paper chooses tau_init by minimising the global mean squared error between the weights and
their relaxation (Sec. 4.1). The error is the sum of (w - H(w; tau))^2 over all weights of all
layers. With z = |w|/gamma it is the sum of gamma^2·(z - mu(z; tau))^2. So the ternary method reads
the weights once, layer by layer, and fills a histogram of z weighted by gamma^2. The search over
tau needs only the histogram.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hestia_tune.errors import InputError

NUM_BINS = 8192
# Beyond 8 scales the relaxation is 1 for every temperature in the search range.
MAX_Z = 8.0
SEARCH_RANGE = (1e-3, 4.0)


def search_temperature(
    errors: Callable[[Sequence[float]], Sequence[float]], *, rounds: int, points: int
) -> float:
    """Return the tau in `SEARCH_RANGE` with the least error.

    The search narrows a bracket of log tau. In each round it evaluates a grid, and shrinks the
    bracket to the neighbours of the best point.

    Args:
        errors: Maps temperatures to the relaxation error at each.
        rounds: Number of rounds.
        points: Number of points of a grid.

    Raises:
        InputError: If the errors are not finite, or all zero.
    """
    low, high = (math.log(bound) for bound in SEARCH_RANGE)
    for round_number in range(rounds):
        grid = [low + (high - low) * k / (points - 1) for k in range(points)]
        values = [float(error) for error in errors([math.exp(log_tau) for log_tau in grid])]
        # Weights that are ternary already may have no error inside a later bracket.
        if round_number == 0 and not (max(values) > 0 and all(map(math.isfinite, values))):
            raise InputError(
                "tau_init auto needs finite weights that are not all zero; give tau_init a number"
            )
        best = values.index(min(values))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, points - 1)]
    return math.exp((low + high) / 2)


def relaxation_histogram(z: Tensor, scale: Tensor) -> Tensor:
    """Return the sums of gamma^2 and of gamma^2·z per bin of z: (2, NUM_BINS) float64, on the CPU.

    Args:
        z: |w|/gamma of every weight, flat.
        scale: gamma of every weight, flat.
    """
    mass = scale.double().square()
    index = (z * (NUM_BINS / MAX_Z)).long().clamp_(max=NUM_BINS - 1)
    sums = [torch.bincount(index, weights=m, minlength=NUM_BINS) for m in (mass, mass * z)]
    return torch.stack(sums).cpu()


def temperature_from_histogram(histogram: Tensor) -> float:
    """Return the tau that minimises the relaxation error of a sum of `relaxation_histogram`."""
    mass, moment = histogram
    filled = mass > 0
    mass, z = mass[filled], moment[filled] / mass[filled]  # (filled bins,)

    def errors(taus: Sequence[float]) -> list[float]:
        tau = torch.tensor(taus, dtype=torch.float64).view(-1, 1, 1)
        logits = -torch.stack([(z - 1) ** 2, z**2, (z + 1) ** 2]) / tau  # (taus, 3, bins)
        pi = logits.softmax(1)
        return (mass * (z - (pi[:, 0] - pi[:, 2])) ** 2).sum(-1).tolist()

    return search_temperature(errors, rounds=6, points=33)
