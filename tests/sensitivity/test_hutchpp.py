"""Hutch++ on matrices whose trace is known."""

from typing import NamedTuple

import pytest
import torch
from references import eq10_hutchpp

from hestia_tune.sensitivity.curvature import hutchpp, rademacher


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def symmetric(dim, rank, seed=0):
    """Return a symmetric, indefinite matrix of rank ``rank``."""
    factor = torch.randn(dim, rank, generator=generator(seed), dtype=torch.float64)
    signs = torch.tensor([1.0, -0.5]).repeat(rank)[:rank].double()
    return factor @ torch.diag(signs) @ factor.t()


def decaying(dim, seed=0):
    """Return a symmetric matrix with eigenvalues 1/k^2, some negative."""
    basis = torch.linalg.qr(torch.randn(dim, dim, generator=generator(seed)).double())[0]
    values = torch.arange(1, dim + 1).double() ** -2
    values[1::3] *= -1
    return basis @ torch.diag(values) @ basis.t()


class TraceEstimate(NamedTuple):
    trace: float
    standard_error: float
    probes: int


def estimate(matrix, seed=0, *, dtype=torch.float64, **settings):
    found = hutchpp(
        lambda vectors: [matrix @ v() for v in vectors],
        lambda vectors: [float(v @ matrix @ v) for v in (vector() for vector in vectors)],
        torch.empty(len(matrix), dtype=dtype),
        generator=generator(seed),
        **settings,
    )
    return TraceEstimate(*found)


@pytest.mark.parametrize("rank", [1, 4, 10])
@pytest.mark.parametrize("sketch", [10, 13])
def test_the_trace_is_exact_when_the_sketch_covers_the_matrix(rank, sketch):
    """Check sketches that are wider than the rank too; their columns depend on each other."""
    matrix = symmetric(40, rank)
    for seed in range(5):
        found = estimate(matrix, seed, rank=sketch, num_probes=2)
        assert found.trace == pytest.approx(matrix.trace().item(), rel=1e-9)
        assert found.standard_error < 1e-9


@pytest.mark.parametrize("dim", [1, 2, 7])
def test_the_trace_is_exact_when_the_sketch_is_wider_than_the_matrix(dim):
    found = estimate(symmetric(dim, dim), rank=10, num_probes=3)
    assert found.trace == pytest.approx(symmetric(dim, dim).trace().item(), rel=1e-9)
    assert found.standard_error < 1e-9


def test_a_matrix_of_zeros_has_trace_zero():
    found = estimate(torch.zeros(6, 6, dtype=torch.float64), rank=3, num_probes=4)
    assert found.trace == 0 and found.standard_error == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("dim", "rank", "num_probes"), [(20, 3, 2), (12, 4, 5), (30, 10, 20)])
def test_the_estimate_equals_eq10(dim, rank, num_probes, seed):
    matrix, source = symmetric(dim, dim, seed), generator(seed)
    like = torch.empty(dim, dtype=torch.float64)
    vectors = [rademacher(like, source) for _ in range(rank + num_probes)]
    expected = eq10_hutchpp(matrix, torch.stack(vectors[:rank], 1), torch.stack(vectors[rank:], 1))
    found = estimate(matrix, seed, rank=rank, num_probes=num_probes)
    assert found.trace == pytest.approx(expected, rel=1e-9)


def test_probes_are_signs():
    signs = rademacher(torch.empty(10_000), generator())
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert abs(signs.mean().item()) < 4 / 10_000**0.5


def test_the_trace_of_a_diagonal_matrix_is_exact_without_a_sketch():
    matrix = torch.diag(torch.randn(12, generator=generator(), dtype=torch.float64))
    found = estimate(matrix, rank=0, num_probes=2)
    assert found.trace == pytest.approx(matrix.trace().item()) and found.standard_error < 1e-12


@pytest.mark.parametrize(
    ("matrix", "rank"), [(symmetric(30, 30), 3), (decaying(30), 4), (symmetric(30, 30), 0)]
)
def test_the_estimate_is_unbiased_and_its_errors_cover_as_often_as_they_should(matrix, rank):
    """Check 20 probes; 94% of normal errors are within 2 standard errors (t, 19)."""
    num = 600
    found = [estimate(matrix, seed, rank=rank, num_probes=20) for seed in range(num)]
    errors = torch.tensor([e.trace for e in found]).double() - matrix.trace()
    stated = torch.tensor([e.standard_error for e in found]).double()
    assert errors.mean().abs() < 4 * errors.std() / num**0.5
    assert stated.square().mean().sqrt().item() == pytest.approx(errors.std().item(), rel=0.12)
    covered = (errors.abs() < 2 * stated).double().mean().item()
    assert 0.91 < covered < 0.97
    covered = (errors.abs() < stated).double().mean().item()
    assert 0.61 < covered < 0.73  # 67%


def test_a_sketch_helps_if_the_eigenvalues_decay():
    matrix = decaying(40)
    spread = {}
    for rank, probes in ((10, 10), (0, 30)):  # 30 products each
        found = [estimate(matrix, s, rank=rank, num_probes=probes).trace for s in range(100)]
        spread[rank] = torch.tensor(found).double().std().item()
    assert spread[10] < 0.2 * spread[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [0, 1, 5])
def test_the_numbers_of_products_and_forms_are_as_documented(rank, dtype):
    matrix = symmetric(12, 12).to(dtype)
    counts = {"products": 0, "forms": 0}

    def products(vectors):
        for vector in vectors:
            counts["products"] += 1
            yield (matrix @ vector()).reshape(3, 4)  # A product may have the shape of a weight.

    def forms(vectors):
        counts["forms"] += len(vectors)
        return [float(v @ matrix @ v) for v in (vector() for vector in vectors)]

    like = torch.empty(3, 4, dtype=dtype)
    source = generator(3)
    found = TraceEstimate(
        *hutchpp(products, forms, like, rank=rank, num_probes=4, generator=source)
    )
    expected = estimate(matrix, 3, rank=rank, num_probes=4, dtype=dtype)
    assert found.trace == pytest.approx(expected.trace, rel=1e-5)
    assert found.standard_error == pytest.approx(expected.standard_error, rel=1e-4)
    assert counts == {"products": rank, "forms": rank + 4}
    assert found.probes == 2 * rank + 4


def test_the_estimate_depends_only_on_the_generator():
    matrix = symmetric(20, 20)
    first, again, other = (estimate(matrix, s, rank=2, num_probes=3) for s in (1, 1, 2))
    assert first == again and first.trace != other.trace
