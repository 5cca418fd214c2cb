"""Test kernels against the dequantized product, and the choice of a kernel."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hestia_tune import Fairy2iTensor, TernaryTensor, use_kernel
from hestia_tune.tensors import BinaryTensor, INT2Tensor, TwoBitTensor
from hestia_tune.tensors import kernels as choice
from hestia_tune.tensors.kernels import Gemlite, Int4Pack, Kernel, stacked

# Largest relative error of a product (2-norm). Rounding to bfloat16 gives at most 0.4%.
TOLERANCE = {
    ("int4pack", torch.float32): 1e-5,
    ("int4pack", torch.bfloat16): 0.006,
}
# out_features, in_features, group_size: whole blocks, other sizes, rows that fill no block.
SHAPES = [
    (64, 256, 128),
    (48, 192, 64),
    (16, 96, 32),
    (32, 576, 192),
    (80, 512, 512),
    (32, 256, "channel"),
    (32, 512, "tensor"),
    (7, 64, 32),
    (5, 100, "channel"),
    (9, 98, "tensor"),
    (3, 7, "channel"),
]


def ternary(rows, columns, group_size, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 0.05
    return TernaryTensor.from_hp(weight, group_size=group_size).to(dtype)


def inputs(weight, rows, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, weight.shape[1], generator=generator)
    bias = torch.randn(weight.shape[0], generator=generator)
    return x.to(weight.dtype), bias.to(weight.dtype)


def relative_error(found, x, weight, bias):
    dense = weight.to(torch.float64).dequantize()
    expected = F.linear(x.double(), dense, None if bias is None else bias.double())
    return ((found.double() - expected).norm() / expected.norm()).item()


def layer(weight, bias=None):
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


@pytest.fixture
def kind() -> type[Kernel]:
    return Int4Pack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(kind, shape, dtype):
    weight = ternary(*shape, dtype)
    if reason := kind.limit(weight):
        with pytest.raises(ValueError, match=reason[:20]):
            choice.make(weight, kind)
        return
    kernel = choice.make(weight, kind)
    assert kernel.num_bytes > weight.qdata.nbytes
    for rows in (1, 2, 5, 33, 512):
        x, bias = inputs(weight, rows)
        for added in (None, bias):
            found = kernel(x, added)
            assert found.shape == (rows, shape[0]) and found.dtype == dtype
            assert relative_error(found, x, weight, added) < TOLERANCE[kind.name, dtype]


def test_every_shape_that_matters_has_a_kernel():
    for shape in SHAPES[:7]:
        assert not Int4Pack.limit(ternary(*shape))
    for shape in SHAPES[7:]:
        assert Int4Pack.limit(ternary(*shape))
    assert "groups" in Int4Pack.limit(ternary(16, 96, 48))


def test_memory_of_a_kernel(kind):
    weight = ternary(2048, 2048, 128, torch.bfloat16)
    kernel = choice.make(weight, kind)
    assert 8 * kernel.num_bytes / weight.numel() == pytest.approx(4.25, abs=0.001)


@pytest.mark.parametrize("tensor", [TernaryTensor, TwoBitTensor])
def test_codes_are_exact(kind, tensor):
    """Check that products with columns of the unit matrix give the weight: nothing is rounded."""
    generator = torch.Generator().manual_seed(0)
    weight = tensor.from_hp(torch.randn(32, 128, generator=generator), group_size=64)
    found, dense = choice.make(weight, kind)(torch.eye(128), None).t(), weight.dequantize()
    assert (found - dense).abs().max() < 1e-6 * dense.abs().max()


def test_nan_and_infinity_stay_not_finite(kind):
    weight = ternary(32, 128, 64)
    x, _ = inputs(weight, 3)
    x[0, 7], x[1, 9] = torch.nan, torch.inf
    found = choice.make(weight, kind)(x, None)
    assert found[0].isnan().all() and not found[1].isfinite().any()
    assert torch.equal(found[2:], choice.make(weight, kind)(x[2:], None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"num_stages": 1}, {"granularity": 32}], ids=str)
def test_complex_weights(kind, options, dtype):
    latent = torch.randn(32, 128, generator=torch.Generator().manual_seed(2)) * 0.05
    weight = Fairy2iTensor.from_hp(latent, **options).to(dtype)
    kernel = choice.make(weight, kind)
    assert kernel.name == kind.name
    for rows in (1, 6):
        x, bias = inputs(weight, rows)
        for added in (None, bias):
            found = kernel(x, added)
            assert relative_error(found, x, weight, added) < 2 * TOLERANCE[kind.name, dtype]


@pytest.mark.parametrize("num_stages", [1, 3])
def test_the_stack_holds_a_complex_weight_exactly(num_stages):
    weight = Fairy2iTensor.from_hp(torch.randn(6, 8).double(), num_stages=num_stages, granularity=2)
    parts = stacked(weight).dequantize().view(4, 3, num_stages, 4).sum(2)
    re_u, im_u, re_w, im_w = parts
    merged = torch.cat(
        [torch.cat([re_u + re_w, im_w - im_u], 1), torch.cat([im_u + im_w, re_u - re_w], 1)]
    )
    torch.testing.assert_close(merged, weight.dequantize(), rtol=1e-12, atol=1e-15)


def test_a_linear_uses_its_kernel_for_every_shape_of_input():
    weight = ternary(32, 128, 64, torch.bfloat16)
    linear = layer(weight, torch.ones(32, dtype=torch.bfloat16))
    use = use_kernel(linear, "int4pack")
    assert use.layers == {"weight": "int4pack"} and use.num_bytes > 0
    kernel = linear.weight.kernel
    kernel.max_rows = 1e9
    for shape in [(128,), (3, 128), (2, 3, 128), (0, 128), (2, 0, 128)]:
        x = torch.randn(shape).bfloat16()
        assert linear(x).shape == (*shape[:-1], 32)
    x = torch.randn(2, 3, 128).bfloat16()
    assert torch.equal(linear(x), kernel(x, linear.bias))
    assert torch.equal(linear(x[:, ::2]), kernel(x[:, ::2], linear.bias))
    with torch.inference_mode():
        assert torch.equal(linear(x), kernel(x, linear.bias))
    assert use_kernel(linear, "dequantize").layers == {"weight": "dequantize"}
    assert torch.equal(linear(x), F.linear(x, weight.dequantize(), linear.bias))


def test_products_that_a_kernel_does_not_take_are_dequantized():
    weight = ternary(32, 128, 64)
    linear = layer(weight)
    use_kernel(linear, "int4pack")
    kernel = linear.weight.kernel
    kernel.max_rows = 4
    dense, taken = weight.dequantize(), []
    kernel.product = lambda x: taken.append(len(x)) or F.linear(x, dense)
    linear(torch.randn(4, 128))
    assert taken == [4]
    x = torch.randn(5, 128)
    assert torch.equal(linear(x), F.linear(x, dense))
    x = torch.randn(2, 128, requires_grad=True)
    linear(x).sum().backward()
    assert torch.equal(x.grad, dense.sum(0).expand(2, -1))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert linear(x).dtype == torch.bfloat16
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 128)
    assert torch.equal(compiled(x), F.linear(x, dense))
    with torch.no_grad():
        linear.weight.copy_(ternary(32, 128, 64, seed=5))
    assert torch.equal(linear(x), F.linear(x, linear.weight.dequantize()))
    assert taken == [4]
    use_kernel(linear, "int4pack")
    linear.to(torch.bfloat16)
    assert torch.equal(linear(x.bfloat16()), F.linear(x.bfloat16(), linear.weight.dequantize()))


def test_copies_and_files_hold_no_kernel():
    linear = layer(ternary(32, 128, 64))
    use_kernel(linear, "int4pack")
    assert linear.weight.kernel is not None
    assert copy.deepcopy(linear).weight.kernel is None
    assert linear.state_dict()["weight"].kernel is None
    file = io.BytesIO()
    torch.save(linear.state_dict(), file)
    file.seek(0)
    found = torch.load(file, weights_only=True)["weight"]
    assert torch.equal(found.qdata, linear.weight.qdata)


class Slow(Kernel):
    """A kernel that takes a given time."""

    name, devices, dtypes = "slow", ("cpu",), (torch.float32,)

    def product(self, x):
        return F.linear(x, self._dense)

    def __init__(self, weight):
        super().__init__(weight)
        self._dense = weight.dequantize()


class Broken(Slow):
    name = "broken"

    def product(self, x):
        raise RuntimeError("no such instruction")


class OfOneRow(Slow):
    name = "of_one_row"

    def product(self, x):
        if len(x) > 1:
            raise RuntimeError("no such grid")
        return super().product(x)


class Fast(Slow):
    name = "fast"


@pytest.fixture
def timed(monkeypatch):
    """Return kernels of known speed, in seconds per row."""
    monkeypatch.setattr(choice, "_chosen", {})
    monkeypatch.setattr(choice, "KERNELS", {kind.name: kind for kind in (Slow, Broken, Fast)})
    times = {"dequantize": 10.0, "slow": 5.0, "fast": 1.0, "broken": 0.0}
    calls = []

    def seconds(function, *args):
        name = function.name if isinstance(function, Kernel) else "dequantize"
        assert len(args[0]) == 1
        calls.append(name)
        function(*args)
        return times[name]

    monkeypatch.setattr(choice, "_seconds", seconds)
    return times, calls


def test_auto_takes_the_fastest_for_one_row(timed):
    _, calls = timed
    model = nn.ModuleList(layer(ternary(8, 64, 32, seed=seed)) for seed in range(3))
    model.append(layer(ternary(8, 32, 32)))
    use = use_kernel(model)
    assert set(use.layers.values()) == {"fast"} and len(use.layers) == 4
    assert sorted(calls) == sorted(["dequantize", "slow", "broken", "fast"] * 2)  # once a shape
    assert "not broken for (8, 64): no such instruction" in str(use)
    use_kernel(model)
    assert len(calls) == 8


def test_auto_dequantizes_if_no_kernel_is_faster(timed):
    times, _ = timed
    times |= {"fast": 12.0, "slow": 12.0}
    linear = layer(ternary(8, 64, 32))
    assert use_kernel(linear).layers == {"weight": "dequantize"}
    assert linear.weight.kernel is None
    assert use_kernel(linear, "fast").layers == {"weight": "fast"}  # the given speed
    assert use_kernel(linear, "broken").layers == {"weight": "dequantize"}


def test_auto_measures_real_kernels_on_this_machine():
    model = nn.ModuleList([layer(ternary(32, 128, 64)), layer(ternary(7, 12, 4))])
    model.append(nn.Linear(4, 4))
    before = [module.weight.dequantize() for module in model[:2]]
    use = use_kernel(model)
    assert list(use.layers) == ["0.weight", "1.weight"]
    assert use.layers["1.weight"] == "dequantize"
    for module, dense in zip(model[:2], before, strict=True):
        x = torch.randn(3, dense.shape[1])
        expected = F.linear(x, dense)
        assert (module(x) - expected).norm() < 0.02 * expected.norm()
    assert "kernels: " in str(use)


def test_a_kernel_that_fails_later_is_never_an_error(monkeypatch, caplog):
    monkeypatch.setattr(choice, "_chosen", {})
    monkeypatch.setattr(choice, "KERNELS", {OfOneRow.name: OfOneRow})
    linear = layer(ternary(8, 64, 32))
    assert use_kernel(linear, "of_one_row").layers == {"weight": "of_one_row"}
    x = torch.randn(4, 64)
    assert torch.equal(linear(x), F.linear(x, linear.weight.dequantize()))
    assert linear.weight.kernel is None and "no longer by of_one_row: no such grid" in caplog.text


def test_a_stack_has_the_limits_of_its_kernel():
    weight = Fairy2iTensor.from_hp(torch.randn(32, 128))
    assert choice.make(weight, Int4Pack).max_rows == Int4Pack.max_rows == 32


def test_other_packed_weights_are_listed_as_dequantized():
    weight = torch.randn(8, 64)
    model = nn.ModuleList(
        [layer(kind.from_hp(weight, group_size=32)) for kind in (INT2Tensor, BinaryTensor)]
    )
    assert set(use_kernel(model).layers.values()) == {"dequantize"}


def test_names(monkeypatch):
    with pytest.raises(ValueError, match="kernel must be one of auto, dequantize, .*got 'int3'"):
        use_kernel(nn.Linear(2, 2), "int3")
    with pytest.raises(ValueError, match="got 'onnxruntime'; for speed on a CPU"):
        use_kernel(nn.Linear(2, 2), "onnxruntime")
    monkeypatch.setattr(Gemlite, "packages", ("no_such_package",))
    monkeypatch.setattr(Gemlite, "devices", ("cpu", "cuda"))
    linear = layer(ternary(8, 64, 32))
    with pytest.raises(ValueError, match=r"pip install 'hestia-tune\[cuda\]'"):
        use_kernel(linear, "gemlite")
    monkeypatch.setattr(choice, "_chosen", {})
    use = use_kernel(linear)  # no kernel
    assert any("hestia-tune[cuda]" in note for note in use.notes)
