"""Hutch++: the trace of a symmetric matrix from products with vectors (Eq. 10).

A sketch of rank r catches the large eigenvalues, whose part of the trace is then exact; random
+-1 probes estimate what is left. Cost: 2·rank + num_probes products and, in memory, the sketch of
(dim, rank).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class TraceEstimate:
    """A trace and its standard error, both in the units of the matrix."""

    trace: float
    standard_error: float


def _rademacher(dim: int, generator: torch.Generator, like: torch.Tensor) -> torch.Tensor:
    bits = torch.randint(0, 2, (dim,), generator=generator, device=generator.device)
    return (2 * bits - 1).to(like)


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
    if rank < 0 or num_probes < 2:
        raise ValueError(f"rank must be >= 0 and num_probes >= 2; got {rank} and {num_probes}")
    like = torch.empty(0, dtype=dtype, device=device)
    columns = [matvec(_rademacher(dim, generator, like)) for _ in range(min(rank, dim))]
    basis = torch.linalg.qr(torch.stack(columns, 1))[0] if columns else like.new_zeros(dim, 0)
    exact = sum(float(q @ matvec(q)) for q in basis.unbind(1))
    rest = []
    for _ in range(num_probes):
        g = _rademacher(dim, generator, like)
        g = g - basis @ (basis.t() @ g)
        rest.append(float(g @ matvec(g)))
    values = torch.tensor(rest, dtype=torch.float64)
    return TraceEstimate(
        trace=exact + values.mean().item(),
        standard_error=values.std().item() / num_probes**0.5,
    )
