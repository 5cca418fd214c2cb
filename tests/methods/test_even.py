"""Test Hestia's relaxation with two and four levels against Eqs. 7 to 9."""

import pytest
import torch

from hestia_tune import HestiaConfig
from hestia_tune.methods import EvenMethod, Method, effective_weight
from hestia_tune.methods.groups import SYMMETRIC, least_squares_scale, mean_scale

METHODS = [
    EvenMethod(group_size=8),
    EvenMethod(group_size="tensor"),
    EvenMethod(group_size=8, codebook="int2"),
    EvenMethod(group_size="channel", codebook="int2"),
]


def weight(seed=0, shape=(6, 32), dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (0.7 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def reference(method, w, tau, pressure):
    """Return (1 - p)·w + p·s·sum of q·softmax(-(w/s - q)^2/tau), with s detached."""
    blocks = method.blocks(w)
    if method.codebook == "binary":
        s, levels = mean_scale(blocks), torch.tensor([-1.0, 1.0], dtype=w.dtype)
    else:
        s = 2 * least_squares_scale(blocks, SYMMETRIC)
        levels = torch.tensor([-1.5, -0.5, 0.5, 1.5], dtype=w.dtype)
    logits = -(((blocks / s).unsqueeze(-1) - levels) ** 2) / tau
    relaxed = s * (logits.softmax(-1) * levels).sum(-1)
    return ((1 - pressure) * blocks + pressure * relaxed).view_as(w)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("tau", [0.02, 0.3, 2.0, 50.0])
@pytest.mark.parametrize("pressure", [0.0, 0.3, 1.0])
def test_values_and_gradients_equal_the_softmax(method, tau, pressure):
    w, other = (weight(1).requires_grad_() for _ in range(2))
    found, expected = (
        effective_weight(w, tau, pressure, method),
        reference(method, other, tau, pressure),
    )
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
    found.backward(upstream := weight(2))
    expected.backward(upstream)
    torch.testing.assert_close(w.grad, other.grad, rtol=1e-8, atol=1e-11)


def test_two_levels_are_a_hyperbolic_tangent():
    method, w = EvenMethod(group_size="channel"), weight()
    gamma = mean_scale(method.blocks(w)).view(-1, 1)
    found = effective_weight(w, 0.4, 1.0, method)
    torch.testing.assert_close(found, gamma * torch.tanh(2 * w / (gamma * 0.4)), rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_limits_codes_and_a_second_quantization(method, dtype):
    w = weight(3, dtype=dtype).requires_grad_()
    hard = method.hard(w.detach())
    straight = effective_weight(w, 0.0, 1.0, method)
    straight.backward(upstream := weight(4, dtype=dtype))
    assert torch.equal(straight, hard) and torch.equal(w.grad, upstream)
    for tau in (1e-3, 1e-12, 1e-30):
        cold = effective_weight(w, tau, 1.0, method)
        assert cold.isfinite().all()
        z = (w / hard).detach()  # 1 at a level
        away = (z - 1).abs() < 0.2
        torch.testing.assert_close(cold[away], hard[away], rtol=1e-2, atol=1e-6)
        (grad,) = torch.autograd.grad(cold.sum(), w)
        assert grad.isfinite().all()
    codes, scales = method.codes(w.detach())
    blocks = codes.reshape(*scales.shape, -1) * scales.unsqueeze(-1).to(dtype)
    assert torch.equal(blocks.reshape(w.shape), hard)
    assert torch.equal(hard.to(torch.bfloat16).to(dtype), hard)
    assert torch.equal(method.hard(hard), hard)
    assert Method.from_key(method.key()) == method


def test_temperature_that_fits_and_options():
    w = torch.randn(16, 128, generator=torch.Generator().manual_seed(0))
    for method in (EvenMethod(), EvenMethod(codebook="int2")):
        tau = method.fit_temperature([w])
        errors = [(w - effective_weight(w, t, 1.0, method)).square().sum() for t in (tau, 2 * tau)]
        assert 0.01 < tau < 2 and errors[0] < errors[1]
    assert HestiaConfig(codebook="int2", group_size=64).method().levels == SYMMETRIC
    for make, message in (
        (lambda: HestiaConfig(codebook="int2", scale="learned"), "options of the codebook ternary"),
        (lambda: EvenMethod(codebook="int3"), 'codebook must be "binary" or "int2"; got \'int3\''),
        (lambda: EvenMethod(codebook="int2", group_size="tensor"), "the codebook int2 needs"),
        (lambda: HestiaConfig(codebook="binary", target="ternary"), 'one of "dense", "binary"'),
    ):
        with pytest.raises(ValueError, match=message):
            make()
