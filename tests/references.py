"""Compute the paper's equations slowly and obviously, in plain autograd, as a reference.

Legend: w weight, g scale (gamma), q code, tau temperature, p pressure, t step, T total steps, rho
compress ratio, alpha sensitivity strength, s sensitivity score, h Hessian trace.
"""

import math

import torch

CODES = (-1.0, 0.0, 1.0)


def groups(w: torch.Tensor, group_size) -> torch.Tensor:
    """Return every set of weights that shares a scale, as a row."""
    if group_size == "tensor":
        return w.reshape(1, -1)
    if group_size == "channel":
        return w
    return w.reshape(-1, group_size)


def eq1_scale(w: torch.Tensor, group_size) -> torch.Tensor:
    """Return g = mean|w| + 1e-8 per group, rounded to bfloat16, detached; shaped like w."""
    rows = groups(w.detach().double(), group_size)
    scale = (rows.abs().mean(1, keepdim=True) + 1e-8).to(torch.bfloat16).double()
    return scale.expand_as(rows).reshape(w.shape)


def eq2_hard(w: torch.Tensor, group_size) -> torch.Tensor:
    """Return g · clip(round(w/g), -1, 1)."""
    scale = eq1_scale(w, group_size)
    return scale * torch.clip(torch.round(w.double() / scale), -1, 1)


def eq5_softmax(w: torch.Tensor, scale: torch.Tensor, tau: float) -> torch.Tensor:
    """Return pi(q|w) for the three codes, in a last axis."""
    z = (w / scale).unsqueeze(-1)
    codes = torch.tensor(CODES, dtype=w.dtype)
    return torch.softmax(-((z - codes) ** 2) / tau, dim=-1)


def eq6_relaxed(w: torch.Tensor, scale: torch.Tensor, tau: float) -> torch.Tensor:
    """Return H(w; tau) = g · sum of q·pi(q|w)."""
    codes = torch.tensor(CODES, dtype=w.dtype)
    return scale * (eq5_softmax(w, scale, tau) * codes).sum(-1)


def eq7_effective(w: torch.Tensor, tau: float, p: float, group_size) -> torch.Tensor:
    """Return (1 - p)·w + p·H(w; tau), differentiable only in w."""
    return (1 - p) * w + p * eq6_relaxed(w, eq1_scale(w, group_size).to(w.dtype), tau)


def lemma1_slope(w: torch.Tensor, scale: torch.Tensor, tau: float) -> torch.Tensor:
    """Return dH/dw = (2/tau)·(E[q^2] - E[q]^2)."""
    pi, codes = eq5_softmax(w, scale, tau), torch.tensor(CODES, dtype=w.dtype)
    return (2 / tau) * ((pi * codes**2).sum(-1) - (pi * codes).sum(-1) ** 2)


def eq8_pressure(t: int, T: int, rho: float) -> float:
    return 1.0 if rho == 0 else min(1.0, t / (rho * T))


def eq12_base_temperature(t: int, T: int, rho: float, tau_init: float) -> float:
    """Return a constant while the pressure rises, then half a cosine down to 0 at T."""
    t_comp = rho * T
    if t == T:
        return 0.0
    if t < t_comp:
        return tau_init
    return tau_init / 2 * (1 + math.cos(math.pi * (t - t_comp) / (T - t_comp)))


def eq13_temperature(t, T, rho, tau_init, alpha, s) -> float:
    return eq12_base_temperature(t, T, rho, tau_init) * math.exp(alpha * s)


def eq11_scores(h: list[float], kappa: float = 1.0, eps: float = 1e-8) -> list[float]:
    """Return sigmoid(kappa · (log h - mean) / (std + eps))."""
    logs = torch.tensor(h, dtype=torch.float64).log()
    z = (logs - logs.mean()) / (logs.std(correction=0) + eps)
    return torch.sigmoid(kappa * z).tolist()


def eq10_hutchpp(h: torch.Tensor, sketch: torch.Tensor, probes: torch.Tensor) -> float:
    """Return Tr(Q^T H Q) + Tr(G^T (I - QQ^T) H (I - QQ^T) G)/m.

    Q is an orthonormal basis of H·sketch. h is (d, d), sketch (d, r), and the probes G (d, m).
    """
    q = torch.linalg.qr(h @ sketch)[0]
    rest = torch.eye(len(h), dtype=h.dtype) - q @ q.t()
    deflated = probes.t() @ rest @ h @ rest @ probes
    return float((q.t() @ h @ q).trace() + deflated.trace() / probes.shape[1])


# All the ways to transpose a matrix in torch.
TRANSPOSES = (
    lambda w: w.t(),
    lambda w: w.T,
    lambda w: w.mT,
    lambda w: w.transpose(0, 1),
    lambda w: w.transpose(-1, 0),
    lambda w: w.permute(1, 0),
    lambda w: w.permute(-1, -2),
)
