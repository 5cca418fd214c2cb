"""Test methods without a temperature: values, surrogate gradients and scales by definition."""

import math

import pytest
import torch
from references import groups
from torch import nn
from torchao.quantization import quantize_

from hestia_tune import AbsMeanConfig, INT4Config
from hestia_tune.methods import (
    AbsMeanMethod,
    DLTMethod,
    INT2Method,
    INT4Method,
    LSQMethod,
    Method,
    SEQMethod,
    TequilaMethod,
    TernaryMethod,
    TWNMethod,
)
from hestia_tune.methods.groups import (
    BINARY,
    INT4,
    SYMMETRIC,
    TERNARY,
    least_squares_scale,
    round_to_bfloat16,
)
from hestia_tune.qat.linear import QuantizedLinear
from hestia_tune.tensors import read_hard

LEARNED = [
    LSQMethod(group_size=8),
    LSQMethod(group_size="channel", start="least_squares"),
    SEQMethod(group_size=8, start="least_squares"),
    SEQMethod(group_size=8),
    SEQMethod(group_size="channel", bits=2),
    SEQMethod(group_size=8, bits=2, start="least_squares"),
]
METHODS = [
    *(AbsMeanMethod(group_size=g) for g in (8, "channel", "tensor")),
    *(TWNMethod(group_size=g) for g in (8, "tensor")),
    TWNMethod(group_size=8, delta=0.7),
    INT2Method(group_size=8),
    INT2Method(group_size="channel", start="least_squares"),
    INT4Method(group_size=8),
    INT4Method(group_size="channel"),
    *LEARNED,
]
ZERO, ONE = torch.tensor(0.0), torch.tensor(1.0)


def weight(seed=0, shape=(6, 32), dtype=torch.float64, std=0.7):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * std).to(dtype)


def rounded(scale, bits=8):
    """Round to this many significant bits, half to even. The gradient passes."""
    mantissa, exponent = torch.frexp(scale.detach().float().double())
    return scale + ((mantissa * 2**bits).round() / 2**bits * 2.0**exponent - scale).detach()


def four_bits(row):
    """Return the nearest of the hard rows whose scales the method may choose."""
    largest = max(row.tolist(), key=abs)
    candidates = []
    for multiple in (1, 1.03, 0.95, 0.9, 0.85):
        s = rounded(torch.tensor(-multiple * largest / 8), bits=5)
        candidates.append(s * (row / s).round().clip(-8, 7))
    return min(candidates, key=lambda hard: float((row - hard).square().sum()))


def reference(method, w, step=None):
    """Return hard values with surrogate gradients, by definition and autograd; one group a row."""
    rows = groups(w, method.group_size)
    a = None if step is None else step.reshape(-1, 1)
    through = lambda value, x: x + (value - x).detach()  # noqa: E731  the value, with the gradient of x
    size = rows.abs().detach()
    if isinstance(method, AbsMeanMethod):
        gamma = rounded(size.mean(1, keepdim=True) + 1e-8)
        out = through(gamma * (rows / gamma).round().clip(-1, 1), rows)
    elif isinstance(method, TWNMethod):
        keep = size >= method.delta * size.mean(1, keepdim=True)
        scale = rounded((size * keep).sum(1, keepdim=True) / keep.sum(1, keepdim=True))
        out = through(scale * keep * rows.sign(), rows)
    elif isinstance(method, INT2Method) and method.start == "absmax":
        s = rounded(size.amax(1, keepdim=True))
        out = through(s * (rows / s).round().clip(-2, 1), rows)
    elif isinstance(method, INT2Method):
        s = 2 * least_squares_scale(rows, SYMMETRIC)
        out = through(s * ((rows / s - 0.5).round().clip(-2, 1) + 0.5), rows)
    elif isinstance(method, INT4Method):
        out = through(torch.stack([four_bits(row.detach()) for row in rows]), rows)
    else:
        norm = math.sqrt(rows.shape[1])
        a = a / norm + (a - a / norm).detach()  # the gradient scale of LSQ
        if isinstance(method, LSQMethod):
            a = rounded(a)
            v = (rows / a).clip(-1, 1)
            out = a * through(v.round(), v)
        elif method.bits == 2:
            a = 4 * rounded(a / 4, bits=6)
            v = (rows / a).clip(-0.99, 0.99)
            level = ((2 * v + 0.5).round() - 0.5) / 2
            out = a * through(level, v)
        else:
            a = 1.5 * rounded(2 / 3 * a)
            v = (rows / a).clip(-0.99, 0.99)
            level = (1.5 * v).round() / 1.5
            out = torch.where(
                (rows / a).abs() <= 0.99,
                a * through(level, v),
                through(a * level, a * rows.sign()),  # the slope there is ±1, the level ±2/3
            )
    return out.reshape(w.shape)


@pytest.mark.parametrize("start", ["absmax", "least_squares"])
def test_an_offset_is_added_to_the_codes_of_lsq_and_levels_are_rounded(start):
    method = DLTMethod(group_size=8, start=start)
    w = weight(2).requires_grad_()
    step = parameters_of(method, w.detach())[0].requires_grad_()
    offset = (0.1 * weight(7, shape=(6, 4))).requires_grad_()
    plain = reference(LSQMethod(group_size=8), w, step)
    exact = plain + offset.repeat_interleave(8, dim=1)
    expected = exact + (exact.float().to(torch.bfloat16).double() - exact).detach()
    parameters = (step.detach(), offset.detach())
    hard = method.hard(w.detach(), parameters)
    assert torch.equal(hard, expected.detach())
    assert torch.equal(method.effective_weight(w.detach(), ZERO, ONE, parameters), hard)
    assert max(len(row.unique()) for row in groups(hard, 8)) <= 3
    expected.backward(upstream := weight(3))
    grads = method.vjp(upstream, w.detach(), ZERO, ONE, parameters)
    for own, value in zip(grads, (w, step, offset), strict=True):
        torch.testing.assert_close(own, value.grad, rtol=1e-9, atol=1e-12)
    naive = DLTMethod(group_size=8).initial_parameters(w.detach())
    assert not naive[1].any() and method.code_values == ()


@pytest.mark.parametrize("group_size", [8, "channel", "tensor"])
def test_dead_weights_are_a_bias(group_size):
    """Check y = x·A^T + sum of dead epsilon·w by autograd. Weights and codes equal AbsMean's."""
    method, plain = (
        TequilaMethod(group_size=group_size, epsilon=0.3),
        AbsMeanMethod(group_size=group_size),
    )
    w, other = (weight(4, dtype=torch.float32).requires_grad_() for _ in range(2))
    assert torch.equal(method.hard(w.detach()), plain.hard(w.detach()))
    linear = torch.nn.Linear(32, 6)
    linear.weight = w = torch.nn.Parameter(w.detach())
    layer = QuantizedLinear.from_linear(linear, method, tau=0.0)
    x = weight(5, shape=(7, 32), dtype=torch.float32)
    for pressure in (1.0, 0.25, 0.0):
        layer.weight_fake_quantizer.pressure.fill_(pressure)
        dead = plain.codes(other.detach())[0] == 0
        assert 0.1 < dead.double().mean() < 0.6
        bias = pressure * 0.3 * (other * dead).sum(1)
        bias = bias + (bias.to(torch.bfloat16).float() - bias).detach()
        effective = other + pressure * (plain.hard(other.detach()) - other).detach()
        expected = torch.nn.functional.linear(x, effective, linear.bias + bias)
        found = layer(x)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        upstream = weight(6, shape=(7, 6), dtype=torch.float32)
        grads = [torch.autograd.grad(y, v, upstream)[0] for y, v in ((found, w), (expected, other))]
        torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)
        if pressure == 0:
            assert torch.equal(found, torch.nn.functional.linear(x, w, linear.bias))
    layer.weight_fake_quantizer.is_hard = True
    converted = layer.to_hard_linear()
    assert type(converted) is torch.nn.Linear and torch.equal(layer(x), converted(x))
    with pytest.raises(ValueError, match=r"epsilon must be in \[0, 1\]"):
        TequilaMethod(epsilon=2)


def parameters_of(method, w, seed=5):
    """Return the initial parameters, moved by up to a third, in the dtype of the formulas."""
    generator = torch.Generator().manual_seed(seed)
    found = method.initial_parameters(w)
    return tuple(
        (p * (1 + (torch.rand(p.shape, generator=generator) - 0.5) * 2 / 3)).double() for p in found
    )


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_values_and_gradients_equal_the_definition(method):
    for seed in range(4):
        w = weight(seed).requires_grad_()
        parameters = [p.requires_grad_() for p in parameters_of(method, w.detach(), seed)]
        expected = reference(method, w, *parameters)
        latent, learned = w.detach(), [p.detach() for p in parameters]
        found = method.effective_weight(latent, ZERO, ONE, learned)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-14)
        expected.backward(upstream := weight(seed + 50))
        grads = method.vjp(upstream, latent, ZERO, ONE, learned)
        for own, value in zip(grads, [w, *parameters], strict=True):
            torch.testing.assert_close(own, value.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_hard_is_codes_times_scales_and_exact_in_bfloat16(method, dtype):
    for seed in range(4):
        w = weight(seed, dtype=dtype)
        parameters = method.initial_parameters(w)
        hard = method.hard(w, parameters)
        codes, scales = method.codes(w, parameters)
        assert codes.dtype == torch.int8 and scales.dtype == torch.bfloat16
        assert set(codes.unique().tolist()) <= {*method.levels}
        blocks = codes.reshape(*scales.shape, -1) * scales.unsqueeze(-1).to(dtype)
        assert hard.dtype == dtype and torch.equal(blocks.reshape(w.shape), hard)
        assert torch.equal(hard.to(torch.bfloat16).to(dtype), hard)
        for tau in (0.0, 0.3):  # The method does not read it.
            found = method.effective_weight(w, torch.tensor(tau), ONE, parameters)
            torch.testing.assert_close(found, hard, rtol=0, atol=0)


@pytest.mark.parametrize("largest", [1e-9, 3e-8, 6e-8, 7.2e-8, 1e-7, 1e-5])
def test_four_bits_of_a_tiny_group_are_zeros_or_have_the_largest_code(largest):
    method, w = INT4Method(group_size=8), weight(dtype=torch.float32)
    w[:, :8] *= largest / w[:, :8].abs().max()
    hard = method.hard(w)
    assert torch.equal(read_hard(hard, 8, INT4).dequantize(), hard)
    codes, scales = method.codes(w)
    kept = codes.unflatten(-1, (-1, 8)).amin(-1)[scales != 0]
    assert (kept == -8).all()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_hard_weight_stays_as_it_is(method):
    w = weight(dtype=torch.float32)
    parameters = method.initial_parameters(w)
    hard = method.hard(w, parameters)
    assert torch.equal(method.hard(hard, parameters), hard)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_no_pressure_is_the_latent_weight(method):
    w, upstream = weight(dtype=torch.float32), weight(9, dtype=torch.float32)
    parameters = method.initial_parameters(w)
    assert torch.equal(method.effective_weight(w, ZERO, ZERO, parameters), w)
    grads = method.vjp(upstream, w, ZERO, ZERO, parameters)
    assert torch.equal(grads[0], upstream) and not any(grad.any() for grad in grads[1:])


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_rows_on_two_ranks_equal_the_rows_of_the_whole_weight(method):
    w, upstream = weight(dtype=torch.float32), weight(9, dtype=torch.float32)
    whole = method.initial_parameters(w)
    expected = method.effective_weight(w, ZERO, ONE, whole)
    grads = method.vjp(upstream, w, ZERO, ONE, whole)
    halves = []  # what each rank asks the other for: first recorded, then summed

    def run(rows, total):
        parts = [p[rows] for p in whole]
        found = method.effective_weight(w[rows], ZERO, ONE, parts, total)
        return found, method.vjp(upstream[rows], w[rows], ZERO, ONE, parts, total)

    both = slice(0, 4), slice(4, 6)
    known: list[torch.Tensor] = []
    for _ in range(3):  # Each round knows one more sum.
        asked = []
        for rows in both:
            seen = []

            def total(value, seen=seen):
                seen.append(value)
                return known[len(seen) - 1] if len(seen) <= len(known) else value

            halves.append(run(rows, total))
            asked.append(seen)
        if len(asked[0]) > len(known):
            known.append(asked[0][len(known)] + asked[1][len(known)])
    assert torch.equal(torch.cat([halves[-2][0], halves[-1][0]]), expected)
    for first, second, grad in zip(halves[-2][1], halves[-1][1], grads, strict=True):
        assert torch.equal(torch.cat([first, second]), grad)


def test_absmean_is_the_ternary_method_at_temperature_zero():
    w = weight(shape=(8, 128), dtype=torch.float32)
    for size in (32, "channel", "tensor"):
        ours, theirs = AbsMeanMethod(group_size=size), TernaryMethod(group_size=size)
        assert torch.equal(ours.hard(w), theirs.hard(w))
        assert torch.equal(
            ours.effective_weight(w, ZERO, torch.tensor(0.4)),
            theirs.effective_weight(w, ZERO, torch.tensor(0.4)),
        )


def test_the_forward_of_seq_equals_lsq_with_two_thirds_of_its_step():
    w = weight(dtype=torch.float32)
    step = parameters_of(SEQMethod(group_size=8), w)[0].float()
    seq, lsq = SEQMethod(group_size=8), LSQMethod(group_size=8)
    assert torch.equal(seq.hard(w, (step,)), lsq.hard(w, (2 / 3 * step,)))
    grads = [m.vjp(w, w, ZERO, ONE, (s,))[1] for m, s in ((seq, step), (lsq, 2 / 3 * step))]
    assert not torch.allclose(*grads)


@pytest.mark.parametrize("levels", [BINARY, TERNARY, SYMMETRIC])
def test_least_squares_leaves_no_better_scale(levels):
    blocks = weight(3, shape=(40, 1, 16))
    codes = torch.tensor(levels, dtype=torch.float64)

    def error(scale):  # tries all nearest codes
        return (blocks.unsqueeze(-1) - scale.unsqueeze(-1) * codes).abs().amin(-1).square().sum(-1)

    found = error(least_squares_scale(blocks, levels))
    for scale in torch.linspace(0.01, 3, 600, dtype=torch.float64):
        assert (found <= error(scale.view(1, 1, 1)) * 1.003).all()  # 6 bits of scale, at four


@pytest.mark.parametrize(
    ("method", "zeros", "error"),
    [
        (AbsMeanMethod(), 0.31, 0.263),
        (TWNMethod(), 0.45, 0.190),
        (TWNMethod(delta=0.7), 0.42, 0.192),
        (LSQMethod(start="least_squares"), 0.45, 0.187),
        (SEQMethod(start="least_squares"), 0.45, 0.187),
        (INT2Method(), 0.84, 0.58),
        (INT2Method(start="least_squares"), 0.0, 0.118),
        (SEQMethod(bits=2, start="least_squares"), 0.0, 0.118),
        (LSQMethod(group_size="channel"), 0.93, 0.79),
        (SEQMethod(group_size="channel"), 0.77, 0.46),
    ],
    ids=str,
)
def test_zeros_and_errors_of_gaussian_weights(method, zeros, error):
    w = torch.randn(256, 2048, generator=torch.Generator().manual_seed(0))
    hard = method.hard(w, method.initial_parameters(w))
    assert (hard == 0).double().mean().item() == pytest.approx(zeros, abs=0.012)
    assert ((w - hard).square().sum() / w.square().sum()).item() == pytest.approx(error, abs=0.012)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_keys_and_not_a_number(method):
    assert Method.from_key(method.key()) == method
    w = weight(dtype=torch.float32)
    w[2, 3] = float("nan")
    if not method.trained_parameters:
        found = method.effective_weight(w, ZERO, ONE)
        assert found[2, :8].isnan().any()
        if method.group_size == 8:
            assert found[2, 8:].isfinite().all() and found[0].isfinite().all()
    zeros = torch.zeros(2, 32)
    hard = method.hard(zeros, method.initial_parameters(zeros))
    assert hard.isfinite().all() and hard.abs().max() < 1e-7


def test_rounding_leaves_bits_for_a_factor():
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).exp()
    assert torch.equal(round_to_bfloat16(x), x.to(torch.bfloat16).float())
    few = round_to_bfloat16(x, 2)
    assert torch.equal((3 * few).to(torch.bfloat16).float(), 3 * few)
    assert ((few - x).abs() <= x / 64).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TWNMethod(delta=2), r"delta must be in \[0, 1\]; got 2"),
        (lambda: LSQMethod(start="absmean"), 'start must be "absmax" or "least_squares"'),
        (lambda: LSQMethod(group_size="tensor"), "a learned step needs scales that lie within"),
        (lambda: INT2Method(group_size="tensor"), "int2 needs scales that lie within rows"),
        (lambda: SEQMethod(bits=3), 'bits must be "ternary" or 2; got 3'),
        (lambda: AbsMeanMethod(group_size=0), "group_size must be a positive int"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("config", [AbsMeanConfig(group_size=32), INT4Config(group_size=32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_linear_in_one_dtype_has_the_gradients_of_an_eager_one(config, dtype):
    """The gradient of the weight is that of the effective weight, and no operator returns it."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(64, 64, bias=False, dtype=dtype)), torch.randn(4, 64)
    quantize_(model, config)
    grads = []
    for call in (model, torch.compile(model)):
        model.zero_grad()
        call(x.to(dtype)).square().sum().backward()
        grads.append(model[0].weight.grad)
    assert torch.equal(*grads)
