"""Test the Fairy2i method at difficult angles: ties, +-pi, zero, tiny, not finite."""

import math

import pytest
import references_fairy2i as references
import torch

from hestia_tune.methods import effective_weight
from hestia_tune.methods.fairy2i import Fairy2iMethod, dequantize_codes, merge, split

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TAUS = [0.0, 1e-30, 0.02, 0.3, 5.0]
ONE = Fairy2iMethod(num_stages=1)
TWO = Fairy2iMethod()


def from_u(*entries: complex, dtype=torch.float64) -> torch.Tensor:
    """Return the real weight of U = ``entries`` (a row) and W = 0."""
    u = torch.tensor([entries], dtype=torch.complex128)
    zero = torch.zeros_like(u.real)
    return merge(torch.stack([u.real, zero]), torch.stack([u.imag, zero])).to(dtype)


def complex_u(weight: torch.Tensor) -> torch.Tensor:
    """Return U of a real weight, as a complex row."""
    return torch.complex(*split(weight.double()))[0].flatten()


def random_weight(seed=0, shape=(6, 32), dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (0.7 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def value_and_grad(weight, tau, method=TWO, grad=None, pressure=1.0):
    weight = weight.detach().requires_grad_()
    value = effective_weight(weight, tau, pressure, method)
    grad = torch.ones_like(value) if grad is None else grad
    return value.detach(), torch.autograd.grad(value, weight, grad)[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_axis_owns_its_clockwise_boundary_and_zero_is_real(dtype):
    axes = {1: 0, 1j: 1, -1: 2, -1j: 3}
    ties = {1 - 1j: 0, 1 + 1j: 1, -1 + 1j: 2, -1 - 1j: 3}
    zeros = {0: 0, complex(-0.0, 0.0): 0, complex(-0.0, -0.0): 0, complex(0.0, -0.0): 0}
    for case in (axes, ties, zeros):
        codes, _ = ONE.codes(from_u(*case, dtype=dtype))
        assert codes[0, 0, 0].tolist() == list(case.values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_next_to_a_tie_belongs_to_the_larger_part(dtype):
    """Check codes where U is 1 or the next number: no rounding of an angle blurs them."""
    above = 1 + 2 * torch.finfo(dtype).eps  # The split halves it exactly, in every dtype.
    entries = {
        complex(above, 1): 0, complex(1, above): 1,
        complex(-1, above): 1, complex(-above, 1): 2,
        complex(-above, -1): 2, complex(-1, -above): 3,
        complex(1, -above): 3, complex(above, -1): 0,
    }  # fmt: skip
    codes, _ = ONE.codes(from_u(*entries, dtype=dtype))
    assert codes[0, 0, 0].tolist() == list(entries.values())


@pytest.mark.parametrize("tau", [0.0, 0.05, 0.3])
def test_commutes_with_negation_scaling_and_turning_by_i(tau):
    """Check H(-A) = -H(A), H(4A) = 4·H(A) and H(i·z) = i·H(z). Scales swap with the axes."""
    weight = random_weight()
    value, _ = value_and_grad(weight, tau)
    assert torch.equal(value_and_grad(-weight, tau)[0], -value)
    assert torch.equal(value_and_grad(4 * weight, tau)[0], 4 * value)
    re, im = split(weight)
    turned = split(value_and_grad(merge(-im, re), tau)[0])
    expected = split(value)
    torch.testing.assert_close(turned, (-expected[1], expected[0]), rtol=1e-12, atol=1e-14)


def test_grid_weights_with_many_ties_equal_the_formulas():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-2, 3, (8, 16), generator=generator).double()
    for granularity in ("tensor", 4):
        for num_stages in (1, 2, 4):
            method = Fairy2iMethod(num_stages=num_stages, granularity=granularity)
            expected = references.quantized(weight, 0, num_stages, granularity)
            torch.testing.assert_close(method.hard(weight), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tau", [0.3, 0.01, 1e-6, 1e-30])
def test_both_axes_share_a_boundary_at_every_temperature(tau, dtype):
    """Check pi = 1/2 and 1/2 at |Re| = |Im|. Cold, the slope is k/4 of the scale, k = pi/tau."""
    weight = from_u(1 + 1j, 2, -3j, 2j, dtype=dtype)
    value, grad = value_and_grad(weight, tau, ONE, grad=from_u(1j, 0, 0, 0, dtype=dtype))
    (s_re, s_im) = ONE.codes(weight)[1][0, 0].flatten().tolist()
    # The two far axes together have the weight that a tanh lacks.
    share = 0.5 * math.tanh(math.pi**2 / 4 / tau)
    z = complex_u(value)[0]
    assert (z.real.item(), z.imag.item()) == pytest.approx((s_re * share, s_im * share), rel=1e-6)
    # dz_im/dtheta = s_im·k/4, dtheta/dz = i/2 at modulus sqrt(2) times i·z/|z|: (-1, 1)/2.
    g = complex_u(grad)[0]
    assert g.isfinite() and g.real.item() == pytest.approx(-g.imag.item(), rel=1e-6)
    if tau < 0.2:
        assert g.imag.item() == pytest.approx(s_im * math.pi / tau / 4 / 2, rel=1e-3)


@pytest.mark.parametrize("tau", [0.05, 0.3, 2.0])
@pytest.mark.parametrize("axis", range(4))
def test_value_and_gradient_are_continuous_through_every_axis_and_pi(axis, tau):
    """Check that an axis has the mean of both sides, also at +-pi, where an angle jumps by 2·pi."""
    others = [0.3 + 0.9j, -1.1 + 0.2j, 0.5 - 0.8j]
    grad = from_u(0.7 - 0.4j, 0, 0, 0)
    turn = 1j**axis
    results = {}
    for side in (-1e-9, 0.0, 1e-9):
        z = turn * complex(1.3, side)
        z = complex(round(z.real, 12), round(z.imag, 12))
        value, slope = value_and_grad(from_u(z, *others), tau, ONE, grad)
        results[side] = complex_u(value)[0], complex_u(slope)[0]
    for i, tolerance in ((0, 1e-7), (1, 1e-6)):
        low, on, high = (results[side][i] for side in (-1e-9, 0.0, 1e-9))
        torch.testing.assert_close(on, (low + high) / 2, rtol=0, atol=tolerance)
    # The value is continuous. The kink of the wrapped angle changes the slope, by little when cold.
    torch.testing.assert_close(results[-1e-9][0], results[1e-9][0], rtol=0, atol=1e-7)
    if tau == 0.05:
        torch.testing.assert_close(results[-1e-9][1], results[1e-9][1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("tau", [0.05, 0.3, 2.0])
def test_signed_zeros_on_the_negative_axis_change_nothing(tau):
    """Check that -0 changes nothing, although atan2(0, -1) is pi and atan2(-0, -1) is -pi."""
    for method in (ONE, TWO):
        plus, minus = (
            value_and_grad(from_u(complex(-1.0, zero), 0.4 + 1j, 1 - 0.3j), tau, method)
            for zero in (0.0, -0.0)
        )
        torch.testing.assert_close(plus, minus, rtol=0, atol=0)


@pytest.mark.parametrize("radius", [1e-1, 1e-3, 1e-5])
@pytest.mark.parametrize("tau", [0.1, 0.3, 2.0])
def test_the_gradient_is_exact_close_to_the_origin(tau, radius):
    """Check that the gradient grows as 1/|z|. No clamp hides this above 2^-20 scales."""
    angles = [0.1, 0.7, 0.9, 1.5, 2.5, -0.6, -1.7, -3.0]
    tiny = [radius * complex(math.cos(a), math.sin(a)) for a in angles]
    weight = from_u(*tiny, 1 - 0.1j, 0.1 - 1j, 0.9 + 0.3j, 0.2 - 1.1j)
    _, grad = value_and_grad(weight, tau, ONE)
    weight.requires_grad_()
    # W is zero here, and plain autograd of its angle is NaN. So the test takes only U.
    u = torch.complex(*split(weight))[0]
    plain = references.quantize(u, tau, "tensor")
    (expected,) = torch.autograd.grad(plain, u, torch.complex(*split(torch.ones_like(weight)))[0])
    torch.testing.assert_close(complex_u(grad), expected.flatten(), rtol=1e-9, atol=1e-9)
    assert complex_u(grad)[:8].abs().max() > 0.01 / (tau * radius)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("method", [ONE, TWO])
def test_modulus_zero_has_the_axis_one_and_no_gradient_of_an_angle(method, tau, dtype):
    weight = from_u(0, 1 + 0.5j, -0.25 - 1j, 0.5 - 2j, dtype=dtype)
    value, grad = value_and_grad(weight, tau, method)
    assert value.isfinite().all()
    # At a tie the slope is 1e30, which float16 cannot hold.
    assert grad.isfinite().all() or (tau == 1e-30 and dtype == torch.float16)
    if method is ONE and tau > 0:
        assert complex_u(grad)[0] == 0  # Nothing comes from the other axis:
        z = complex_u(value.double())[0]
        assert z.real > 0 and z.imag == 0
    _, blended = value_and_grad(weight, tau, ONE, pressure=0.75)
    expected = 1.0 if tau == 0 else 0.25
    assert complex_u(blended)[0].real.item() == pytest.approx(expected)


@pytest.mark.parametrize("tau", [0.02, 0.3])
def test_gradients_stay_finite_at_every_modulus(tau):
    entries = [complex(10.0**-e, 0.9 * 10.0**-e) for e in range(0, 45)]
    for dtype in (torch.float64, torch.float32):
        value, grad = value_and_grad(from_u(*entries, dtype=dtype), tau, TWO)
        assert value.isfinite().all() and grad.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tau", TAUS)
def test_a_zero_weight_is_harmless(tau, dtype):
    for num_stages in (1, 2, 3, 4):
        method = Fairy2iMethod(num_stages=num_stages)
        weight = torch.zeros(4, 8, dtype=dtype)
        value, grad = value_and_grad(weight, tau, method)
        assert value.abs().max() < 1e-7 and grad.isfinite().all()
        codes, scales = method.codes(weight)
        assert torch.equal(dequantize_codes(codes, scales, dtype), method.hard(weight))
        assert scales.double().sub(1e-8).abs().max() < 1e-10


def test_an_axis_without_entries_has_the_smallest_scale():
    codes, scales = ONE.codes(from_u(1.0, -2.0, 3.0))
    assert scales[0, 0].flatten().tolist() == pytest.approx([2.0, 1e-8], rel=1e-2)
    assert codes[0, 0].tolist() == [[0, 2, 0]]


@pytest.mark.parametrize("granularity", ["tensor", 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_are_exact_in_every_magnitude(dtype, granularity):
    method = Fairy2iMethod(num_stages=1, granularity=granularity)
    for seed, std in enumerate((1e-3, 0.02, 5.0)):
        weight = random_weight(seed, (8, 32), dtype) * std
        _, scales = method.codes(weight)
        compute = weight if dtype == torch.float64 else weight.float()
        for j, z in enumerate(references.split(compute)):
            for got, expected in zip(scales[0, j], references.scales(z, granularity), strict=True):
                spread = got.double().repeat_interleave(16 // got.shape[1], 1).expand(4, 16)
                assert torch.equal(spread, expected.double())


NON_FINITE = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("tau", [0.0, 1e-20, 0.3])
@pytest.mark.parametrize("value", NON_FINITE)
@pytest.mark.parametrize("where", [(0, 0), (5, 3), (2, 30)])
def test_one_value_that_is_not_finite_makes_the_whole_matrix_nan(where, value, tau):
    weight = random_weight(dtype=torch.float32)
    weight[where] = value
    for method in (ONE, TWO):
        assert method.hard(weight).isnan().all()
        assert effective_weight(weight, tau, 1.0, method).isnan().all()
        assert method.codes(weight)[1].isnan().all()


@pytest.mark.parametrize("value", NON_FINITE)
def test_with_groups_it_stays_in_its_group(value):
    method = Fairy2iMethod(granularity=4)
    weight = random_weight(dtype=torch.float32)
    clean = method.hard(weight)
    weight[1, 5] = value
    broken = method.hard(weight)
    hit = torch.zeros_like(weight, dtype=torch.bool)
    for row in (1, 4):
        hit[row, 4:8] = hit[row, 20:24] = True
    assert broken[hit].isnan().all() and torch.equal(broken[~hit], clean[~hit])


LAYOUTS = {
    "transposed": lambda: torch.randn(32, 6).t(),
    "columns": lambda: torch.randn(6, 64)[:, ::2],
    "rows": lambda: torch.randn(12, 32)[::2],
    "expanded": lambda: torch.randn(1, 32).expand(6, 32),
}


@pytest.mark.parametrize("granularity", ["tensor", 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layout_of_weight_and_gradient_does_not_matter(layout, granularity):
    torch.manual_seed(0)
    method = Fairy2iMethod(granularity=granularity)
    weight, grad = LAYOUTS[layout](), torch.randn(32, 6).t()
    results = [
        (*value_and_grad(w, 0.3, method, g, 0.7), method.hard(w), *method.codes(w))
        for w, g in ((weight, grad), (weight.contiguous(), grad.contiguous()))
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][0].is_contiguous() and results[0][1].is_contiguous()
