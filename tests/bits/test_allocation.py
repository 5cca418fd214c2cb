"""Test the knapsack against brute force, and its bound."""

import itertools

import numpy as np
import pytest

from hestia_tune import bits
from hestia_tune.bits import allocate


def brute_force(losses, costs, budget):
    """Return the smallest sum of losses over all assignments within the budget."""
    rows = np.arange(len(losses))
    return min(
        losses[rows, options].sum()
        for options in map(list, itertools.product(range(costs.shape[1]), repeat=len(losses)))
        if costs[rows, options].sum() <= budget
    )


def random_problem(seed):
    """Return losses, costs and a budget. Some losses are equal, and some rise with the cost."""
    rng = np.random.default_rng(seed)
    layers, options = rng.integers(1, 7 if seed % 5 else 9), rng.integers(1, 5 if seed % 5 else 4)
    costs = np.sort(rng.integers(1, 40, (layers, options)), axis=1)
    losses = rng.integers(0, 8, (layers, options)) * 10.0 ** rng.integers(-6, 6)
    if seed % 3:
        losses = -np.sort(-losses, axis=1) * rng.uniform(0.1, 10, (layers, 1))
    budget = int(rng.integers(costs.min(1).sum(), costs.max(1).sum() + 1))
    return losses, costs, budget


def spent(found, costs):
    return costs[np.arange(len(costs)), found.options].sum()


@pytest.mark.parametrize("seed", range(150))
def test_no_assignment_is_better(seed):
    losses, costs, budget = random_problem(seed)
    found = allocate(losses, costs, budget)
    assert spent(found, costs) <= budget and found.gap == 0
    assert found.loss == pytest.approx(brute_force(losses, costs, budget), rel=1e-12)
    assert found.loss == pytest.approx(losses[np.arange(len(losses)), found.options].sum())


@pytest.mark.parametrize("seed", range(30))
def test_the_gap_holds_where_states_are_left_out(seed, monkeypatch):
    monkeypatch.setattr(bits, "_MOST_STATES", 1)
    losses, costs, budget = random_problem(seed)
    found = allocate(losses, costs, budget)
    best = brute_force(losses, costs, budget)
    assert spent(found, costs) <= budget
    assert best * (1 - 1e-9) <= found.loss <= (best + found.gap) * (1 + 1e-9) + 1e-12


def test_a_larger_budget_is_never_worse():
    losses, costs, _ = random_problem(1)
    budgets = range(costs.min(1).sum(), costs.max(1).sum() + 3)
    sums = [allocate(losses, costs, budget).loss for budget in budgets]
    assert sums == sorted(sums, reverse=True)
    assert sums[-1] == losses.min(1).sum()


def test_a_large_model_is_exact():
    rng = np.random.default_rng(0)
    sizes = np.array([9, 3, 3, 9, 24, 24, 24] * 40) * 2**20
    bits = np.array([1.725, 2.125, 4.125, 16])
    costs = np.rint(5 * sizes[:, None] * bits).astype(np.int64)
    errors = np.array([0.2, 0.12, 0.01, 1e-6]) * rng.lognormal(0, 1.5, (len(sizes), 1))
    found = allocate(errors, costs, int(5 * 2.2 * sizes.sum()))
    assert found.gap == 0 and len(set(found.options)) > 2
    assert 0.999 * 5 * 2.2 * sizes.sum() < spent(found, costs) <= 5 * 2.2 * sizes.sum()
