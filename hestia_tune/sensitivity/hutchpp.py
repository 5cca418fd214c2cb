"""Hutch++: the trace of a symmetric matrix from products with vectors (Eq. 10).

A sketch of rank r catches the large eigenvalues, whose part of the trace is then exact; random
+-1 probes estimate what is left. Cost: 2·rank + num_probes products and, in memory, the sketch of
(dim, rank).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

# Makes a vector when it is needed: they are as large as the weights.
Vector = Callable[[], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class TraceEstimate:
    """A trace and its standard error, in the units of the matrix, and the products behind them."""

    trace: float
    standard_error: float
    probes: int


def rademacher(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A vector of random signs from the generator, (like.numel(),), dtype and device of ``like``"""
    signs = torch.empty(like.numel(), dtype=like.dtype, device=generator.device)
    return signs.bernoulli_(0.5, generator=generator).mul_(2).sub_(1).to(like.device)


def hutchpp(
    products: Callable[[Sequence[Vector]], Iterable[torch.Tensor]],
    quadratic_forms: Callable[[Sequence[Vector]], list[float]],
    like: torch.Tensor,
    *,
    rank: int,
    num_probes: int,
    generator: torch.Generator,
) -> TraceEstimate:
    """h = Tr(Q^T H Q) + Tr(G^T (I - Q Q^T) H (I - Q Q^T) G)/num_probes (Eq. 10).

    Exact when ``rank`` covers the rank of the symmetric (dim, dim) matrix H, unbiased always.

    Args:
        products: functions that make vectors (dim,) -> H v of each, dim numbers, in order.
        quadratic_forms: functions that make vectors (dim,) -> v^T H v of each, which may be
            cheaper than a product.
        like: a tensor with dim entries, and the dtype and the device of the vectors.
        rank: columns of the sketch; capped at dim.
        num_probes: Rademacher probes G for the rest, at least 2 (for a standard error).
        generator: source of the sketch and the probes.
    """
    rank = min(rank, like.numel())
    basis = like.new_empty(like.numel(), rank)
    exact = 0.0
    if rank:
        random = [lambda: rademacher(like, generator)] * rank
        for k, product in enumerate(products(random)):
            basis[:, k] = product.flatten()
        basis = torch.linalg.qr(basis)[0]  # (dim, rank)
        exact = sum(quadratic_forms([lambda k=k: basis[:, k] for k in range(rank)]))

    def deflated() -> torch.Tensor:
        probe = rademacher(like, generator)
        return probe - basis @ (basis.t() @ probe)  # (I - Q Q^T) g: (dim,)

    rest = torch.tensor(quadratic_forms([deflated] * num_probes), dtype=torch.float64)
    return TraceEstimate(
        trace=exact + rest.mean().item(),
        standard_error=rest.std().item() / num_probes**0.5,
        probes=2 * rank + num_probes,
    )
