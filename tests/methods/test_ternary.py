"""Test the ternary method against the equations: values, gradients, limits, ties, memory."""

import pytest
import torch
from references import eq1_scale, eq2_hard, eq6_relaxed, eq7_effective, lemma1_slope

from hestia_tune.functional import hard_ternary, relaxed_ternary, ternary_codes
from hestia_tune.methods import TernaryMethod

GROUP_SIZES = [1, 4, 32, "channel", "tensor"]
TAUS = [0.02, 0.3, 0.351, 2.0, 50.0]
PRESSURES = [0.0, 0.3, 1.0]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def weight(seed=0, shape=(6, 64), dtype=torch.float64, std=0.7):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * std).to(dtype)


def scalar(value):
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_effective_weight_equals_equation_7(group_size, tau, dtype):
    for seed, pressure in enumerate(PRESSURES):
        w = weight(seed, dtype=dtype)
        expected = eq7_effective(w.double(), tau, pressure, group_size)
        actual = relaxed_ternary(w, tau, pressure, group_size=group_size)
        assert actual.dtype == dtype
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("tau", TAUS)
def test_gradient_equals_autograd_of_the_reference(group_size, tau):
    for seed, pressure in enumerate(PRESSURES):
        upstream = weight(seed + 10)
        w, w_ref = (weight(seed).requires_grad_() for _ in range(2))
        relaxed_ternary(w, tau, pressure, group_size=group_size).backward(upstream)
        eq7_effective(w_ref, tau, pressure, group_size).backward(upstream)
        torch.testing.assert_close(w.grad, w_ref.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("tau", [0.05, 0.3, 2.0])
def test_gradcheck_with_the_scale_held_fixed(tau, monkeypatch):
    """Hold gamma fixed. Finite differences would move it, but the gradient treats it as fixed."""
    from hestia_tune.methods import groups, hestia

    w = weight(shape=(2, 8)).requires_grad_()
    fixed = groups.mean_scale(w.detach().unflatten(1, (-1, 4)))
    monkeypatch.setattr(hestia, "mean_scale", lambda *_, **__: fixed)
    assert torch.autograd.gradcheck(lambda v: relaxed_ternary(v, tau, 0.6, group_size=4), (w,))


def test_lemma_1_in_float32_where_assignments_are_confident():
    """Check the slope where the difference E[q^2] - E[q]^2 would be only rounding error."""
    w = weight(shape=(64, 64), dtype=torch.float32).requires_grad_()
    relaxed_ternary(w, 0.05, group_size=64).sum().backward()
    w64 = w.detach().double()
    expected = lemma1_slope(w64, eq1_scale(w64, 64), 0.05)
    assert expected.min() < 1e-6 and expected.max() > 5
    large = expected > 1e-10  # Below, the reference itself has no digits left.
    torch.testing.assert_close(w.grad.double()[large], expected[large], rtol=2e-3, atol=0.0)


def test_lemma_2_the_slope_concentrates_at_the_boundary():
    """Check that the integral of dH/dw over a boundary tends to gamma for every interval."""
    gamma = 1.0
    method = TernaryMethod(group_size="tensor")
    grid = torch.linspace(0.4, 0.6, 200_001, dtype=torch.float64).view(1, -1)
    # One more weight makes the mean, and so the scale, exactly 1.
    rest = grid.numel() + 1 - grid.sum()
    w = torch.cat([grid, rest.view(1, 1)], 1)
    assert method.codes(w)[1].item() == gamma
    for tau, share in ((0.03, 0.99), (0.01, 0.999999)):
        slope = method.vjp(torch.ones_like(w), w, scalar(tau), scalar(1.0))[0][0, :-1]
        integral = torch.trapezoid(slope, grid[0])
        assert share * gamma < integral < gamma


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tau", [1e-2, 1e-3, 1e-6, 1e-12, 1e-30, 1e-37])
def test_small_temperatures_are_stable_and_tend_to_hard(dtype, tau):
    w = weight(shape=(16, 64), dtype=dtype).requires_grad_()
    out = relaxed_ternary(w, tau, group_size=32)
    out.sum().backward()
    assert torch.isfinite(out).all() and torch.isfinite(w.grad).all()
    z = (w / eq1_scale(w, 32)).detach().abs()
    away = (z - 0.5).abs() > max(60 * tau, 1e-6)
    assert away.float().mean() > 0.3
    expected = hard_ternary(w.detach(), group_size=32)
    torch.testing.assert_close(out.detach()[away], expected[away], rtol=1e-6, atol=1e-6)


def test_large_temperature_tends_to_zero_and_linear():
    w = weight()
    out = relaxed_ternary(w, 1e6, group_size=32)
    # All codes equally likely: H -> gamma · (2/tau) · (2/3) · z.
    torch.testing.assert_close(out, 4 / 3 / 1e6 * w, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_pressure_is_the_latent_weight_exactly(dtype):
    w = weight(dtype=dtype).requires_grad_()
    out = relaxed_ternary(w, 0.3, 0.0, group_size=32)
    out.backward(upstream := weight(5, dtype=dtype))
    assert torch.equal(out, w) and torch.equal(w.grad, upstream)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_no_temperature_is_hard_with_a_straight_through_gradient(dtype, group_size):
    w = weight(dtype=dtype).requires_grad_()
    out = relaxed_ternary(w, 0.0, 1.0, group_size=group_size)
    out.backward(upstream := weight(5, dtype=dtype))
    assert torch.equal(out, hard_ternary(w.detach(), group_size=group_size))
    assert torch.equal(w.grad, upstream)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_hard_equals_equation_2_and_codes_times_scales(group_size, dtype):
    for seed in range(5):
        w = weight(seed, shape=(8, 128), dtype=dtype)
        hard = hard_ternary(w, group_size=group_size)
        assert torch.equal(hard.double(), eq2_hard(w, group_size))
        codes, scales = ternary_codes(w, group_size=group_size)
        assert codes.dtype == torch.int8 and codes.shape == w.shape
        assert scales.dtype == torch.bfloat16
        blocks = codes.reshape(*scales.shape, -1) * scales.unsqueeze(-1).to(dtype)
        assert torch.equal(blocks.reshape(w.shape), hard)
        assert set(codes.unique().tolist()) <= {-1, 0, 1}


def test_scale_shapes():
    w = weight(shape=(6, 64))
    shapes = {g: tuple(ternary_codes(w, group_size=g)[1].shape) for g in (16, "channel", "tensor")}
    assert shapes == {16: (6, 4), "channel": (6, 1), "tensor": (1, 1)}


def test_ties_are_zero():
    """Check that ±0.5 give 0 at mean|w| = 1, like rounding half to even."""
    w = torch.tensor([[0.5, -0.5, 0.5 + 2**-20, -0.5 - 2**-20, 2.0, 2.0 - 2**-19]])
    codes, scales = ternary_codes(w, group_size="tensor")
    assert scales.item() == 1.0
    assert codes.tolist() == [[0, 0, 1, -1, 1, 1]]


def test_zero_groups_and_denormals():
    w = torch.zeros(2, 64)
    w[1, :32] = 1e-40
    w.requires_grad_()
    out = relaxed_ternary(w, 0.3, group_size=32)
    out.sum().backward()
    assert torch.isfinite(out).all() and torch.isfinite(w.grad).all()
    assert torch.equal(out[0], torch.zeros(64))
    assert hard_ternary(w.detach(), group_size=32).count_nonzero() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_are_not_hidden(bad):
    w = weight(dtype=torch.float32)
    w[2, 3] = bad
    assert not torch.isfinite(relaxed_ternary(w, 0.3, group_size=32)[2, :32]).all()
    assert torch.isfinite(relaxed_ternary(w, 0.3, group_size=32)[2, 32:]).all()


def test_scale_does_not_depend_on_the_order_of_the_weights():
    """Check scales in two orders. The last bits of a float32 sum would change with the order."""
    w = weight(shape=(512, 128), dtype=torch.float32)
    shuffled = w[:, torch.randperm(128, generator=torch.Generator().manual_seed(1))]
    expected, actual = (ternary_codes(v, group_size=128)[1] for v in (w, shuffled))
    assert torch.equal(expected, actual)


def test_non_contiguous_weights():
    w = weight(shape=(64, 32))
    assert torch.equal(
        relaxed_ternary(w.t(), 0.3, group_size=16),
        relaxed_ternary(w.t().contiguous(), 0.3, group_size=16),
    )


def test_floats_and_tensors_are_the_same():
    w = weight(dtype=torch.float32)
    expected = relaxed_ternary(w, 0.25, 0.5, group_size=32)
    actual = relaxed_ternary(w, torch.tensor(0.25), torch.tensor(0.5), group_size=32)
    assert torch.equal(expected, actual)


def test_saves_only_the_weight():
    w = weight(shape=(64, 64), dtype=torch.float32).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        relaxed_ternary(w, 0.3, 0.5, group_size=32)
    assert [x.data_ptr() for x in saved if x.dim()] == [w.data_ptr()]
    assert all(x.numel() == 1 for x in saved if not x.dim())


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "group_size must be a positive int", lambda w: hard_ternary(w, group_size=0)),
        (ValueError, "group_size must be", lambda w: hard_ternary(w, group_size="rows")),
        (TypeError, "group_size must be", lambda w: hard_ternary(w, group_size=32.0)),
        (TypeError, "group_size must be", lambda w: hard_ternary(w, group_size=True)),
        (ValueError, "48 does not divide in_features 64", lambda w: hard_ternary(w, group_size=48)),
        (ValueError, r"tau must be at least 0", lambda w: relaxed_ternary(w, -0.1)),
        (ValueError, "tau must be at least 0", lambda w: relaxed_ternary(w, float("nan"))),
        (ValueError, r"pressure must be in \[0, 1\]", lambda w: relaxed_ternary(w, 0.3, 1.1)),
        (TypeError, "tau must be a number", lambda w: relaxed_ternary(w, "hot")),
        (TypeError, "0-D tensor", lambda w: relaxed_ternary(w, torch.ones(2))),
        (TypeError, "floating-point tensor", lambda w: hard_ternary(w.int(), group_size=32)),
        (ValueError, "shape", lambda w: hard_ternary(w[0], group_size=32)),
    ],
)
def test_errors(error, message, call):
    with pytest.raises(error, match=message):
        call(weight())


def learned(group_size=4):
    return TernaryMethod(group_size=group_size, scale="learned")


@pytest.mark.parametrize("tau", [0.05, 0.3, 2.0])
@pytest.mark.parametrize("pressure", [0.4, 1.0])
def test_gradients_of_a_learned_scale_equal_autograd(tau, pressure):
    """Check gamma = 2·sigmoid(t)·start, rounded to bfloat16. The gradient passes unchanged."""
    w = weight(shape=(3, 8)).requires_grad_()
    logit, start = learned().initial_parameters(w)
    logit = (logit.double() + torch.randn(3, 2, dtype=torch.float64) * 0.3).requires_grad_()
    start = start.double()
    grad = torch.randn(3, 8, dtype=torch.float64)
    exact = 2 * torch.sigmoid(logit) * start
    rounded = exact.detach().to(torch.bfloat16).double()
    scale = exact + (rounded - exact).detach()
    gamma = scale.repeat_interleave(4, dim=1)
    expected = (1 - pressure) * w + pressure * eq6_relaxed(w, gamma, tau)
    expected.backward(grad)
    scalars = (torch.tensor(v, dtype=torch.float64) for v in (tau, pressure))
    parameters = (logit.detach(), start)
    method = learned()
    found = method.effective_weight(w.detach(), *scalars, parameters)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-12)
    scalars = (torch.tensor(v, dtype=torch.float64) for v in (tau, pressure))
    grad_w, grad_logit, grad_start = method.vjp(grad, w.detach(), *scalars, parameters)
    torch.testing.assert_close(grad_w, w.grad, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(grad_logit, logit.grad, rtol=1e-7, atol=1e-10)
    assert not grad_start.any()


def test_a_learned_scale_starts_as_the_mean_and_is_exported():
    w = weight(shape=(6, 8)).float()
    method, plain = learned(), TernaryMethod(group_size=4)
    parameters = method.initial_parameters(w)
    assert torch.equal(method.hard(w, parameters), plain.hard(w))
    moved = parameters[0] + 0.7, parameters[1]
    codes, scale = method.codes(w, moved)
    hard = method.hard(w, moved)
    assert torch.equal((codes.unflatten(1, (-1, 4)) * scale.unsqueeze(-1)).flatten(1).float(), hard)
    assert method.key() == "ternary, group_size=4, scale=learned"
    assert plain.key() == "ternary, group_size=4"
    assert type(method).from_key(method.key()) == method
    with pytest.raises(ValueError, match="scales that lie within rows"):
        TernaryMethod(group_size="tensor", scale="learned")


@pytest.mark.parametrize("tau", [0.05, 0.3, 2.0])
@pytest.mark.parametrize("scale", ["absmean", "learned"])
@pytest.mark.parametrize(("threshold", "offset"), [("learned", "learned"), ("half", "learned")])
def test_gradients_of_threshold_and_offset_equal_autograd(tau, scale, threshold, offset):
    """Check H = gamma·mu((w - o·g)/delta), with mu the relaxed code of Eq. 8 at scale 1.

    delta is 2·sigmoid(s)·g or gamma.
    """
    method = TernaryMethod(group_size=4, scale=scale, threshold=threshold, offset=offset)
    w = weight(shape=(3, 8)).requires_grad_()
    generator = torch.Generator().manual_seed(1)
    start = method.initial_parameters(w)[-1].double()
    values = {
        name: (0.3 * torch.randn(3, 2, dtype=torch.float64, generator=generator)).requires_grad_()
        for name in method.trained_parameters
    }
    over_row = lambda value: value.repeat_interleave(4, dim=1)  # noqa: E731
    gamma = w.detach().abs().unflatten(1, (2, 4)).mean(-1) + 1e-8
    if scale == "learned":
        gamma = 2 * torch.sigmoid(values["scale_logit"]) * start
    gamma = gamma + (gamma.to(torch.bfloat16).double() - gamma).detach()
    delta = gamma
    if threshold == "learned":
        delta = 2 * torch.sigmoid(values["threshold_logit"]) * start
    u = (w - over_row(values["offset"] * start)) / over_row(delta)
    expected = over_row(gamma) * eq6_relaxed(u, torch.ones_like(u), tau)
    grad = torch.randn(3, 8, dtype=torch.float64, generator=generator)
    expected.backward(grad)
    scalars = [torch.tensor(v, dtype=torch.float64) for v in (tau, 1.0)]
    parameters = (*(value.detach() for value in values.values()), start)
    found = method.effective_weight(w.detach(), *scalars, parameters)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-12)
    grads = method.vjp(grad, w.detach(), *scalars, parameters)
    for own, value in zip(grads, (w, *values.values()), strict=False):
        torch.testing.assert_close(own, value.grad, rtol=1e-7, atol=1e-10)
    assert len(grads) == len(parameters) + 1 and not grads[-1].any()


def test_threshold_and_offset_choose_the_codes_and_the_scale_alone_multiplies():
    method = TernaryMethod(group_size=4, scale="learned", threshold="learned", offset="learned")
    w = torch.tensor([[0.2, -0.7, 0.45, -0.3]])
    one = torch.ones(1, 1)
    codes, scale = method.codes(w, (0 * one, 0 * one, 0 * one, one))
    assert codes.tolist() == [[0, -1, 0, 0]] and scale.item() == 1.0
    lower = torch.logit(torch.tensor([[0.25]]))  # threshold sigmoid(s)·g
    assert method.codes(w, (0 * one, lower, 0 * one, one))[0].tolist() == [[0, -1, 1, -1]]
    codes, scale = method.codes(w, (one, 0 * one, -0.4 * one, one))  # by w + 0.4
    assert codes.tolist() == [[1, 0, 1, 0]]
    assert scale.item() == pytest.approx(2 * torch.sigmoid(torch.tensor(1.0)).item(), rel=2**-8)


@pytest.mark.parametrize("group_size", [8, "channel"])
def test_the_least_squares_start_has_no_better_scale_beside_it(group_size):
    w = weight(shape=(4, 16)).float()
    method = TernaryMethod(group_size=group_size, scale="learned", start="least_squares")
    *_, start = method.initial_parameters(w)
    blocks = w.unflatten(1, (start.shape[1], -1))

    def error(scale):  # of the nearest codes
        codes = (blocks / scale).round().clamp(-1, 1)
        return (blocks - scale * codes).square().sum(-1)

    least = error(start.unsqueeze(-1))
    for scale in torch.linspace(0.01, float(w.abs().max()), 400):
        assert (least <= error(scale) * 1.001 + 1e-9).all()  # The scale is rounded to bfloat16.
    absmean = TernaryMethod(group_size=group_size)
    assert (w - method.hard(w, method.initial_parameters(w))).square().sum() < (
        w - absmean.hard(w)
    ).square().sum()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": "third"}, 'threshold must be "half" or "learned"; got \'third\''),
        ({"start": "least_squares"}, "nothing is learned; set scale: learned"),
        ({"offset": "learned", "group_size": "tensor"}, "scales that lie within rows"),
    ],
)
def test_errors_of_learned_parameters(options, message):
    with pytest.raises(ValueError, match=message):
        TernaryMethod(**options)


def test_the_hard_limit_of_a_learned_scale_is_a_straight_through_rounding():
    """Check d(gamma·round(w/gamma))/dgamma at tau 0: round(z) - z, or the code where clipped."""
    w = torch.tensor([[0.2, -0.7, 1.2, -3.0]], dtype=torch.float64)
    parameters = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    zero, one = torch.tensor(0.0), torch.tensor(1.0)
    *_, grad_logit, _ = learned().vjp(torch.ones_like(w), w, zero, one, parameters)
    # dgamma/dt = 2·start·s·(1 - s) = 1/2 at t = 0
    assert grad_logit.item() == pytest.approx(0.5 * (-0.2 - 0.3 - 0.2 - 1.0))


@pytest.mark.parametrize("group_size", [4, "channel", "tensor"])
def test_a_hard_weight_stays_as_it_is(group_size):
    method = TernaryMethod(group_size=group_size)
    hard = method.hard(weight(shape=(6, 8)).float())
    assert torch.equal(method.hard(hard), hard)
    codes, scale = method.codes(hard)
    again = method.codes(method.hard(hard))
    assert torch.equal(codes, again[0]) and torch.equal(scale, again[1])
    nudged = hard.clone()
    nudged[0, 0] = hard.abs().max() * 1.01  # no longer ternary
    assert not torch.equal(method.hard(nudged), nudged)
