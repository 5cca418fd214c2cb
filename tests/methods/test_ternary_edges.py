"""Test the ternary method at difficult floating-point numbers: ties, tiny, not finite."""

import pytest
import references
import torch

from hestia_tune.functional import hard_ternary, relaxed_ternary, ternary_codes

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def make_weight(seed: int, out: int = 4, inp: int = 128, dtype=torch.float64, std: float = 0.7):
    generator = torch.Generator().manual_seed(seed)
    return (std * torch.randn(out, inp, generator=generator, dtype=torch.float64)).to(dtype)


def value_and_slope(weight: torch.Tensor, tau: float, pressure: float = 1.0, group_size=32):
    weight = weight.detach().requires_grad_()
    value = relaxed_ternary(weight, tau, pressure, group_size=group_size)
    (slope,) = torch.autograd.grad(value, weight, torch.ones_like(value))
    return value.detach(), slope


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("std", [1e-3, 0.02, 5.0])
def test_scales_are_exact_in_every_dtype_and_magnitude(std, dtype):
    for seed in range(5):
        weight = make_weight(seed, dtype=dtype, std=std)
        codes, scales = ternary_codes(weight, group_size=32)
        per_weight = scales.double().repeat_interleave(32, 1)
        assert torch.equal(per_weight, references.eq1_scale(weight, 32))
        assert torch.equal(codes * per_weight, hard_ternary(weight, group_size=32).double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_lose_only_the_rounding_of_their_dtype(dtype):
    for seed, tau in enumerate((0.05, 0.3, 2.0)):
        weight = make_weight(seed, dtype=dtype)
        _, slope = value_and_slope(weight, tau, 0.8)
        expected = 0.2 + 0.8 * references.lemma1_slope(
            weight.double(), references.eq1_scale(weight, 32), tau
        )
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(slope.double(), expected, rtol=rounding, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tie_takes_the_code_zero_and_the_next_number_does_not(dtype):
    above = 0.5 * (1 + torch.finfo(dtype).eps)
    weight = torch.tensor([[0.5, -0.5, 1.0, 2.0, above, -above, 1.0, 2.0]], dtype=dtype)
    codes, scales = ternary_codes(weight, group_size=4)
    assert scales.tolist() == [[1.0, 1.0]]
    assert codes.tolist() == [[0, 0, 1, 1, 1, -1, 1, 1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_annealing_to_1e_30_stays_exact_at_ties_and_hard_away_from_them(dtype):
    weight = make_weight(1, dtype=dtype)
    weight[0, :32] = torch.tensor([0.5, -0.5, 1.0, 2.0]).repeat(8)  # scale 1: half are ties
    weight[0, 32:64] = 0
    distance = ((weight.double() / references.eq1_scale(weight, 32)).abs() - 0.5).abs()
    hard = hard_ternary(weight, group_size=32).double()
    for exponent in range(2, 31):
        tau = 10.0**-exponent
        value, slope = value_and_slope(weight, tau)
        assert value.isfinite().all() and slope.isfinite().all() and (slope >= 0).all()
        assert value[0, :2].tolist() == [0.5, -0.5]
        # Two codes are equally likely, so their variance is 1/4.
        assert slope[0, :2].tolist() == pytest.approx([0.5 / tau] * 2, rel=1e-2)
        clear = distance > 20 * tau
        assert clear.double().mean() > 0.5 and slope[clear].max() < 1e-3
        torch.testing.assert_close(value.double()[clear], hard[clear], rtol=0, atol=1e-14)


def test_lemma_2_holds_against_a_test_function():
    """Check that the integral of slope·phi tends to gamma·(phi(-gamma/2) + phi(gamma/2))."""
    weight = torch.linspace(-2, 2, 80001, dtype=torch.float64).view(1, -1)
    gamma = references.eq1_scale(weight, "tensor")[0, 0]

    def phi(w):
        return torch.exp(-(w**2)) * (2 + torch.sin(3 * w))

    expected = gamma * (phi(-gamma / 2) + phi(gamma / 2))
    errors = []
    for tau in (0.1, 0.03, 0.01, 0.003):
        _, slope = value_and_slope(weight, tau, group_size="tensor")
        errors.append(abs(torch.trapezoid(slope * phi(weight), weight).item() - expected))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-3


def test_tiny_weights_keep_their_relative_precision():
    """Check weights for which 1 - exp(-x) would lose every digit."""
    weight = torch.tensor([[1e-9, -1e-12, 1e-20, 1.0]] * 2)
    value, _ = value_and_slope(weight, 0.3, group_size=4)
    expected = references.eq6_relaxed(weight.double(), references.eq1_scale(weight, 4), 0.3)
    # The softmax itself cancels below 1e-16. There H is linear, with the slope at zero.
    slope = references.lemma1_slope(torch.zeros(1).double(), torch.ones(1).double(), 0.3).item()
    torch.testing.assert_close(
        value[:, :3].double(), slope * weight[:, :3].double(), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(value[:, 3].double(), expected[:, 3], rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, -1e-45, 1e-12])
@pytest.mark.parametrize("tau", [0.0, 1e-20, 0.3])
def test_vanishing_groups_are_finite(tau, value):
    """Check that gamma is eps = 1e-8, and no formula divides by zero."""
    weight = torch.full((1, 64), value)
    assert ternary_codes(weight, group_size=32)[1].double().min() > 0.99e-8
    relaxed, slope = value_and_slope(weight, tau)
    assert relaxed.isfinite().all() and slope.isfinite().all()
    assert relaxed.abs().max() <= max(abs(weight).max(), 1e-30)


# CUDA devices produce the NaN with every bit set.
NON_FINITE = {
    "nan": lambda: torch.tensor(float("nan")),
    "nan, all bits set": lambda: torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32),
    "-nan, all bits set": lambda: torch.tensor(-1, dtype=torch.int32).view(torch.float32),
    "inf": lambda: torch.tensor(float("inf")),
    "-inf": lambda: torch.tensor(-float("inf")),
}


@pytest.mark.parametrize("tau", [0.0, 1e-20, 0.3])
@pytest.mark.parametrize("poison", NON_FINITE)
def test_non_finite_weights_poison_their_group_and_no_other(poison, tau):
    weight = make_weight(0, dtype=torch.float32)
    clean = hard_ternary(weight, group_size=32), relaxed_ternary(weight, tau, group_size=32)
    weight[0, 3] = NON_FINITE[poison]()
    broken = hard_ternary(weight, group_size=32), relaxed_ternary(weight, tau, group_size=32)
    assert not ternary_codes(weight, group_size=32)[1][0, 0].isfinite()
    for before, after in zip(clean, broken, strict=True):
        assert after[0, :32].isnan().all()
        assert torch.equal(after[0, 32:], before[0, 32:]) and torch.equal(after[1:], before[1:])


@pytest.mark.parametrize("group_size", [32, "channel", "tensor"])
def test_odd_and_homogeneous(group_size):
    """Check H(-w) = -H(w) and H(4w) = 4·H(w) to the last bit. Powers of two change no rounding."""
    weight = make_weight(0)
    for tau in (0.0, 0.3):
        value = relaxed_ternary(weight, tau, 0.6, group_size=group_size)
        assert torch.equal(relaxed_ternary(-weight, tau, 0.6, group_size=group_size), -value)
        assert torch.equal(relaxed_ternary(4 * weight, tau, 0.6, group_size=group_size), 4 * value)


LAYOUTS = {
    "transposed": lambda: torch.randn(128, 6).t(),
    "columns": lambda: torch.randn(6, 256)[:, ::2],
    "rows": lambda: torch.randn(12, 128)[::2],
    "expanded": lambda: torch.randn(1, 128).expand(6, 128),
    "one row": lambda: torch.randn(128, 1).t(),
}


@pytest.mark.parametrize("group_size", [32, "channel", "tensor"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layout_of_weight_and_gradient_does_not_matter(layout, group_size):
    torch.manual_seed(0)
    weight = LAYOUTS[layout]()
    grad = torch.randn(weight.shape[::-1]).t()
    results = []
    for w, g in ((weight, grad), (weight.contiguous(), grad.contiguous())):
        w = w.detach().requires_grad_()
        value = relaxed_ternary(w, 0.3, 0.7, group_size=group_size)
        hard = hard_ternary(w, group_size=group_size)
        results.append((value, torch.autograd.grad(value, w, g)[0], hard))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
