"""Test the functional API: scalars, errors, tensors saved for backward, and compilation."""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from hestia_tune.functional import (
    hard_ternary,
    optimal_temperature,
    relaxed_ternary,
    ternary_codes,
)
from hestia_tune.methods import TernaryMethod


def make_weight(out: int = 4, inp: int = 128, dtype=torch.float32, device="cpu") -> torch.Tensor:
    weight = 0.02 * torch.randn(out, inp, generator=torch.Generator().manual_seed(0))
    return weight.to(dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_numbers_and_0d_tensors_are_the_same(dtype):
    weight = make_weight(dtype=dtype)
    expected = relaxed_ternary(weight, 0.25, 1.0)  # exact in every dtype
    assert torch.equal(relaxed_ternary(weight, 0.25), expected)
    assert torch.equal(relaxed_ternary(weight, 0.25, 1), expected)
    for scalar in (torch.float64, torch.float32, torch.bfloat16):
        tau, pressure = torch.tensor(0.25, dtype=scalar), torch.tensor(1.0, dtype=scalar)
        assert torch.equal(relaxed_ternary(weight, tau, pressure), expected)
        assert torch.equal(relaxed_ternary(weight, tau, 1.0), expected)


def test_numbers_keep_float64_precision_for_float64_weights():
    weight = make_weight(dtype=torch.float64)
    exact = relaxed_ternary(weight, 0.3, 0.7)
    assert not torch.equal(relaxed_ternary(weight, torch.tensor(0.3), 0.7), exact)
    as_tensor = torch.tensor(0.3, dtype=torch.float64)
    assert torch.equal(relaxed_ternary(weight, as_tensor, 0.7), exact)


SCALAR_ERRORS = [
    # tau, pressure, error, message
    (-0.1, 1.0, ValueError, r"tau must be at least 0; got -0.1"),
    (float("inf"), 1.0, ValueError, r"tau must be at least 0; got inf"),
    (float("nan"), 1.0, ValueError, r"tau must be at least 0; got nan"),
    ("0.3", 1.0, TypeError, "tau must be a number; got '0.3'; or a 0-D tensor"),
    (None, 1.0, TypeError, "tau must be a number; got None; or a 0-D tensor"),
    (True, 1.0, TypeError, "tau must be a number; got True; or a 0-D tensor"),
    (torch.ones(1), 1.0, TypeError, r"tau must be a float or a 0-D tensor; got shape \(1,\)"),
    (0.3, 1.01, ValueError, r"pressure must be in \[0, 1\]; got 1.01"),
    (0.3, -1, ValueError, r"pressure must be in \[0, 1\]; got -1"),
    (0.3, float("nan"), ValueError, r"pressure must be in \[0, 1\]; got nan"),
    (0.3, torch.ones(2, 2), TypeError, r"pressure must be .*; got shape \(2, 2\)"),
]


@pytest.mark.parametrize("tau, pressure, error, message", SCALAR_ERRORS)
def test_wrong_scalars(tau, pressure, error, message):
    with pytest.raises(error, match=message):
        relaxed_ternary(make_weight(), tau, pressure)


WEIGHT_ERRORS = [
    # weight, group_size, error, message
    (make_weight(), 0, ValueError, 'must be a positive int, "channel" or "tensor"; got 0'),
    (make_weight(), -1, ValueError, 'must be a positive int, "channel" or "tensor"; got -1'),
    (make_weight(), "row", ValueError, "got 'row'"),
    (make_weight(), 64.0, TypeError, "got 64.0 of type float"),
    (make_weight(), None, TypeError, "got None of type NoneType"),
    (make_weight(), True, TypeError, "got True of type bool"),
    (make_weight(), 96, ValueError, "group_size 96 does not divide in_features 128"),
    (make_weight(), 256, ValueError, 'use one of .*64, 128, "channel" or "tensor"'),
    (make_weight()[0], 128, ValueError, r"\(out_features, in_features\); got \(128,\)"),
    (torch.ones(2, 2, 128), "tensor", ValueError, r"got \(2, 2, 128\)"),
    (make_weight().int(), 128, TypeError, "a floating-point tensor; got torch.int32"),
    (make_weight().cfloat(), 128, TypeError, "a floating-point tensor; got torch.complex64"),
    ([[0.1] * 128], 128, TypeError, "a floating-point tensor; got list"),
]


def test_a_temperature_is_fitted_to_floats():
    with pytest.raises(TypeError, match="a floating-point tensor; got torch.int32"):
        optimal_temperature([make_weight(), make_weight().int()])


@pytest.mark.parametrize("weight, group_size, error, message", WEIGHT_ERRORS)
def test_wrong_weights_and_group_sizes(weight, group_size, error, message):
    for function in (hard_ternary, ternary_codes, partial(relaxed_ternary, tau=0.3)):
        with pytest.raises(error, match=message):
            function(weight, group_size=group_size)


def test_backward_saves_only_the_weight_and_two_scalars():
    weight = make_weight().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        relaxed_ternary(weight, torch.tensor(0.3), torch.tensor(0.5))
    assert [t.shape for t in saved] == [weight.shape, (), ()]
    assert saved[0].data_ptr() == weight.data_ptr()


def test_hard_weights_and_codes_carry_no_gradient():
    weight = make_weight().requires_grad_()
    assert not hard_ternary(weight).requires_grad
    assert not any(t.requires_grad for t in ternary_codes(weight))
    assert relaxed_ternary(weight, 0.3).requires_grad


def elide_lower_precision(function, *inputs):
    """Run ``function`` as a compiler may: casting a value down and up again does not round it.

    Inductor keeps such intermediates in registers at full precision, unless it emulates casts.
    """
    module = make_fx(lambda *args: function(*args))(*inputs)
    cast = torch.ops.aten._to_copy.default
    for node in list(module.graph.nodes):
        if node.target is cast and getattr(node.args[0], "target", None) is cast:
            node.replace_input_with(node.args[0], node.args[0].args[0])
    module.recompile()
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("method", ["hard", "effective_weight", "vjp"])
def test_the_rounding_of_the_scale_survives_a_compiler_that_elides_casts(method, dtype):
    weight = make_weight(dtype=dtype)
    tau, pressure = torch.tensor(0.3), torch.tensor(0.7)
    scalars = () if method == "hard" else (tau, pressure)
    inputs = (*((torch.ones_like(weight),) if method == "vjp" else ()), weight, *scalars)
    formula = getattr(TernaryMethod(group_size=32), method)

    def function(*tensors):
        found = formula(*tensors)
        return found[0] if method == "vjp" else found

    assert torch.equal(elide_lower_precision(function, *inputs)(*inputs), function(*inputs))


@pytest.fixture(scope="module")
def compiled():
    """Compile with a group size that no other test uses, as in a process without other methods."""
    return torch.compile(
        lambda weight, tau, pressure: relaxed_ternary(weight, tau, pressure, group_size=44),
        fullgraph=True,
    )


def run_annealing(function, weight: torch.Tensor, grad: torch.Tensor):
    """Return value, gradient and number of graphs at points of a schedule that ends hard."""
    results, graphs = [], []
    for tau, pressure in ((0.3, 0.0), (0.3, 0.4), (0.3, 1.0), (0.01, 1.0), (0.0, 1.0)):
        scalars = torch.tensor([tau, pressure], device=weight.device).unbind()
        value = function(weight, *scalars)
        results.append((value, torch.autograd.grad(value, weight, grad)[0]))
        graphs.append(counters["stats"]["unique_graphs"])
    return results, graphs


def check_compiled_equals_eager(compiled, device: str) -> None:
    weight = make_weight(64, 528, device=device).requires_grad_()
    grad = torch.randn_like(weight)
    got, graphs = run_annealing(compiled, weight, grad)
    expected, _ = run_annealing(partial(relaxed_ternary, group_size=44), weight, grad)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    hard = hard_ternary(weight, group_size=44)
    assert torch.equal(got[-1][0], hard) and torch.equal(got[-1][1], grad)
    assert graphs == graphs[:1] * len(graphs)


def test_compiled_equals_eager_bit_for_bit_at_zero_temperature(compiled):
    check_compiled_equals_eager(compiled, "cpu")


def test_another_method_elsewhere_compiles_nothing_again(compiled):
    weight = make_weight(64, 528)
    scalars = torch.tensor(0.3), torch.tensor(0.5)
    compiled(weight, *scalars)
    graphs = counters["stats"]["unique_graphs"]
    hard_ternary(weight, group_size=33)
    compiled(weight, *scalars)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.gpu
def test_compiled_equals_eager_on_cuda(compiled):
    check_compiled_equals_eager(compiled, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("group_size", [128, "channel", "tensor"])
def test_hard_weights_are_the_same_on_cuda_and_cpu(group_size):
    weight = make_weight(1024, 4096)
    on_gpu = hard_ternary(weight.cuda(), group_size=group_size)
    assert torch.equal(on_gpu.cpu(), hard_ternary(weight, group_size=group_size))
