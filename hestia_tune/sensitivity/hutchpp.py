"""Hutch++: the trace of a symmetric matrix from products with vectors (Eq. 10).

A sketch of rank r catches the large eigenvalues, whose part of the trace is then exact; random
+-1 probes estimate what is left. Cost: 2·rank + num_probes products and, in memory, the sketch of
(dim, rank).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

Vector = Callable[[], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class TraceEstimate:
    """A trace and its standard error, both in the units of the matrix."""

    trace: float
    standard_error: float


def rademacher(dim: int, generator: torch.Generator, like: torch.Tensor) -> torch.Tensor:
    """A (dim,) vector of random signs on the generator's device, in the dtype of ``like``."""
    signs = torch.empty(dim, dtype=like.dtype, device=generator.device)
    return signs.bernoulli_(0.5, generator=generator).mul_(2).sub_(1).to(like.device)


def hutchpp(
    matvec: Callable[[torch.Tensor], torch.Tensor],
    dim: int,
    *,
    rank: int = 10,
    num_probes: int = 20,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> TraceEstimate:
    """h = Tr(Q^T H Q) + Tr(G^T (I - Q Q^T) H (I - Q Q^T) G)/num_probes (Eq. 10).

    Exact when ``rank`` covers the rank of the matrix, unbiased always.

    Args:
        matvec: v -> H v for a symmetric H, (dim,) to (dim,).
        dim: size of H.
        rank: columns of the sketch; capped at ``dim``.
        num_probes: Rademacher probes for the rest, at least 2 (for a standard error).
        generator: source of the sketch and the probes.
        dtype, device: of the vectors.

    Raises:
        ValueError: if ``rank`` is negative or ``num_probes`` is below 2.
    """
    return hutchpp_by_forms(
        lambda vectors: (matvec(vector()) for vector in vectors),
        lambda vectors: [float(v @ matvec(v)) for v in (vector() for vector in vectors)],
        dim,
        rank=rank,
        num_probes=num_probes,
        generator=generator,
        like=torch.empty(0, dtype=dtype, device=device),
    )


def hutchpp_by_forms(
    products: Callable[[Sequence[Vector]], Iterable[torch.Tensor]],
    quadratic_forms: Callable[[Sequence[Vector]], list[float]],
    dim: int,
    *,
    rank: int,
    num_probes: int,
    generator: torch.Generator,
    like: torch.Tensor,
) -> TraceEstimate:
    """`hutchpp` for a matrix whose quadratic forms v^T H v are cheaper than its products.

    Args:
        products: functions that make vectors (dim,) -> H v of each, in order.
        quadratic_forms: functions that make vectors (dim,) -> v^T H v of each.
        like: a tensor with the dtype and the device of the vectors.
    """
    if rank < 0 or num_probes < 2:
        raise ValueError(f"rank must be >= 0 and num_probes >= 2; got {rank} and {num_probes}")
    rank = min(rank, dim)
    basis = like.new_empty(dim, rank)
    random: list[Vector] = [lambda: rademacher(dim, generator, like)] * rank
    if rank:
        for k, product in enumerate(products(random)):
            basis[:, k] = product.flatten()
        basis = torch.linalg.qr(basis)[0]
    exact = sum(quadratic_forms([lambda k=k: basis[:, k] for k in range(rank)]) if rank else [])

    def deflated() -> torch.Tensor:
        probe = rademacher(dim, generator, like)
        return probe - basis @ (basis.t() @ probe)

    rest = torch.tensor(quadratic_forms([deflated] * num_probes), dtype=torch.float64)
    return TraceEstimate(
        trace=exact + rest.mean().item(),
        standard_error=rest.std().item() / num_probes**0.5,
    )
