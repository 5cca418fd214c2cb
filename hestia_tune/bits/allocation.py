"""Choose one option per layer under a budget: a multiple-choice knapsack, solved exactly.

`allocate` goes through the layers and keeps the states (cost so far, loss so far) that can still
lead to the best result. It drops a state in two cases:

- A cheaper state has no larger loss (dominance).
- Even a lower bound of the final loss is above a loss that is known to be possible. The bound comes
  from a Lagrange multiplier m >= 0. For every choice c within the budget B,

      sum_i loss_i(c_i)  >=  sum_i min_c (loss_i(c) + m cost_i(c)) - m B

Costs are integers, so a budget is met exactly. With the bound few states remain: a model of 224
linears and four options takes well under a second.
"""

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

# States that are kept after each layer. With more, the result may be not the best one.
_MOST_STATES = 200_000


class Allocation(NamedTuple):
    """Hold one option per layer.

    Attributes:
        options: The index of each layer's option.
        loss: The sum of the losses.
        gap: The loss is at most this much above the smallest possible loss. 0: it is the smallest.
    """

    options: list[int]
    loss: float
    gap: float


def allocate(losses: np.ndarray, costs: np.ndarray, budget: int) -> Allocation:
    """Return the options with the smallest sum of losses whose costs do not exceed a budget.

    Args:
        losses: The loss of every option of every layer, float64 (layers, options).
        costs: The cost of every option of every layer, int64 (layers, options). The options of a
            layer are in order of their cost.
        budget: The largest sum of costs. The cheapest options must fit into it.
    """
    multiplier, start = _relaxed(losses, costs, budget)
    rows = np.arange(len(losses))
    reachable = losses[rows, start].sum()
    # Lower bounds of what all later layers add to a state, after each layer.
    reduced_later, cost_later = (
        np.append(table.min(1)[::-1].cumsum()[::-1], 0)
        for table in (losses + multiplier * costs, costs)
    )
    bound = reduced_later[0] - multiplier * budget
    limit = reachable + 1e-12 * (abs(reachable) + multiplier * budget)  # for the rounding of sums
    cost, loss, is_exact = np.zeros(1, np.int64), np.zeros(1), True
    history = []
    for layer in rows:
        # A flat index is state * options + option.
        cost = (cost[:, None] + costs[layer]).ravel()
        loss = (loss[:, None] + losses[layer]).ravel()
        bounds = loss + multiplier * (cost - budget) + reduced_later[layer + 1]
        fits = cost + cost_later[layer + 1] <= budget
        index = np.flatnonzero(fits & (bounds <= limit))
        index = index[np.lexsort((loss[index], cost[index]))]
        cheaper = np.minimum.accumulate(np.append(np.inf, loss[index][:-1]))
        index = index[loss[index] < cheaper]
        if len(index) > _MOST_STATES:
            is_exact = False
            index = np.sort(index[np.argsort(bounds[index])[:_MOST_STATES]])
        history.append(index)
        cost, loss = cost[index], loss[index]
    if not is_exact and (not len(loss) or loss.min() > reachable):
        return Allocation(start.tolist(), float(reachable), float(reachable - bound))
    state, options = int(loss.argmin()), []
    for index in reversed(history):
        state, option = divmod(int(index[state]), costs.shape[1])
        options.append(option)
    best = float(loss.min())
    return Allocation(options[::-1], best, 0.0 if is_exact else float(best - bound))


def _relaxed(losses: np.ndarray, costs: np.ndarray, budget: int) -> tuple[float, np.ndarray]:
    """Return the smallest Lagrange multiplier whose options fit the budget, and these options.

    The options for a multiplier m minimise loss + m cost in every layer. They change only at
    m = (loss_a - loss_b)/(cost_b - cost_a) of two options, and their cost falls with m.
    """
    a, b = np.triu_indices(costs.shape[1], 1)
    differences = costs[:, b] - costs[:, a]
    slopes = (losses[:, a] - losses[:, b])[differences > 0] / differences[differences > 0]
    # Slightly above each slope, where the cheaper of the two options is chosen.
    multipliers = np.append(0.0, np.sort(slopes[slopes > 0]) * (1 + 1e-9))
    rows = np.arange(len(losses))

    def options(multiplier: float) -> np.ndarray:
        return (losses + multiplier * costs).argmin(1)

    def fits(multiplier: float) -> bool:
        return bool(costs[rows, options(multiplier)].sum() <= budget)

    found = bisect_left(multipliers, True, key=fits)
    if found == len(multipliers):  # the slopes of equal losses, rounded: the cheapest options fit
        return float(multipliers[-1]), costs.argmin(1)
    return float(multipliers[found]), options(multipliers[found])
