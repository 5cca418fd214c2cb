"""Test the Fairy2i method against the formulas: values, gradients, limits, codes, compilation."""

import pytest
import references_fairy2i as references
import torch
import torch.nn.functional as F

from hestia_tune.methods import Method, effective_weight, quantized_linear
from hestia_tune.methods.fairy2i import Fairy2iMethod, dequantize_codes

GRANULARITIES = ["tensor", 4, 16]
STAGES = [1, 2, 3, 4]
TAUS = [0.02, 0.3, 2.0, 50.0]
PRESSURES = [0.0, 0.3, 1.0]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(6, 32), (2, 64), (34, 32)]


def make_weight(seed=0, shape=(6, 32), dtype=torch.float64, std=0.7):
    generator = torch.Generator().manual_seed(seed)
    return (std * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def make_method(num_stages=2, granularity="tensor"):
    return Fairy2iMethod(num_stages=num_stages, granularity=granularity)


def value_and_grad(function, weight, seed=9):
    weight = weight.detach().requires_grad_()
    value = function(weight)
    grad = make_weight(seed, value.shape, value.dtype, 1.0)
    return value.detach(), torch.autograd.grad(value, weight, grad)[0]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("tau", [0.0, *TAUS])
def test_value_and_gradient_equal_plain_autograd(tau, num_stages, granularity):
    method = make_method(num_stages, granularity)
    for seed, pressure in enumerate(PRESSURES):
        weight = make_weight(seed, SHAPES[seed])
        got = value_and_grad(lambda w, p=pressure: effective_weight(w, tau, p, method), weight)
        expected = value_and_grad(
            lambda w, p=pressure: references.effective(w, tau, p, num_stages, granularity), weight
        )
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tau", TAUS)
def test_low_precision_loses_only_its_rounding(tau, dtype):
    """Compare with float32. The test leaves out entries near 0, where rounding turns the angle."""
    method = make_method()
    for seed in range(3):
        weight = make_weight(seed, dtype=dtype)
        value, grad = value_and_grad(lambda w: effective_weight(w, tau, 0.8, method), weight)
        assert value.dtype == grad.dtype == dtype
        expected = value_and_grad(lambda w: references.effective(w, tau, 0.8), weight.double())
        rounding = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(value.double(), expected[0], rtol=rounding, atol=2e-4)
        if dtype == torch.float32 and tau >= 0.3:
            torch.testing.assert_close(grad.double(), expected[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("granularity", ["tensor", 2])
@pytest.mark.parametrize("num_stages", STAGES)
def test_gradcheck(num_stages, granularity):
    """Check gradients numerically. Scales rounded to bfloat16 do not move under steps of 1e-8."""
    method = make_method(num_stages, granularity)
    for seed, (tau, pressure) in enumerate([(0.3, 1.0), (0.1, 0.6), (2.0, 1.0)]):
        weight = make_weight(seed + 10, (4, 8)).requires_grad_()
        scalars = torch.tensor([tau, pressure], dtype=torch.float64).unbind()
        assert torch.autograd.gradcheck(
            lambda w, s=scalars: effective_weight(w, *s, method),
            weight,
            eps=1e-8,
            rtol=1e-4,
            atol=1e-6,
        )


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("num_stages", STAGES)
def test_the_hard_weight_equals_the_formulas(num_stages, granularity):
    method = make_method(num_stages, granularity)
    for seed, shape in enumerate(SHAPES):
        weight = make_weight(seed, shape)
        expected = references.quantized(weight, 0, num_stages, granularity)
        torch.testing.assert_close(method.hard(weight), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("num_stages", STAGES)
def test_codes_and_scales_give_the_hard_weight_back_bit_for_bit(num_stages, granularity, dtype):
    method = make_method(num_stages, granularity)
    for seed, shape in enumerate(SHAPES):
        weight = make_weight(seed, shape, dtype)
        n, m = shape[0] // 2, shape[1] // 2
        codes, scales = method.codes(weight)
        assert codes.dtype == torch.int8 and scales.dtype == torch.bfloat16
        assert codes.shape == (num_stages, 2, n, m)
        grid = (1, 1) if granularity == "tensor" else (n, m // granularity)
        assert scales.shape == (num_stages, 2, 2, *grid)
        assert set(codes.unique().tolist()) <= {0, 1, 2, 3} and (scales > 0).all()
        hard, back = method.hard(weight), dequantize_codes(codes, scales, dtype)
        straight_through = effective_weight(weight, 0.0, 1.0, method)
        for other in (back, straight_through):
            assert other.dtype == dtype
            assert torch.equal(other.view(torch.int16), hard.view(torch.int16))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_codes_are_the_axes_of_the_formulas(granularity):
    weight = make_weight(3, (8, 32))
    codes, scales = make_method(2, granularity).codes(weight)
    for j, z in enumerate(references.split(weight)):
        for stage in range(2):
            assert torch.equal(codes[stage, j].long(), references.hard_axes(z))
            width = z.shape[1] // scales.shape[-1]
            for got, expected in zip(
                scales[stage, j], references.scales(z, granularity), strict=True
            ):
                spread = got.double().repeat_interleave(width, 1).expand_as(expected)
                assert torch.equal(spread, expected)
            z = z - references.quantize(z, 0, granularity)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_low_precision_hard_weight_is_the_float32_one_rounded_once(dtype):
    method = make_method(4)
    weight = make_weight(0, (8, 64), torch.bfloat16)
    exact = method.hard(weight.float())
    assert torch.equal(method.hard(weight.to(dtype)), exact.to(dtype))


def test_more_stages_leave_less():
    weight = make_weight(0, (64, 128))
    errors = [(weight - make_method(t).hard(weight)).square().mean().item() for t in STAGES]
    assert errors == sorted(errors, reverse=True) and errors[1] < 0.4 * errors[0]


@pytest.mark.parametrize("num_stages", STAGES)
def test_annealing_ends_at_the_hard_weight(num_stages):
    method, weight = make_method(num_stages), make_weight(5, (16, 32))
    hard = method.hard(weight)
    errors = [
        (effective_weight(weight, tau, 1.0, method) - hard).abs().mean().item()
        for tau in (1.0, 0.1, 0.01, 1e-3, 1e-6, 1e-30)
    ]
    assert errors[-1] == 0 and errors == sorted(errors, reverse=True)


def test_infinite_temperature_forgets_the_weight():
    """Check that all axes are equally likely, so that every axis cancels its opposite."""
    value = effective_weight(make_weight(), 1e9, 1.0, make_method())
    assert value.abs().max() < 1e-7


def test_pressure_zero_is_the_weight_itself_and_blends_in_between():
    method, weight = make_method(), make_weight()
    latent, half, full = (effective_weight(weight, 0.3, p, method) for p in (0.0, 0.5, 1.0))
    assert torch.equal(latent, weight)
    torch.testing.assert_close(half, 0.5 * (weight + full))


def test_straight_through_gradient_is_the_identity_to_the_last_bit():
    for pressure in PRESSURES:
        weight = make_weight(dtype=torch.float32).requires_grad_()
        grad = make_weight(1, dtype=torch.float32)
        value = effective_weight(weight, 0.0, pressure, make_method())
        assert torch.equal(torch.autograd.grad(value, weight, grad)[0], grad)


def test_int_granularity_shares_scales_within_a_row_and_its_partner_only():
    """Check that only rows i and n + i, columns j..j+g and m + j..m + j + g change."""
    method, weight = make_method(granularity=4), make_weight(0, (6, 32))
    changed = weight.clone()
    changed[1, 5] += 3.0
    for tau in (0.0, 0.3):
        before, after = (effective_weight(w, tau, 1.0, method) for w in (weight, changed))
        rows, columns = (before != after).nonzero().unbind(1)
        assert len(rows) and set(rows.tolist()) <= {1, 4}
        assert {c % 16 for c in columns.tolist()} <= {4, 5, 6, 7}


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_saves_only_the_weight(num_stages):
    weight = make_weight(shape=(64, 64), dtype=torch.float32).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        effective_weight(weight, 0.3, 0.5, make_method(num_stages))
    assert [x.data_ptr() for x in saved if x.dim()] == [weight.data_ptr()]
    assert all(x.numel() == 1 for x in saved if not x.dim())


def linear(x, weight, bias, tau, pressure):
    return quantized_linear(x, weight, bias, tau, pressure, make_method())


@pytest.mark.parametrize("tau, pressure", [(0.3, 0.6), (0.0, 1.0)])
def test_the_linear_equals_autograd_of_the_formulas(tau, pressure):
    inputs = [
        make_weight(s, shape).requires_grad_() for s, shape in enumerate([(3, 32), (6, 32), (6,)])
    ]
    scalars = torch.tensor([tau, pressure], dtype=torch.float64).unbind()
    ours = linear(*inputs, *scalars)
    plain = F.linear(inputs[0], references.effective(inputs[1], tau, pressure), inputs[2])
    grad = make_weight(7, (3, 6))
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(plain, inputs, grad)
    )


@pytest.mark.slow
def test_the_compiled_linear_saves_its_input_and_the_weight_and_is_hard_to_the_last_bit():
    x, weight, bias = (
        make_weight(s, shape, torch.float32).requires_grad_()
        for s, shape in enumerate([(3, 64), (48, 64), (48,)])
    )
    compiled = torch.compile(linear, fullgraph=True)
    grad = make_weight(7, (3, 48), torch.float32)
    for tau, pressure in ((0.3, 0.7), (0.05, 1.0), (0.0, 1.0)):
        scalars = torch.tensor([tau, pressure]).unbind()
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # noqa: B023
            got = compiled(x, weight, bias, *scalars)
        assert {t.data_ptr() for t in saved if t.dim()} == {x.data_ptr(), weight.data_ptr()}
        expected = linear(x, weight, bias, *scalars)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            torch.autograd.grad(got, (x, weight, bias), grad),
            torch.autograd.grad(expected, (x, weight, bias), grad),
            rtol=1e-3,
            atol=1e-3,
        )
    assert torch.equal(got, F.linear(x, make_method().hard(weight), bias))


def test_travels_as_its_key():
    assert make_method().key() == "fairy2i, num_stages=2, granularity=tensor"
    assert Method.from_key("fairy2i, num_stages=2") == Fairy2iMethod()
    for method in (make_method(), make_method(3, 8)):
        again = Method.from_key(method.key())
        assert again == method and hash(again) == hash(method)


def test_layers_are_checked_by_name():
    make_method().check_layer(64, 48, "q_proj")
    make_method(granularity=32).check_layer(64, 48, "q_proj")
    with pytest.raises(ValueError, match="got 64 and 47 of q_proj; .*skip_incompatible"):
        make_method().check_layer(64, 47, "q_proj")
    message = r"granularity 24 does not divide the 32 .*of q_proj; use one that does, or \"tensor\""
    with pytest.raises(ValueError, match=message):
        make_method(granularity=24).check_layer(64, 48, "q_proj")


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "from 1 to 4; got 0", lambda w: make_method(0)),
        (ValueError, "from 1 to 4; got 5", lambda w: make_method(5)),
        (TypeError, "num_stages must be an int", lambda w: make_method(2.0)),
        (TypeError, "num_stages must be an int", lambda w: make_method(True)),
        (ValueError, 'must be "tensor" or a positive int', lambda w: make_method(2, "row")),
        (ValueError, "got 0", lambda w: make_method(2, 0)),
        (TypeError, "granularity must be", lambda w: make_method(2, 4.0)),
        (TypeError, "granularity must be", lambda w: make_method(2, True)),
        (ValueError, "shape", lambda w: make_method().hard(w[0])),
        (ValueError, "got 31 and 6", lambda w: make_method().hard(w[:, :31])),
        (ValueError, "does not divide", lambda w: make_method(2, 5).codes(w)),
        (
            ValueError,
            "tau must be at least 0",
            lambda w: effective_weight(w, -1.0, 1.0, make_method()),
        ),
    ],
)
def test_errors(error, message, call):
    with pytest.raises(error, match=message):
        call(make_weight())
