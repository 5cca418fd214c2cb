"""Test the method of two bits and four levels against the softmax over its codebook."""

import pytest
import torch

from hestia_tune import TwoBitConfig
from hestia_tune.methods import Method, TernaryMethod, TwoBitMethod, effective_weight
from hestia_tune.methods.groups import (
    TWO_BIT,
    find_codes,
    is_hard,
    least_squares_scale,
    nearest_code,
)

CODES = torch.tensor([-1.0, 0.0, 1.0, 2.0], dtype=torch.float64)
DYNAMIC = TwoBitMethod(group_size=8)
LEARNED = TwoBitMethod(group_size=8, scale="learned", start="least_squares")
METHODS = [DYNAMIC, LEARNED, TwoBitMethod(group_size="channel", start=1.1)]


def weight(seed=0, shape=(6, 32), dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (0.7 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def scalars(*values, dtype=torch.float64):
    return [torch.tensor(value, dtype=dtype) for value in values]


def rounded(scale):
    """Return numbers with six significant bits, ties to even."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp((mantissa * 64).round(), exponent - 6)


def scales(method, w, parameters):
    """Return the scales (rows, groups, 1) by their definition, before they are rounded."""
    if method.scale == "learned":
        logit, start = parameters
        return (2 * torch.sigmoid(logit) * start).unsqueeze(-1)
    return parameters[0].unsqueeze(-1) * method.blocks(w).detach().abs().mean(-1, keepdim=True)


def reference(method, w, tau, pressure, parameters):
    """Return (1 - p)·w + p·s·sum of q·softmax(-(w/s - q)^2/tau). s is rounded, straight-through."""
    exact = scales(method, w, parameters).double()
    s = exact + (rounded(exact) - exact).detach()
    blocks = method.blocks(w)
    logits = -(((blocks / s).unsqueeze(-1) - CODES) ** 2) / tau
    relaxed = s * (logits.softmax(-1) * CODES).sum(-1)
    return ((1 - pressure) * blocks + pressure * relaxed).view_as(w)


def moved(method, w, seed=3):
    """Return parameters that are not those of the start, in float64."""
    parameters = [value.double() for value in method.initial_parameters(w)]
    if method.scale == "learned":
        parameters[0] = weight(seed, parameters[0].shape)
    return parameters


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("tau", [0.02, 0.3, 2.0, 50.0])
@pytest.mark.parametrize("pressure", [0.0, 0.3, 1.0])
def test_values_and_gradients_equal_the_softmax(method, tau, pressure):
    w, other = (weight(1).requires_grad_() for _ in range(2))
    parameters = moved(method, w)
    assert {value.sign().unique().numel() for value in parameters[-1:]} == {2}  # both signs
    trained = [value.clone().requires_grad_() for value in parameters]
    found = method.effective_weight(w.detach(), *scalars(tau, pressure), parameters)
    expected = reference(method, other, tau, pressure, trained)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-11, atol=1e-13)
    expected.backward(upstream := weight(2))
    grads = method.vjp(upstream, w.detach(), *scalars(tau, pressure), parameters)
    torch.testing.assert_close(grads[0], other.grad, rtol=1e-8, atol=1e-11)
    assert len(grads) == len(parameters) + 1 and not grads[-1].any()
    if method.scale == "learned":
        torch.testing.assert_close(grads[1], trained[0].grad, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("tau", [0.05, 0.3, 2.0])
def test_gradcheck(tau):
    w = weight(shape=(2, 16)).requires_grad_()
    parameters = moved(LEARNED, w)  # The scale does not depend on w.
    assert torch.autograd.gradcheck(
        lambda v: effective_weight(v, tau, 0.6, LEARNED, parameters), (w,)
    )


def test_lemma_1_in_float32_where_assignments_are_confident():
    w = weight(shape=(64, 64))
    parameters = moved(DYNAMIC, w)
    (slope,) = DYNAMIC.vjp(
        torch.ones_like(w).float(), w.float(), *scalars(0.05, 1.0), [p.float() for p in parameters]
    )[:1]
    (expected,) = DYNAMIC.vjp(
        torch.ones_like(w), w.float().double(), *scalars(0.05, 1.0), parameters
    )[:1]
    large = expected > 1e-10
    assert expected.min() < 1e-6 and expected.max() > 5
    torch.testing.assert_close(slope.double()[large], expected[large], rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("group", [4, 32])
def test_no_scale_of_either_sign_leaves_a_smaller_error(seed, group):
    blocks = weight(seed, (5, 3, group)) + 0.2 * (seed - 1)

    def error(scale):  # of the nearest codes
        return (blocks.unsqueeze(-1) - scale.unsqueeze(-1) * CODES).square().amin(-1).sum(-1)

    found = least_squares_scale(blocks, TWO_BIT)
    least = error(found.double())
    slack = 3e-4 * blocks.square().sum(-1)  # A scale is rounded by up to 1/64.
    for scale in torch.linspace(-3, 3, 1201, dtype=torch.float64):
        assert (least <= error(scale.view(1, 1, 1)) + slack).all()
    mirrored = error(-least_squares_scale(-blocks, TWO_BIT).double())
    assert ((mirrored - least).abs() <= slack).all()


def test_the_fourth_code_leaves_two_thirds_of_the_ternary_error():
    w = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    for method, expected in (
        (TwoBitMethod(group_size=64, start="least_squares"), 0.122),
        (TernaryMethod(group_size=64, scale="learned", start="least_squares"), 0.182),
    ):
        hard = method.hard(w, method.initial_parameters(w))
        assert (w - hard).square().sum() / w.square().sum() == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_codes_are_the_nearest_and_ties_go_inwards(sign):
    scale = sign * torch.tensor([[1.5]])
    w = sign * torch.tensor([[-9, -0.76, -0.75, 0, 0.75, 0.76, 2.25, 2.26, 9]])
    assert nearest_code(w, scale, TWO_BIT).tolist() == [[-1, -1, 0, 0, 0, 1, 1, 2, 2]]
    with pytest.raises(ValueError, match=r"no rounding to the codes \(-2, -1, 1, 2\)"):
        nearest_code(w, scale, (-2, -1, 1, 2))
    w = weight(5).float()
    codes = nearest_code(w, scale, TWO_BIT)
    assert torch.equal(codes.double(), CODES[((w / scale).unsqueeze(-1) - CODES).abs().argmin(-1)])
    assert nearest_code(w * torch.nan, scale, TWO_BIT).isnan().all()
    assert nearest_code(w, scale * torch.nan, TWO_BIT).isnan().all()


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_limits_and_codes(method, dtype):
    w = weight(3, dtype=dtype)
    parameters = [value.float() for value in moved(method, w)]
    hard = method.hard(w, parameters)
    tau, one = scalars(0.0, 1.0, dtype=torch.float32)
    assert torch.equal(method.effective_weight(w, tau, one, parameters), hard)
    upstream = weight(4, dtype=dtype)
    assert torch.equal(method.vjp(upstream, w, tau, one, parameters)[0], upstream)
    assert torch.equal(method.effective_weight(w, one, tau, parameters), w)  # no pressure
    for value in (1e-3, 1e-12, 1e-30):
        (cold,) = scalars(value, dtype=torch.float32)
        soft = method.effective_weight(w, cold, one, parameters)
        grads = method.vjp(upstream, w, cold, one, parameters)
        assert soft.isfinite().all() and all(grad.isfinite().all() for grad in grads)
        codes, scale = method.codes(w, parameters)
        z = method.blocks(w) / scale.unsqueeze(-1).float()
        away = (((z - z.floor()) - 0.5).abs() > 0.1).view_as(w)
        torch.testing.assert_close(soft[away], hard[away], rtol=1e-2, atol=1e-6)
    assert set(codes.unique().tolist()) == {-1, 0, 1, 2} and scale.dtype == torch.bfloat16
    product = method.blocks(codes.to(dtype)) * scale.unsqueeze(-1).float()
    assert torch.equal(product.view_as(w).to(dtype), hard)
    assert torch.equal(hard.to(torch.bfloat16).to(dtype), hard)


def test_large_temperature_tends_to_the_mean_code():
    w = weight()
    parameters = moved(LEARNED, w)
    tau, one = scalars(1e6, 1.0)
    s = rounded(scales(LEARNED, w, parameters)).expand(-1, -1, 8).reshape(w.shape)
    found = LEARNED.effective_weight(w, tau, one, parameters)
    torch.testing.assert_close(found, s.double() * 0.5, rtol=1e-4, atol=1e-5)


def test_the_slope_of_a_learned_scale_at_temperature_0():
    """Check round(z) - z within -1.5 to 2.5 scales, and the code beyond."""
    method = TwoBitMethod(group_size="channel", scale="learned")
    w = torch.tensor([[0.2, -0.7, 1.2, -3.0, 2.2, 4.0]], dtype=torch.float64)
    parameters = scalars([[0.0]], [[1.0]])
    *_, by_logit, _ = method.vjp(torch.ones_like(w), w, *scalars(0.0, 1.0), parameters)
    # ds/dt = 2·start·sigmoid·(1 - sigmoid) = 1/2 at t = 0
    assert by_logit.item() == pytest.approx(0.5 * (-0.2 - 0.3 - 0.2 - 1.0 - 0.2 + 2.0))


def test_the_scale_follows_the_mean_and_keeps_its_share_and_sign():
    w = weight().float()
    parameters = DYNAMIC.initial_parameters(w)
    blocks, (codes, scale) = DYNAMIC.blocks(w), DYNAMIC.codes(w, parameters)
    best = least_squares_scale(blocks, TWO_BIT).squeeze(-1)
    torch.testing.assert_close(scale.float(), 0.75 * best, rtol=2**-6, atol=0)
    doubled, twice = DYNAMIC.codes(2 * w, parameters)
    assert torch.equal(twice, 2 * scale) and torch.equal(doubled, codes)
    learned = TwoBitMethod(group_size=8, scale="learned")
    assert torch.equal(DYNAMIC.hard(w, parameters), learned.hard(w, learned.initial_parameters(w)))


@pytest.mark.parametrize("method", [*METHODS, TwoBitMethod(group_size=8, scale="learned")], ids=str)
@pytest.mark.parametrize("std", [1e-5, 0.02, 3.0])
def test_a_hard_weight_keeps_its_values(method, std):
    """Check random hard weights: all codes, ternary ones, only zeros, only one value."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-1, 3, (8, 32), generator=generator).float()
    codes[1] = codes[1].clamp(max=1)
    codes[2] = 0
    codes[3] = 2 * (codes[3] > 0)
    codes[4] = -1
    scale = rounded(std * torch.randn(8, 1, generator=generator))
    source = codes * scale
    assert is_hard(source, 8, TWO_BIT) and find_codes(source[:2]) == (TWO_BIT, "channel")
    parameters = method.initial_parameters(source)
    assert torch.equal(method.hard(source, parameters), source)
    tau, one = scalars(0.0, 1.0, dtype=torch.float32)
    assert torch.equal(method.effective_weight(source, tau, one, parameters), source)
    source[0, :8] = source[0, 0] * torch.tensor([1, 1.5, 1, 1, 1, 1, 1, 1])
    if source[0, 0]:
        assert not torch.equal(method.hard(source, method.initial_parameters(source)), source)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_rows_are_quantized_as_in_the_whole_weight(method):
    w = weight(shape=(7, 32), dtype=torch.float32)
    tau, one = scalars(0.3, 1.0, dtype=torch.float32)
    parameters = method.initial_parameters(w)
    whole = method.effective_weight(w, tau, one, parameters)
    for rows in (slice(0, 3), slice(3, 7)):
        part = method.initial_parameters(w[rows])
        assert all(torch.equal(a, b[rows]) for a, b in zip(part, parameters, strict=True))
        assert torch.equal(method.effective_weight(w[rows], tau, one, part), whole[rows])


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_zero_groups_tiny_scales_and_numbers_that_are_not_finite(method):
    w = torch.zeros(4, 32)
    w[1] = 1e-40
    parameters = method.initial_parameters(w)
    w[2], w[3, 3] = 5.0, torch.nan  # After the start: the scale of row 2 may be at its bound.
    for value in (1e-30, 0.3):
        tau, one = scalars(value, 1.0, dtype=torch.float32)
        found = method.effective_weight(w, tau, one, parameters)
        grads = method.vjp(torch.ones_like(w), w, tau, one, parameters)
        assert found[:3].isfinite().all() and grads[0][:3].isfinite().all()
        assert found[0].abs().max() < 1e-12 and found[3, :8].isnan().any()
    assert not method.hard(w, parameters)[:2].any()


def test_a_group_that_was_tiny_grows_as_any_other():
    """Its scale starts at the bound, which is huge beside its weights."""
    method = TwoBitMethod(group_size=32)
    for size in (1e-30, 1e-20, 1e-12):
        parameters = method.initial_parameters(torch.full((1, 32), size) * torch.rand(1, 32))
        w = 1e-3 * torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
        tau, one = scalars(0.3, 1.0, dtype=torch.float32)
        assert method.effective_weight(w, tau, one, parameters).abs().max() < 0.01


def test_temperature_that_fits_key_and_options():
    w = torch.randn(16, 128, generator=torch.Generator().manual_seed(0))
    for method in (TwoBitMethod(), TwoBitMethod(scale="learned", start=1.0)):
        parameters = method.initial_parameters(w)
        tau = method.fit_temperature([w])
        errors = [
            (w - effective_weight(w, t, 1.0, method, parameters)).square().sum()
            for t in (tau / 2, tau, 2 * tau)
        ]
        assert 0.01 < tau < 2 and errors[1] == min(errors)
        assert Method.from_key(method.key()) == method
    assert TwoBitMethod().key() == "two_bit, group_size=128"
    assert Method.from_key(LEARNED.key()) == LEARNED
    assert TwoBitConfig(group_size=64, scale="learned").method().scale == "learned"
    for options, message in (
        ({"group_size": "tensor"}, "a scale with a sign needs scales that lie within rows"),
        ({"scale": "mean"}, 'scale must be "absmean" or "learned"; got \'mean\''),
        ({"start": 0}, "start must be above 0"),
        ({"start": 3.0}, "start must be"),
        ({"start": "absmean"}, "start must be a number"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            TwoBitMethod(**options)
