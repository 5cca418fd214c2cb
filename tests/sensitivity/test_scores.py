"""Scores from traces (Eq. 13), and their standard errors."""

import math

import pytest
import references
import torch

from hestia_tune.sensitivity.estimation import is_resolved, sensitivity_scores

TRACES = {"layers.0.q_proj": 2.5, "layers.0.w1": 1e-6, "layers.1.q_proj": 40.0, "layers.1.w1": 0.3}


def random_traces(num, seed=0, spread=1.5):
    generator = torch.Generator().manual_seed(seed)
    values = (spread * torch.randn(num, generator=generator, dtype=torch.float64)).exp().tolist()
    return {f"layers.{i}": h for i, h in enumerate(values)}


@pytest.mark.parametrize("kappa", [0.0, 0.5, 1.0, 5.0])
@pytest.mark.parametrize("seed", range(4))
def test_scores_equal_eq11(seed, kappa):
    traces = random_traces(30, seed, spread=6)
    scores, _ = sensitivity_scores(traces, kappa=kappa)
    assert list(scores) == list(traces)
    expected = references.eq11_scores(list(traces.values()), kappa)
    assert list(scores.values()) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("epsilon", [0.0, 1e-8, 0.5])
def test_epsilon_widens_the_deviation(epsilon):
    traces = random_traces(9)
    expected = references.eq11_scores(list(traces.values()), eps=epsilon)
    found, _ = sensitivity_scores(traces, epsilon=epsilon)
    assert list(found.values()) == pytest.approx(expected)


def test_scores_follow_the_order_of_the_traces_and_not_their_unit():
    scores, _ = sensitivity_scores(TRACES)
    assert sorted(scores, key=scores.get) == sorted(TRACES, key=TRACES.get)
    assert all(0 < s < 1 for s in scores.values())
    scaled, _ = sensitivity_scores({name: 1e5 * h for name, h in TRACES.items()})
    assert scaled == pytest.approx(scores)


@pytest.mark.parametrize("epsilon", [0.0, 1e-8])
@pytest.mark.parametrize("traces", [{"a": 3.0}, {"a": 0.25, "b": 0.25, "c": 0.25}])
def test_layers_that_do_not_differ_score_one_half(traces, epsilon):
    scores, errors = sensitivity_scores(traces, epsilon=epsilon)
    assert scores == pytest.approx(dict.fromkeys(traces, 0.5), abs=1e-6)
    assert errors == dict.fromkeys(traces, 0.0)


def test_a_large_gain_saturates():
    scores, _ = sensitivity_scores(TRACES, kappa=1e4)
    assert scores["layers.0.w1"] == pytest.approx(0) and scores["layers.1.q_proj"] == 1


@pytest.mark.parametrize(
    ("trace", "error", "resolved"),
    [(1.0, 0.0, True), (1.0, 0.499, True), (1.0, 0.5, False), (1.0, 2.0, False)]
    + [(0.0, 0.0, False), (-1.0, 0.0, False), (-1.0, 3.0, False)],
)
def test_resolved_is_two_standard_errors_above_zero(trace, error, resolved):
    assert is_resolved(trace, error) is resolved


def test_an_unresolved_trace_takes_the_smallest_resolved_one():
    traces = {"a": 3.0, "b": -4.0, "c": 0.5, "d": 0.1, "e": 7.0}
    errors = {"a": 0.0, "b": 0.1, "c": 0.2, "d": 0.3, "e": 4.0}
    usable = {"a": 3.0, "b": 0.5, "c": 0.5, "d": 0.5, "e": 0.5}
    usable_errors = {"a": 0.0, "b": 0.2, "c": 0.2, "d": 0.2, "e": 0.2}
    assert sensitivity_scores(traces, errors) == sensitivity_scores(usable, usable_errors)
    positive, small = traces | {"b": 4.0}, dict.fromkeys(traces, 0.04)
    assert sensitivity_scores(positive, small)[0] == sensitivity_scores(positive)[0]
    with pytest.raises(ValueError, match="no layer's trace is known to be positive"):
        sensitivity_scores(traces, dict.fromkeys(traces, 4.0))


@pytest.mark.parametrize("kappa", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("num", [2, 3, 12])
@pytest.mark.parametrize("seed", range(3))
def test_standard_errors_of_the_scores_against_a_simulation(num, kappa, seed):
    """Compare with the scores of simulated traces that vary by their small errors."""
    traces = random_traces(num, seed)
    generator = torch.Generator().manual_seed(100 + seed)
    relative = 0.002 * torch.rand(num, generator=generator, dtype=torch.float64)
    values = torch.tensor(list(traces.values()), dtype=torch.float64)
    noise = torch.randn(4000, num, generator=generator, dtype=torch.float64)
    logs = (values * (1 + relative * noise)).log()
    z = (logs - logs.mean(1, keepdim=True)) / (logs.std(1, correction=0, keepdim=True) + 1e-8)
    simulated = torch.sigmoid(kappa * z).std(0).tolist()
    errors = dict(zip(traces, (values * relative).tolist(), strict=True))
    _, found = sensitivity_scores(traces, errors, kappa=kappa)
    assert list(found) == list(traces)
    # Two layers always have the same two scores, so to first order there is no error.
    assert list(found.values()) == pytest.approx(simulated, rel=0.06, abs=1e-6)


def test_standard_errors_are_linear_and_free_of_units():
    traces = random_traces(6)
    errors = {name: 0.02 * h * (1 + k) for k, (name, h) in enumerate(traces.items())}
    _, found = sensitivity_scores(traces, errors)
    _, doubled = sensitivity_scores(traces, {name: 2 * e for name, e in errors.items()})
    _, scaled = sensitivity_scores(
        {name: 10 * h for name, h in traces.items()},
        {name: 10 * e for name, e in errors.items()},
    )
    assert doubled == pytest.approx({name: 2 * e for name, e in found.items()})
    assert scaled == pytest.approx(found)
    assert all(math.isfinite(e) and e > 0 for e in found.values())
