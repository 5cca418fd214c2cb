"""Test the controls of the benchmark of bits, which do not look at the weights."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZES = {"layers.0.q": 256, "layers.0.v": 256, "layers.1.q": 256, "layers.1.v": 256}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bits

    return bits


@pytest.mark.parametrize("seed", range(20))
def test_greedy_choices_fit_and_leave_nothing_to_take(script, seed):
    rng = np.random.default_rng(seed)
    costs = np.sort(rng.integers(1, 50, (rng.integers(1, 7), rng.integers(2, 5))), 1)
    budget = int(rng.integers(costs[:, 0].sum(), costs.sum() + 2))
    order, allowed = [*range(len(costs))][::-1], range(costs.shape[1])
    options = script.fill(costs, budget, order, allowed)
    rows = np.arange(len(costs))
    rest = budget - costs[rows, options].sum()
    assert rest >= 0
    for layer, option in enumerate(options):
        assert all(
            costs[layer, more] - costs[layer, option] > rest
            for more in allowed
            if costs[layer, more] > costs[layer, option]
        )


def test_the_first_in_order_takes_the_most(script):
    costs = np.array([[1, 2, 10]] * 4)
    assert script.fill(costs, 14, [3, 2, 1, 0], [0, 1, 2]) == [0, 0, 1, 2]
    assert script.fill(costs, 6, [1, 0, 2, 3], [0, 1]) == [1, 1, 0, 0]


def bits_of(component):
    """Return the bits of a layer, scales included, from its entry; None is dense."""
    return (
        16 if component is None else {"binary": 1 + 1 / 4, "int2": 2 + 1 / 4}[component["codebook"]]
    )


@pytest.fixture
def spend(script):
    """Return a function that gives layer -> bits, by a control, from a budget."""

    def bits(way, average):
        quantizer = {"_component_": "hestia_tune.HestiaQATQuantizer", "group_size": 64}
        settings = SimpleNamespace(average=average, choices=["int2", "binary", "ternary", "bf16"])
        config = SimpleNamespace(bits=settings, quantizer=quantizer)
        layers, mean = script.controlled(way, config, SIZES)
        found = {n: bits_of(layers[n]) if n in layers else 1.85 for n in SIZES}
        total = sum(found[name] * size for name, size in SIZES.items())
        assert mean == pytest.approx(total / sum(SIZES.values())) and mean <= average
        return [*found.values()]

    return bits


@pytest.mark.parametrize("way", ["uniform", "position"])
def test_a_control_keeps_the_budget_and_spends_it_all_at_16_bits(spend, way):
    assert all(spend(way, average) for average in np.linspace(2.0, 15.9, 29))
    assert set(spend(way, 16.0)) == {16}


def test_what_the_controls_choose(spend):
    uniform = spend("uniform", 2.0)
    assert set(uniform) == {1.85, 2.25} and uniform == spend("uniform", 2.0)
    position = spend("position", 5.5)
    assert position == sorted(position) and position[0] == 1.25 and position[-1] == 16
