"""Hutch++ against matrices whose trace is known, and its products against an explicit Hessian."""

import pytest
import torch
import torch.nn.functional as F

from hestia_tune.sensitivity.hutchpp import hutchpp
from hestia_tune.sensitivity.hvp import double_backward_attention, hessian_matvecs


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def symmetric(dim, rank, seed=0):
    factor = torch.randn(dim, rank, generator=generator(seed), dtype=torch.float64)
    signs = torch.tensor([1.0, -0.5]).repeat(rank)[:rank].double()
    return factor @ torch.diag(signs) @ factor.t()


@pytest.mark.parametrize("rank", [1, 4, 10])
def test_exact_when_the_sketch_covers_the_matrix(rank):
    matrix = symmetric(40, rank)
    estimate = hutchpp(
        lambda v: matrix @ v, 40, rank=10, num_probes=2, generator=generator(), dtype=torch.float64
    )
    assert estimate.trace == pytest.approx(matrix.trace().item(), rel=1e-9)
    assert estimate.standard_error < 1e-9


def test_unbiased_with_an_honest_standard_error():
    matrix = symmetric(30, 30)
    estimates = [
        hutchpp(
            lambda v: matrix @ v,
            30,
            rank=3,
            num_probes=8,
            generator=generator(seed),
            dtype=torch.float64,
        )
        for seed in range(400)
    ]
    errors = torch.tensor([e.trace for e in estimates]) - matrix.trace()
    stated = torch.tensor([e.standard_error for e in estimates]).square().mean().sqrt()
    assert errors.mean().abs() < 4 * errors.std() / 400**0.5
    assert stated == pytest.approx(errors.std().item(), rel=0.15)


def test_settings_out_of_range():
    with pytest.raises(ValueError, match="num_probes >= 2"):
        hutchpp(lambda v: v, 4, num_probes=1, generator=generator())


def test_products_equal_the_explicit_hessian_block():
    """Two linears around attention: each block is that of its own weight alone."""
    w1 = torch.randn(4, 4, generator=generator(1), dtype=torch.float64, requires_grad=True)
    w2 = torch.randn(3, 4, generator=generator(2), dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 5, 4, generator=generator(3), dtype=torch.float64)
    target = torch.tensor([0, 1, 2, 0, 1] * 2)

    def loss(a, b):
        h = F.scaled_dot_product_attention(x @ a.t(), x, x, is_causal=True)
        return F.cross_entropy((h @ b.t()).flatten(0, 1), target)

    with double_backward_attention():
        matvecs = hessian_matvecs(loss(w1, w2), {"w1": w1, "w2": w2})
        blocks = torch.autograd.functional.hessian(loss, (w1, w2))
        for name, block in (("w1", blocks[0][0]), ("w2", blocks[1][1])):
            dim = block.shape[0] * block.shape[1]
            vectors = torch.eye(dim, dtype=torch.float64)
            columns = torch.stack([matvecs[name](v) for v in vectors], 1)
            torch.testing.assert_close(columns, block.reshape(dim, dim), rtol=1e-9, atol=1e-12)
