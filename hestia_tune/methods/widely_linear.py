"""A real matrix as a widely-linear complex map, and back.

A real weight (2n, 2m) acts on x = (x1, x2) as y = U·x + W·conj(x) acts on x1 + i·x2, with one pair
of complex (n, m) matrices:

    A = [[A11, A12], [A21, A22]]
    U = 1/2·[(A11 + A22) + i(A21 - A12)]        A11 = Re U + Re W    A12 = Im W - Im U
    W = 1/2·[(A11 - A22) + i(A12 + A21)]        A21 = Im U + Im W    A22 = Re U - Re W

Rows i and n + i, and columns j and m + j, share an entry of U and W. The map is linear, lossless
and, up to the factor 2, orthogonal: the adjoint of `merge` is 2·`split`, that of `split` is
`merge`/2. So a gradient travels through merge(f(split(A))) as merge(f'(split(gradient))).

U and W travel stacked, as their real and imaginary parts: bfloat16 has no complex type.
"""

import torch

Complex = tuple[torch.Tensor, torch.Tensor]


def add(a: Complex, b: Complex) -> Complex:
    return a[0] + b[0], a[1] + b[1]


def subtract(a: Complex, b: Complex) -> Complex:
    return a[0] - b[0], a[1] - b[1]


def check_even(in_features: int, out_features: int, name: str = "the weight") -> None:
    """Raises ValueError, naming the layer and what to do, if a dimension is odd."""
    if in_features % 2 or out_features % 2:
        raise ValueError(
            f"a complex weight needs even in_features and out_features; got {in_features} and "
            f"{out_features} of {name}; leave the layer out with `exclude`, or set "
            "`skip_incompatible: true`"
        )


def split(weight: torch.Tensor) -> Complex:
    """The widely-linear pair of a real matrix.

    Args:
        weight: (2n, 2m), any floating-point dtype, any strides.

    Returns:
        The real and the imaginary parts, each (2, n, m) in the dtype of ``weight``: first U,
        then W.

    Raises:
        ValueError: if ``weight`` is not a matrix, or has an odd dimension.
    """
    if weight.dim() != 2:
        raise ValueError(
            f"weight must have the shape (out_features, in_features); got {tuple(weight.shape)}"
        )
    check_even(weight.shape[1], weight.shape[0])
    top, bottom = weight.chunk(2)
    (a11, a12), (a21, a22) = top.chunk(2, 1), bottom.chunk(2, 1)
    # A broadcast sign in place of `torch.stack`, which a compiler would write to memory.
    sign = 1 - 2 * torch.arange(2, dtype=weight.dtype, device=weight.device).view(2, 1, 1)
    return 0.5 * (a11 + sign * a22), 0.5 * (a21 - sign * a12)


def merge(re: torch.Tensor, im: torch.Tensor) -> torch.Tensor:
    """The real (2n, 2m) matrix of a pair, each entry one sum of two numbers; undoes `split`.

    Args:
        re, im: (2, n, m), first U, then W.
    """
    left = torch.cat([re[0] + re[1], im[1] + im[0]])
    right = torch.cat([im[1] - im[0], re[0] - re[1]])
    return torch.cat([left, right], dim=1)
