"""Test the best initial temperature against a brute-force search on the weights themselves."""

import pytest
import references
import torch

from hestia_tune.functional import optimal_temperature
from hestia_tune.methods.hestia import (
    NUM_BINS,
    relaxation_histogram,
    temperature_from_histogram,
)
from hestia_tune.methods.method import SEARCH_RANGE


def relaxation_error(weights, tau: float, group_size) -> float:
    """Return the sum of (w - H(w; tau))^2 over all weights, by Eq. 8."""
    total = 0.0
    for weight in weights:
        weight = weight.double()
        scale = references.eq1_scale(weight, group_size)
        total += (weight - references.eq6_relaxed(weight, scale, tau)).square().sum().item()
    return total


def brute_force(weights, group_size) -> float:
    """Return the best of a logarithmic grid over the range, then of a finer grid around it."""
    low, high = (torch.tensor(bound, dtype=torch.float64).log().item() for bound in SEARCH_RANGE)
    for points in (120, 60):
        grid = torch.linspace(low, high, points, dtype=torch.float64).exp().tolist()
        best = min(grid, key=lambda tau: relaxation_error(weights, tau, group_size))
        spread = (high - low) / (points - 1)
        center = torch.tensor(best).log().item()
        low, high = center - spread, center + spread
    return best


def sample(name: str, out: int = 64, inp: int = 256) -> torch.Tensor:
    torch.manual_seed(0)
    normal = torch.randn(out, inp)
    return {
        "gaussian": normal,
        "uniform": torch.rand(out, inp) - 0.5,
        "laplace": torch.distributions.Laplace(0.0, 0.02).sample((out, inp)),
        "heavy tails": torch.distributions.StudentT(3.0).sample((out, inp)),
        "two humps": torch.randn(out, inp).sign() * (1 + 0.1 * normal),
        "sparse": normal * (torch.rand(out, inp) < 0.3),
        "rows of all sizes": normal * torch.logspace(-4, 1, out).unsqueeze(1),
    }[name]


@pytest.mark.parametrize("group_size", [64, "channel", "tensor"])
@pytest.mark.parametrize(
    "name",
    ["gaussian", "uniform", "laplace", "heavy tails", "two humps", "sparse", "rows of all sizes"],
)
def test_equals_a_brute_force_search(name, group_size):
    """Check an error at most 1e-6 above the least, and tau itself where the minimum is sharp."""
    weights = [sample(name)]
    tau = optimal_temperature(weights[0], group_size=group_size)
    expected = brute_force(weights, group_size)
    least = relaxation_error(weights, expected, group_size)
    assert relaxation_error(weights, tau, group_size) <= least * (1 + 1e-6)
    assert tau == pytest.approx(expected, rel=5e-3)


def test_gaussian_weights_of_any_size_give_0_351():
    torch.manual_seed(0)
    for std in (1e-3, 0.02, 5.0):
        tau = optimal_temperature(std * torch.randn(1024, 1024), group_size="tensor")
        assert tau == pytest.approx(0.351, abs=2e-3)


def test_already_ternary_weights_give_the_least_temperature():
    weight = torch.tensor([1.0, -1.0]).repeat(4, 64)
    assert optimal_temperature(weight) == pytest.approx(SEARCH_RANGE[0], rel=1e-4)


def test_a_list_is_one_model():
    parts = [sample("gaussian")[:16], 3 * sample("laplace")[:40], sample("uniform")[:8]]
    together = optimal_temperature(torch.cat(parts), group_size=64)
    assert optimal_temperature(parts, group_size=64) == pytest.approx(together, rel=1e-9)
    assert optimal_temperature(iter(parts), group_size=64) == pytest.approx(together, rel=1e-9)
    # Larger weights have larger errors, so they count more than in a mean over layers.
    assert brute_force(parts, 64) == pytest.approx(together, rel=5e-3)


def test_histograms_add_up_as_several_processes_would():
    histograms = []
    for half in sample("laplace").chunk(2):
        scale = references.eq1_scale(half, 64).float()
        histograms.append(relaxation_histogram((half.abs() / scale).flatten(), scale.flatten()))
    assert histograms[0].shape == (2, NUM_BINS) and histograms[0].dtype == torch.float64
    tau = temperature_from_histogram(histograms[0] + histograms[1])
    assert tau == pytest.approx(optimal_temperature(sample("laplace"), group_size=64), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_dtype_and_parameters_too(dtype):
    weight = torch.nn.Parameter(sample("gaussian").to(dtype))
    expected = optimal_temperature(sample("gaussian").to(dtype).float())
    assert optimal_temperature(weight) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "weights, message",
    [
        ([], "needs at least one weight; got none"),
        (torch.zeros(4, 128), "not all zero"),
        ([torch.zeros(4, 128), torch.zeros(2, 128)], "not all zero"),
        (torch.full((4, 128), float("nan")), "finite weights; got NaN or infinity"),
        ([torch.ones(4, 128), torch.full((4, 128), float("inf"))], "finite weights; got NaN or"),
        (torch.ones(4, 96), "group_size 128 does not divide in_features 96"),
    ],
)
def test_errors(weights, message):
    with pytest.raises(ValueError, match=message):
        optimal_temperature(weights)
