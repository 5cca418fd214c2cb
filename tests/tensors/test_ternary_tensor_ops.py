"""A TernaryTensor under torch: products, dtypes, devices, copies, saving, compile, export."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hestia_tune.functional import ternary_codes
from hestia_tune.tensors import TernaryTensor, packed_tensor

GROUP_SIZES = [16, "channel", "tensor"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
group_sizes = pytest.mark.parametrize("group_size", GROUP_SIZES)
dtypes = pytest.mark.parametrize("dtype", DTYPES)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def packed(group_size, dtype=torch.float32, shape=(10, 64), seed=0) -> TernaryTensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    return TernaryTensor.from_codes(*ternary_codes(weight, group_size=group_size), dtype=dtype)


def inputs(dtype=torch.float32, shape=(3, 64), seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def packed_linear(group_size, dtype=torch.float32, shape=(10, 64)) -> nn.Linear:
    linear = nn.Linear(shape[1], shape[0], dtype=dtype).requires_grad_(False)
    linear.weight = nn.Parameter(packed(group_size, dtype, shape), requires_grad=False)
    return linear


def assert_same(actual: TernaryTensor, expected: TernaryTensor) -> None:
    assert type(actual) is TernaryTensor
    for name in ("shape", "dtype", "block_size", "device"):
        assert getattr(actual, name) == getattr(expected, name), name
    assert torch.equal(actual.qdata, expected.qdata)
    assert torch.equal(actual.scale, expected.scale)


@group_sizes
@dtypes
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("lead", [(3,), (2, 3), ()])
def test_linear_is_that_of_the_dequantized_weight(group_size, dtype, inference, lead):
    weight, x = packed(group_size, dtype), inputs(dtype, (*lead, 64))
    bias, dense = inputs(dtype, (10,)), weight.dequantize()
    with torch.inference_mode(inference):
        for b in (None, bias):
            expected = F.linear(x, dense, b)
            assert expected.dtype == dtype
            assert torch.equal(F.linear(x, weight, b), expected)
            assert torch.equal(F.linear(input=x, weight=weight, bias=b), expected)
            assert torch.equal(torch.ops.aten.linear.default(x, weight, b), expected)
        assert torch.equal(x @ weight.t(), x @ dense.t())


@group_sizes
@dtypes
def test_decomposed_linear(group_size, dtype):
    weight, x, bias = packed(group_size, dtype), inputs(dtype), inputs(dtype, (10,))
    dense = weight.dequantize()
    assert torch.equal(torch.mm(x, weight.t()), torch.mm(x, dense.t()))
    assert torch.equal(torch.addmm(bias, x, weight.t()), torch.addmm(bias, x, dense.t()))
    scaled = torch.addmm(bias, x, weight.t(), beta=0.5, alpha=2.0)
    assert torch.equal(scaled, torch.addmm(bias, x, dense.t(), beta=0.5, alpha=2.0))
    grad = inputs(dtype, (3, 10))
    assert torch.equal(torch.mm(grad, weight), torch.mm(grad, dense))


def test_all_products_come_from_one_function(monkeypatch):
    weight, x, bias = packed(16), inputs(), inputs(shape=(10,))
    calls = []
    monkeypatch.setattr(packed_tensor, "packed_linear", lambda *args: calls.append(args) or x)
    for product in (
        lambda: F.linear(x, weight, bias),
        lambda: torch.ops.aten.linear.default(x, weight, bias),
        lambda: torch.mm(x, weight.t()),
        lambda: torch.addmm(bias, x, weight.t()),
    ):
        product()
    assert len(calls) == 4 and all(call[1].shape == weight.shape for call in calls)


def test_linear_passes_the_gradient_of_its_input():
    weight, x = packed(16), inputs().requires_grad_()
    F.linear(x, weight).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 10) @ weight.dequantize())


def test_another_input_dtype_is_refused_but_under_autocast():
    weight, x = packed(16, torch.bfloat16), inputs(torch.float32)
    with pytest.raises(RuntimeError, match="dtype"):
        F.linear(x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(F.linear(x, weight), F.linear(x, weight.dequantize()))


@group_sizes
def test_to_dtype_changes_what_is_presented_and_never_the_scale(group_size):
    weight = packed(group_size)
    conversions = {
        torch.bfloat16: (lambda w: w.to(torch.bfloat16), lambda w: w.bfloat16()),
        torch.float16: (lambda w: w.to(dtype=torch.float16), lambda w: w.half()),
        torch.float64: (lambda w: w.to("cpu", torch.float64), lambda w: w.double()),
    }
    for dtype, ways in conversions.items():
        for convert in ways:
            new = convert(weight)
            assert new.dtype == new.dequantize().dtype == dtype
            assert torch.equal(new.scale, weight.scale) and torch.equal(new.qdata, weight.qdata)
            assert_same(new.to(torch.float32), weight)
    assert weight.to(torch.float32) is weight
    with pytest.raises(TypeError, match="presents float32"):
        weight.to(torch.int8)


@group_sizes
def test_a_module_with_packed_weights_changes_dtype_and_device(group_size):
    linear = packed_linear(group_size)
    scale = linear.weight.scale.clone()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        linear.to(dtype)
        assert linear.weight.dtype == linear.bias.dtype == dtype
        assert torch.equal(linear.weight.scale, scale)
        x = inputs(dtype)
        expected = F.linear(x, linear.weight.dequantize(), linear.bias)
        assert torch.equal(linear(x), expected)
    linear.to("meta")
    assert linear.weight.is_meta and linear.weight.qdata.is_meta and linear.weight.scale.is_meta
    assert linear(inputs().to("meta")).shape == (3, 10)
    linear.to_empty(device="cpu")
    assert linear.weight.qdata.device.type == "cpu" and linear.weight.shape == (10, 64)


@group_sizes
def test_copies(group_size):
    weight = packed(group_size, torch.bfloat16)
    file = io.BytesIO()
    torch.save({"weight": weight}, file)
    file.seek(0)
    copies = {
        "clone": weight.clone(),
        "deepcopy": copy.deepcopy(weight),
        "pickle": pickle.loads(pickle.dumps(weight)),
        "load": torch.load(file, weights_only=True)["weight"],
    }
    for name, other in copies.items():
        assert_same(other, weight)
        assert other.qdata.data_ptr() != weight.qdata.data_ptr(), name
    for same in (weight.detach(), weight.cpu(), weight.contiguous(), weight.data):
        assert_same(same, weight)
        assert same.qdata.data_ptr() == weight.qdata.data_ptr()


def test_a_parameter_survives_saving_and_deepcopy():
    linear = packed_linear(16)
    other = copy.deepcopy(linear)
    assert isinstance(other.weight, nn.Parameter) and not other.weight.requires_grad
    file = io.BytesIO()
    torch.save(linear.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True, mmap=False)
    assert_same(state["weight"], linear.weight.detach())


@group_sizes
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_load_state_dict_assigns_to_a_plain_linear(group_size, device):
    source = packed_linear(group_size, torch.bfloat16)
    model = nn.Sequential(nn.Linear(64, 10, device=device).requires_grad_(False))
    model.load_state_dict({f"0.{k}": v for k, v in source.state_dict().items()}, assign=True)
    assert isinstance(model[0].weight, nn.Parameter) and not model[0].weight.requires_grad
    assert_same(model[0].weight.detach(), source.weight.detach())
    x = inputs(torch.bfloat16)
    assert torch.equal(model(x), source(x))


def test_load_state_dict_without_assign_copies_in_place():
    target, source = packed_linear(16), packed_linear(16)
    source.weight = nn.Parameter(packed(16, seed=9), requires_grad=False)
    held = target.weight.qdata
    target.load_state_dict(source.state_dict())
    assert_same(target.weight.detach(), source.weight.detach())
    assert target.weight.qdata is held
    dense = nn.Linear(64, 10)
    dense.load_state_dict(source.state_dict())
    assert torch.equal(dense.weight, source.weight.dequantize())


def test_copy_between_other_layouts_is_refused():
    weight = packed(16)
    for other in (packed("channel"), packed(16, shape=(9, 64)), torch.zeros(10, 64)):
        with pytest.raises(ValueError, match="same shape and scales"):
            weight.copy_(other)
    weight.copy_(packed(16, torch.bfloat16, seed=3))
    assert weight.dtype == torch.float32
    assert torch.equal(weight.scale, packed(16, seed=3).scale)


@group_sizes
@dtypes
def test_compiled_is_eager(group_size, dtype):
    torch._dynamo.reset()
    linear = packed_linear(group_size, dtype)
    compiled = torch.compile(linear, fullgraph=True)
    for x in (inputs(dtype), inputs(dtype, (2, 5, 64))):
        assert torch.equal(compiled(x), linear(x))
        with torch.inference_mode():
            assert torch.equal(compiled(x), linear(x))


def test_compiled_function_of_weights_of_several_shapes():
    @torch.compile(fullgraph=True)
    def function(x, weight, bias):
        return F.linear(x, weight, bias)

    for shape in ((10, 64), (12, 64), (7, 64)):
        weight, x, bias = packed(16, shape=shape), inputs(), inputs(shape=shape[:1])
        assert torch.equal(function(x, weight, bias), F.linear(x, weight, bias))


@group_sizes
@pytest.mark.parametrize("decompose", [False, True])
def test_exported_is_eager(group_size, decompose):
    linear, x = packed_linear(group_size, torch.bfloat16), inputs(torch.bfloat16)
    program = torch.export.export(linear, (x,))
    program = program.run_decompositions() if decompose else program
    assert torch.equal(program.module()(x), linear(x))


@pytest.mark.gpu
@gpu
@group_sizes
@dtypes
def test_cuda(group_size, dtype):
    host = packed(group_size, dtype)
    weight = host.to("cuda")
    assert weight.qdata.is_cuda and weight.scale.is_cuda
    assert torch.equal(weight.dequantize().cpu(), host.dequantize())
    x = inputs(dtype).cuda()
    assert torch.equal(F.linear(x, weight), F.linear(x, weight.dequantize()))
    assert_same(weight.cpu(), host)
    compiled = torch.compile(lambda x, w: F.linear(x, w))
    torch.testing.assert_close(compiled(x, weight), F.linear(x, weight))
