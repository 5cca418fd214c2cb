"""Compute Fairy2i slowly and obviously, in plain autograd, as a reference.

Legend: A real weight, U and W its widely-linear pair, z a complex entry, theta its angle, k an
axis (angle k·pi/2, code i^k), s_re and s_im scales, tau temperature, p pressure, T stages.
"""

import math

import torch

AXES = tuple(k * math.pi / 2 for k in range(4))


def split(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return U = 1/2·[(A11 + A22) + i(A21 - A12)] and W = 1/2·[(A11 - A22) + i(A12 + A21)]."""
    n, m = a.shape[0] // 2, a.shape[1] // 2
    a11, a12, a21, a22 = a[:n, :m], a[:n, m:], a[n:, :m], a[n:, m:]
    return (
        torch.complex(a11 + a22, a21 - a12) / 2,
        torch.complex(a11 - a22, a12 + a21) / 2,
    )


def merge(u: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return the real matrix of y = U·x + W·conj(x)."""
    return torch.cat(
        [
            torch.cat([u.real + w.real, w.imag - u.imag], dim=1),
            torch.cat([u.imag + w.imag, u.real - w.real], dim=1),
        ]
    )


def wrapped(angle: torch.Tensor) -> torch.Tensor:
    """Return the same angle in [-pi, pi)."""
    return torch.remainder(angle + math.pi, 2 * math.pi) - math.pi


def hard_axis(z: complex) -> int:
    """Return the axis whose sector [k·pi/2 - pi/4, k·pi/2 + pi/4) holds z, and 0 for zero."""
    x, y = z.real, z.imag
    if x == 0 and y == 0:
        return 0
    if -x <= y < x:
        return 0
    if -y < x <= y:
        return 1
    return 2 if x < y <= -x else 3


def hard_axes(z: torch.Tensor) -> torch.Tensor:
    return torch.tensor([[hard_axis(entry) for entry in row] for row in z.tolist()])


def bfloat16(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).to(torch.bfloat16).item()


def scales(z: torch.Tensor, granularity) -> tuple[torch.Tensor, torch.Tensor]:
    """Return s_re = mean|Re z| over entries with a real axis, and s_im likewise; detached."""
    z = z.detach()
    axes = hard_axes(z)
    s_re, s_im = torch.empty_like(z.real), torch.empty_like(z.real)
    n, m = z.shape
    if granularity == "tensor":
        blocks = [(slice(0, n), slice(0, m))]
    else:
        columns = [slice(j, j + granularity) for j in range(0, m, granularity)]
        blocks = [(slice(i, i + 1), column) for i in range(n) for column in columns]
    for block in blocks:
        real = axes[block] % 2 == 0
        for out, part, mask in ((s_re, z.real, real), (s_im, z.imag, ~real)):
            chosen = part[block][mask].abs().tolist()
            mean = math.fsum(chosen) / len(chosen) if chosen else 0.0
            out[block] = bfloat16(max(mean, 1e-8))
    return s_re, s_im


def softmax(z: torch.Tensor, tau: float) -> torch.Tensor:
    """Return pi_k, a softmax over -delta_k^2/tau with wrapped angles delta_k, in a last axis."""
    theta = torch.atan2(z.imag, z.real).unsqueeze(-1)
    delta = wrapped(theta - torch.tensor(AXES, dtype=theta.dtype))
    return torch.softmax(-(delta**2) / tau, dim=-1)


def quantize(z: torch.Tensor, tau: float, granularity) -> torch.Tensor:
    """Return one stage, s_re·(pi_0 - pi_2) + i·s_im·(pi_1 - pi_3). tau 0 gives the hard axis."""
    s_re, s_im = scales(z, granularity)
    if tau == 0:
        pi = torch.nn.functional.one_hot(hard_axes(z), 4).to(s_re.dtype)
    else:
        pi = softmax(z, tau)
    return torch.complex(s_re * (pi[..., 0] - pi[..., 2]), s_im * (pi[..., 1] - pi[..., 3]))


def stages(z: torch.Tensor, tau: float, num_stages: int, granularity) -> torch.Tensor:
    """Quantize, subtract, quantize the remainder, and return the sum."""
    total, residual = 0, z
    for _ in range(num_stages):
        output = quantize(residual, tau, granularity)
        total, residual = total + output, residual - output
    return total


def quantized(a: torch.Tensor, tau: float, num_stages: int = 2, granularity="tensor"):
    """Return the real weight of the quantized pair."""
    return merge(*(stages(z, tau, num_stages, granularity) for z in split(a)))


def effective(a, tau: float, p: float, num_stages: int = 2, granularity="tensor"):
    """Return (1 - p)·A + p·H(A; tau), differentiable in A; straight-through where tau is 0."""
    value = quantized(a, tau, num_stages, granularity)
    if tau == 0:
        value = a + (value - a).detach()
    return (1 - p) * a + p * value
