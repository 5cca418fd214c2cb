"""Test every packed tensor under torch.

The tests cover products, dtypes, devices, copies, saving, compile and export.
"""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from hestia_tune.methods import Fairy2iMethod, TernaryMethod
from hestia_tune.tensors import pack, packed_tensor

METHODS = {
    "ternary group": TernaryMethod(group_size=16),
    "ternary channel": TernaryMethod(group_size="channel"),
    "ternary tensor": TernaryMethod(group_size="tensor"),
    "fairy2i tensor": Fairy2iMethod(),
    "fairy2i columns": Fairy2iMethod(num_stages=3, granularity=4),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
methods = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
one_of_each = pytest.mark.parametrize(
    "method", [METHODS["ternary group"], METHODS["fairy2i tensor"]], ids=["ternary", "fairy2i"]
)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def packed(method, dtype=torch.float32, shape=(10, 64), seed=0) -> packed_tensor.PackedTensor:
    generator = torch.Generator().manual_seed(seed)
    return pack(method, torch.randn(shape, generator=generator)).to(dtype)


def inputs(dtype=torch.float32, shape=(3, 64), seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def packed_linear(method, dtype=torch.float32, shape=(10, 64)) -> nn.Linear:
    linear = nn.Linear(shape[1], shape[0], dtype=dtype).requires_grad_(False)
    linear.weight = nn.Parameter(packed(method, dtype, shape), requires_grad=False)
    return linear


def assert_same(actual, expected) -> None:
    assert type(actual) is type(expected) and actual.stride() == expected.stride()
    for name in ("device", "is_transposed", *expected.tensor_attribute_names):
        assert getattr(actual, name) == getattr(expected, name), name
    assert torch.equal(actual.qdata, expected.qdata)
    assert torch.equal(actual.scale, expected.scale)


@methods
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("lead", [(3,), (2, 3), ()])
def test_linear_equals_the_dequantized_linear(method, dtype, inference, lead):
    weight, x = packed(method, dtype), inputs(dtype, (*lead, 64))
    bias, dense = inputs(dtype, (10,)), weight.dequantize()
    with torch.inference_mode(inference):
        for b in (None, bias):
            expected = F.linear(x, dense, b)
            assert expected.dtype == dtype
            assert torch.equal(F.linear(x, weight, b), expected)
            assert torch.equal(F.linear(input=x, weight=weight, bias=b), expected)
            assert torch.equal(torch.ops.aten.linear.default(x, weight, b), expected)
        assert torch.equal(x @ weight.t(), x @ dense.t())


@methods
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("inference", [False, True])
def test_decomposed_linear_and_other_products(method, dtype, inference):
    weight, x, bias = packed(method, dtype), inputs(dtype), inputs(dtype, (10,))
    dense, grad = weight.dequantize(), inputs(dtype, (3, 10))
    with torch.inference_mode(inference):
        assert torch.equal(torch.mm(x, weight.t()), torch.mm(x, dense.t()))
        assert torch.equal(torch.addmm(bias, x, weight.t()), torch.addmm(bias, x, dense.t()))
        scaled = torch.addmm(bias, x, weight.t(), beta=0.5, alpha=2.0)
        assert torch.equal(scaled, torch.addmm(bias, x, dense.t(), beta=0.5, alpha=2.0))
        assert torch.equal(torch.mm(grad, weight), torch.mm(grad, dense))
        assert torch.equal(F.linear(grad, weight.t()), F.linear(grad, dense.t()))
        assert torch.equal(torch.mm(weight, x.t()), torch.mm(dense, x.t()))


@one_of_each
def test_all_products_come_from_one_function(method, monkeypatch):
    weight, x, bias = packed(method), inputs(), inputs(shape=(10,))
    calls = []
    monkeypatch.setattr(packed_tensor, "multiply", lambda *args: calls.append(args) or x)
    for product in (
        lambda: F.linear(x, weight, bias),
        lambda: torch.ops.aten.linear.default(x, weight, bias),
        lambda: torch.mm(x, weight.t()),
        lambda: torch.addmm(bias, x, weight.t()),
    ):
        product()
    assert len(calls) == 4 and all(call[1].shape == weight.shape for call in calls)


@one_of_each
def test_linear_passes_the_gradient_of_its_input(method):
    weight, x = packed(method), inputs().requires_grad_()
    F.linear(x, weight).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 10) @ weight.dequantize())


@one_of_each
def test_another_input_dtype_is_refused_but_under_autocast(method):
    weight, x = packed(method, torch.bfloat16), inputs(torch.float32)
    with pytest.raises(RuntimeError, match="dtype"):
        F.linear(x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(F.linear(x, weight), F.linear(x, weight.dequantize()))


@methods
def test_to_dtype_changes_the_presented_dtype_and_never_the_parts(method):
    weight = packed(method)
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
            assert_same(convert(weight.t()), new.t())
    assert weight.to(torch.float32) is weight
    with pytest.raises(TypeError, match="presents one of"):
        weight.to(torch.int8)


@methods
def test_a_module_with_packed_weights_changes_dtype_and_device(method):
    linear = packed_linear(method)
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


@methods
@pytest.mark.parametrize("turn", [False, True])
def test_copies(method, turn):
    weight = packed(method, torch.bfloat16)
    weight = weight.t() if turn else weight
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
        assert torch.equal(other.dequantize(), weight.dequantize())
        assert other.qdata.data_ptr() != weight.qdata.data_ptr(), name
    same = [weight.detach(), weight.cpu(), weight.data]
    if not turn or isinstance(method, Fairy2iMethod):
        same.append(weight.contiguous())
    for other in same:
        assert_same(other, weight)
        assert other.qdata.data_ptr() == weight.qdata.data_ptr()


@methods
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_load_state_dict_assigns_to_a_plain_linear(method, device, tmp_path):
    source = packed_linear(method, torch.bfloat16)
    other = copy.deepcopy(source)
    assert isinstance(other.weight, nn.Parameter) and not other.weight.requires_grad
    torch.save(other.state_dict(), tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True, mmap=True)
    model = nn.Sequential(nn.Linear(64, 10, device=device).requires_grad_(False))
    model.load_state_dict({f"0.{name}": value for name, value in state.items()}, assign=True)
    assert isinstance(model[0].weight, nn.Parameter) and not model[0].weight.requires_grad
    assert_same(model[0].weight.detach(), source.weight.detach())
    x = inputs(torch.bfloat16)
    assert torch.equal(model(x), source(x))


@one_of_each
def test_load_state_dict_without_assign_copies_in_place(method):
    target, source = packed_linear(method), packed_linear(method)
    source.weight = nn.Parameter(packed(method, seed=9), requires_grad=False)
    held = target.weight.qdata
    target.load_state_dict(source.state_dict())
    assert_same(target.weight.detach(), source.weight.detach())
    assert target.weight.qdata is held
    dense = nn.Linear(64, 10)
    dense.load_state_dict(source.state_dict())
    assert torch.equal(dense.weight, source.weight.dequantize())


@methods
def test_copy_between_other_layouts_is_refused(method):
    weight = packed(method)
    others = [packed(other) for other in METHODS.values() if other is not method]
    others += [packed(Fairy2iMethod(num_stages=1)), packed(method, shape=(12, 64))]
    others += [packed(METHODS[k], shape=(64, 10)).t() for k in ("ternary tensor", "fairy2i tensor")]
    for other in (*others, torch.zeros(10, 64)):
        with pytest.raises(ValueError, match="same shape and scales"):
            weight.copy_(other)
    weight.copy_(packed(method, torch.bfloat16, seed=3))
    assert weight.dtype == torch.float32
    assert torch.equal(weight.scale, packed(method, seed=3).scale)


@methods
@dtypes
def test_compiled_is_eager(method, dtype):
    torch._dynamo.reset()
    linear = packed_linear(method, dtype)
    compiled = torch.compile(linear, fullgraph=True)
    for x in (inputs(dtype), inputs(dtype, (2, 5, 64))):
        assert torch.equal(compiled(x), linear(x))
        with torch.inference_mode():
            assert torch.equal(compiled(x), linear(x))


@one_of_each
def test_compiled_function_of_weights_of_several_shapes(method):
    torch._dynamo.reset()

    # Skip the code generator, because it takes most of the time.
    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(x, weight, bias):
        return F.linear(x, weight, bias), x @ weight.t()

    for shape in ((10, 64), (12, 64), (6, 64)):
        weight, x, bias = packed(method, shape=shape), inputs(), inputs(shape=shape[:1])
        expected = F.linear(x, weight, bias), x @ weight.t()
        for actual, value in zip(function(x, weight, bias), expected, strict=True):
            assert torch.equal(actual, value)


@methods
@pytest.mark.parametrize("decompose", [False, True])
def test_exported_is_eager(method, decompose):
    linear, x = packed_linear(method, torch.bfloat16), inputs(torch.bfloat16)
    program = torch.export.export(linear, (x,))
    program = program.run_decompositions() if decompose else program
    assert torch.equal(program.module()(x), linear(x))


REFUSED = {
    "rows": lambda w: w[2:5],
    "columns": lambda w: w[:, 16:],
    "every other row": lambda w: w[::2],
    "one row": lambda w: w[3],
    "an entry": lambda w: w[3, 3],
    "rows by index": lambda w: w[torch.tensor([0, 1])],
    "pieces": lambda w: w.chunk(2),
    "pieces of columns": lambda w: w.split([16, 16], dim=1),
    "rows apart": lambda w: w.unbind(0),
    "flat": lambda w: w.view(-1),
    "another shape": lambda w: w.reshape(5, 64),
    "one axis more": lambda w: w.unsqueeze(0),
    "expanded": lambda w: w.expand(2, 10, 32),
    "other strides": lambda w: w.as_strided((5, 32), (64, 1)),
    "joined": lambda w: torch.cat([w, w]),
    "stacked": lambda w: torch.stack([w, w]),
    "padded": lambda w: F.pad(w, [0, 0, 0, 2]),
    "zeros": lambda w: w.new_zeros(4, 32),
    "arithmetic": lambda w: w + 1,
    "in place": lambda w: w.mul_(2),
    "sum": lambda w: w.sum(),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("inference", [False, True])
@one_of_each
def test_operators_that_cannot_stay_packed_raise(method, name, inference):
    weight = packed(method, shape=(10, 32))
    message = "whole, not cut, joined or sharded; got aten.*dequantize"
    with torch.inference_mode(inference):
        for value in (weight, weight.t()):
            with pytest.raises(NotImplementedError, match=message):
                REFUSED[name](value)


@pytest.fixture
def two_ranks():
    """Return a mesh of this process and a missing one. Nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@one_of_each
def test_sharding_is_refused_and_ignoring_works(method, two_ranks):
    message = "not cut, joined or sharded.*load it whole on every rank"
    for placement in (Shard(0), Shard(1), Replicate()):
        with pytest.raises(NotImplementedError, match=message):
            distribute_tensor(packed(method), two_ranks, [placement])
    model = nn.Sequential(packed_linear(method), nn.Linear(10, 4))
    with pytest.raises(NotImplementedError, match=message):
        fully_shard(copy.deepcopy(model), mesh=two_ranks)
    fully_shard(model, mesh=two_ranks, ignored_params={model[0].weight})
    assert type(model[0].weight.data) is type(packed(method))
    assert model(inputs()).shape == (3, 4)


@pytest.mark.gpu
@methods
@dtypes
def test_cuda(method, dtype):
    host = packed(method, dtype)
    weight = host.to("cuda")
    assert weight.qdata.is_cuda and weight.scale.is_cuda
    assert torch.equal(weight.dequantize().cpu(), host.dequantize())
    x = inputs(dtype).cuda()
    assert torch.equal(F.linear(x, weight), F.linear(x, weight.dequantize()))
    assert_same(weight.cpu(), host)
    assert pack(method, inputs(dtype, (10, 64)).cuda()).qdata.is_cuda
    torch._dynamo.reset()  # Otherwise the ninth and later cases would not be compiled.
    compiled = torch.compile(lambda x, w: F.linear(x, w))
    torch.testing.assert_close(compiled(x, weight), F.linear(x, weight))
