"""Test that the quantized linear equals F.linear, and saves no more than it for backward."""

import pytest
import references
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from hestia_tune.functional import hard_ternary, relaxed_ternary
from hestia_tune.methods import TernaryMethod, quantized_linear

QUANTIZER = TernaryMethod(group_size=32)
TAU, PRESSURE = torch.tensor(0.3), torch.tensor(0.6)


def make_inputs(shape=(2, 3), *, bias=True, dtype=torch.float32, requires_grad=True):
    """Return x (*shape, 64), weight (48, 64), and bias (48,) or None."""
    generator = torch.Generator().manual_seed(0)
    x, weight, b = (
        torch.randn(*size, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_(requires_grad)
        for size in ((*shape, 64), (48, 64), (48,))
    )
    return x, weight, b if bias else None


def value_and_grads(function, inputs, grad=None):
    """Return the output, and the gradients of the inputs that require a gradient."""
    y = function(*inputs)
    if grad is None:
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    trained = [t for t in inputs if t is not None and t.requires_grad]
    return y.detach(), torch.autograd.grad(y, trained, grad)


def eager(x, weight, bias, tau=TAU, pressure=PRESSURE):
    return quantized_linear(x, weight, bias, tau, pressure, QUANTIZER)


@pytest.fixture(scope="module")
def compiled():
    return torch.compile(eager, fullgraph=True)


@pytest.mark.parametrize("tau, pressure", [(0.0, 1.0), (0.0, 0.5), (0.3, 0.6), (0.02, 1.0)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 1, 3), (0,)])
def test_equals_autograd_of_the_equations(shape, bias, tau, pressure):
    inputs = make_inputs(shape, bias=bias, dtype=torch.float64)
    scalars = torch.tensor([tau, pressure], dtype=torch.float64).unbind()

    def reference(x, weight, bias):
        if tau > 0:
            return F.linear(x, references.eq7_effective(weight, tau, pressure, 32), bias)
        straight_through = weight + (references.eq2_hard(weight, 32) - weight).detach()
        return F.linear(x, (1 - pressure) * weight + pressure * straight_through, bias)

    got = value_and_grads(lambda *args: eager(*args, *scalars), inputs)
    expected = value_and_grads(reference, inputs)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "x weight", "weight bias"])
def test_inputs_without_gradient(wanted):
    x, weight, bias = make_inputs(requires_grad=False)
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        tensor.requires_grad_(name in wanted.split())
    _, got = value_and_grads(eager, (x, weight, bias))
    _, expected = value_and_grads(
        lambda x, w, b: F.linear(x, relaxed_ternary(w, TAU, PRESSURE, group_size=32), b),
        (x, weight, bias),
    )
    torch.testing.assert_close(got, expected)


def test_strided_inputs_and_gradients():
    x, weight, bias = make_inputs((3, 2))
    strided = x.detach().permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_()
    assert not strided.is_contiguous()
    for grad in (torch.ones(1).expand(3, 2, 48), torch.randn(48, 2, 3).permute(2, 1, 0)):
        got = value_and_grads(eager, (strided, weight, bias), grad)
        expected = value_and_grads(eager, (x, weight, bias), grad.contiguous())
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
def test_autocast_computes_in_its_dtype_as_a_plain_linear_does(param_dtype, bias):
    inputs = make_inputs(bias=bias, dtype=param_dtype)
    plain = [t if t is None else t.detach().clone().requires_grad_() for t in inputs]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = eager(*inputs)
        weight = relaxed_ternary(plain[1], TAU, PRESSURE, group_size=32)
        expected = F.linear(plain[0], weight, plain[2])
    grad = torch.randn_like(y)
    y.backward(grad)
    expected.backward(grad)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)
    for ours, theirs in zip(inputs, plain, strict=True):
        if ours is not None:
            assert ours.grad.dtype == param_dtype
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(use_reentrant):
    def block(x, weight, bias):
        return torch.relu(eager(x, weight, bias))

    plain, recomputed = make_inputs(), make_inputs()
    block(*plain).square().sum().backward()
    checkpoint(block, *recomputed, use_reentrant=use_reentrant).square().sum().backward()
    for ours, expected in zip(recomputed, plain, strict=True):
        assert torch.equal(ours.grad, expected.grad)


def test_changing_the_temperature_before_backward_is_an_error():
    tau = TAU.clone()
    y = eager(*make_inputs(), tau)
    tau.fill_(0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def saved_by(function, *inputs) -> list[torch.Tensor]:
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        function(*inputs)
    return saved


def storages(tensors) -> dict[int, int]:
    """Return bytes by address, so that a tensor that is saved twice counts once."""
    return {t.data_ptr(): t.nbytes for t in tensors}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_saves_its_input_the_latent_weight_and_two_scalars(mode, bias, compiled):
    x, weight, b = make_inputs(bias=bias)
    saved = saved_by(compiled if mode == "compiled" else eager, x, weight, b, TAU, PRESSURE)
    assert sorted(t.data_ptr() for t in saved) == sorted(
        t.data_ptr() for t in (x, weight, TAU, PRESSURE)
    )
    assert sum(t.nbytes for t in saved) <= sum(storages(saved_by(F.linear, x, weight)).values()) + 8


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_saves_no_more_than_a_plain_linear_when_part_of_it_is_frozen(frozen):
    x, weight, _ = make_inputs()
    (x if frozen == "x" else weight).requires_grad_(False)
    ours = storages(t for t in saved_by(eager, x, weight, None) if t.dim() > 0)
    plain = storages(saved_by(F.linear, x, weight))
    latent = {weight.data_ptr()} if frozen == "x" else set()  # The Jacobian needs it.
    assert set(ours) <= set(plain) | latent


def test_compiled_equals_eager_over_a_schedule_with_one_compilation(compiled):
    inputs = make_inputs()
    _, weight, bias = inputs
    got, graphs = [], []
    points = [(0.3, 0.0), (0.3, 0.5), (0.3, 1.0), (0.2, 1.0), (1e-6, 1.0), (0.0, 1.0)]
    for point in points:
        scalars = torch.tensor(point).unbind()
        got.append(value_and_grads(lambda *args, s=scalars: compiled(*args, *s), inputs))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == graphs[:1] * len(points)
    for point, result in zip(points, got, strict=True):
        scalars = torch.tensor(point).unbind()
        expected = value_and_grads(lambda *args, s=scalars: eager(*args, *s), inputs)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    # The last point is hard, so it has no tolerance.
    hard = hard_ternary(weight, group_size=32)
    assert torch.equal(got[-1][0], F.linear(inputs[0], hard, bias))


def test_compiled_without_bias_or_with_strided_tensors_equals_eager(compiled):
    x, weight, _ = make_inputs((3, 2))
    x = x.detach().permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_()
    weight = weight.detach().t().contiguous().t().requires_grad_()
    grad = torch.randn(48, 2, 3).permute(2, 1, 0)
    inputs = (x, weight, None)
    got = value_and_grads(lambda *args: compiled(*args, TAU, PRESSURE), inputs, grad)
    torch.testing.assert_close(got, value_and_grads(eager, inputs, grad), rtol=1e-4, atol=1e-4)


def test_operators_keep_their_promises():
    """Check schemas, and shapes and strides of the fake kernels, by torch.library."""
    x, weight, bias = make_inputs(requires_grad=False)
    key, latent = QUANTIZER.key(), [weight, TAU, PRESSURE]
    ops = torch.ops.hestia
    for op, args in (
        (ops.product, (x, bias, latent, [], False)),
        (ops.product, (x[0, 0], None, latent, [], False)),
        (ops.product, (x.permute(1, 0, 2), None, latent, [], False)),
        (ops.product, (torch.ones(1).expand(2, 3, 48), None, latent, [], True)),
        (ops.product, (torch.randn(48, 3, 2).permute(2, 1, 0), None, latent, [], True)),
        (ops.formula, ("effective_weight", latent, [])),
        (ops.formula, ("vjp", [torch.randn(48, 64), *latent], [])),
    ):
        torch.library.opcheck(op, (key, *args), test_utils=("test_schema", "test_faketensor"))
