"""Test that a bucket of layers gives each layer what it would get alone, to the last digit."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hestia_tune import (
    DLT,
    INT4,
    LSQ,
    TWN,
    Fairy2iQATQuantizer,
    HestiaQATQuantizer,
    Tequila,
    TwoBit,
    quantized_linears,
)
from hestia_tune.blocks import move
from hestia_tune.qat import buckets
from hestia_tune.qat.buckets import LatentRows, buckets_of
from hestia_tune.qat.leaves import Leaves, use_leaves

LEARNED = {"scale": "learned", "threshold": "learned", "offset": "learned"}
COMPONENTS = {
    "ternary": lambda: HestiaQATQuantizer(group_size=32),
    "channel": lambda: HestiaQATQuantizer(group_size="channel"),
    "learned": lambda: HestiaQATQuantizer(group_size=32, **LEARNED),
    "binary": lambda: HestiaQATQuantizer(group_size=32, codebook="binary"),
    "four levels": lambda: TwoBit(group_size=32),
    "four levels, learned": lambda: TwoBit(group_size=32, scale="learned"),
    "int4": lambda: INT4(group_size=32),
    "lsq": lambda: LSQ(group_size=32),
    "dlt": lambda: DLT(group_size=32),
    "twn": lambda: TWN(group_size=32),
}
ALONE = {
    "tensor": lambda: HestiaQATQuantizer(group_size="tensor"),
    "tequila": lambda: Tequila(group_size=32),
    "fairy2i": lambda: Fairy2iQATQuantizer(),
}


class Operators(TorchDispatchMode):
    """Record the operators that are launched."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func)
        return func(*args, **(kwargs or {}))


def prepared(component, count: int = 4) -> nn.Module:
    """Return quantized linears with temperatures of their own, and parameters off their start."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 4 + 2 * k, bias=False) for k in range(count)]
    model = component.prepare(nn.ModuleDict({"layers": nn.ModuleList(layers)}))
    for k, layer in enumerate(quantized_linears(model).values()):
        layer.weight_fake_quantizer.tau.fill_(0.1 + 0.1 * k)
        layer.weight_fake_quantizer.pressure.fill_(0.7)
        with torch.no_grad():
            for value in layer.method_parameters():
                value.add_(0.01 * value.abs().mean() * torch.randn_like(value))
    return model


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("name", COMPONENTS)
def test_a_bucket_equals_its_layers(name, hard):
    component = COMPONENTS[name]()
    component._include = ["*"]
    layers = [*quantized_linears(prepared(component)).values()]
    (bucket,) = buckets_of(layers)
    alone = [LatentRows(layer) for layer in layers]
    made = bucket.quantize(torch.bfloat16, hard=hard)
    for ours, rows in zip(made, alone, strict=True):
        theirs = rows.quantize(torch.bfloat16, is_hard=hard)
        assert torch.equal(ours["weight"], theirs["weight"])
    grads = [{"weight": torch.randn_like(each["weight"])} for each in made]
    for ours, grad, rows in zip(bucket.pull_back(grads), grads, alone, strict=True):
        for one, other in zip(ours, rows.pull_back(grad), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_bucket_that_is_laid_out_equals_one_that_is_not(name):
    component = COMPONENTS[name]()
    component._include = ["*"]
    models = [prepared(component) for _ in range(2)]
    (plain,), (ours,) = (buckets_of(quantized_linears(model).values()) for model in models)
    before = list(models[1].parameters())
    ours.lay_out()
    after = list(models[1].parameters())
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(after, models[0].parameters(), strict=True))
    storages = [parameter.untyped_storage().data_ptr() for parameter in after]
    assert len(set(storages)) == 1 + len(ours.layers[0].method.parameter_names)

    def same() -> list[torch.Tensor]:
        for bucket in (plain, ours):
            for k, layer in enumerate(bucket.layers):
                layer.weight_fake_quantizer.tau.fill_(0.3 - 0.05 * k)
        made = [bucket.quantize(torch.float32) for bucket in (plain, ours)]
        assert all(torch.equal(a["weight"], b["weight"]) for a, b in zip(*made, strict=True))
        grads = [{"weight": torch.randn_like(each["weight"])} for each in made[0]]
        pulled = [bucket.pull_back(grads) for bucket in (plain, ours)]
        for one, other in zip(*pulled, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        return [each["weight"] for each in made[0]]

    first = same()
    with torch.no_grad():  # what an optimizer changes is what the next step quantizes
        for model in models:
            for parameter in model.parameters():
                parameter.mul_(1.5)
    second = same()
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for model in models:  # other memory for the same parameters
        move(model.parameters(), "cpu", copy=True)
        with torch.no_grad():
            next(iter(model.parameters())).mul_(0.5)
    assert not torch.equal(same()[0], second[0])


@pytest.mark.filterwarnings("error")
def test_estimates_lay_out_tensors_without_memory():
    with FakeTensorMode():
        component = HestiaQATQuantizer(group_size=32, include=["*"])
        layers = nn.ModuleList([nn.Linear(64, 8, bias=False) for _ in range(2)])
        model = component.prepare(nn.ModuleDict({"layers": layers}))
        (bucket,) = buckets_of(quantized_linears(model).values())
        bucket.lay_out()
        assert [each["weight"].shape for each in bucket.quantize(torch.bfloat16)] == [(8, 64)] * 2


def test_a_bucket_that_is_laid_out_concatenates_gradients_only():
    component = HestiaQATQuantizer(group_size=32, include=["*"], **LEARNED)
    (bucket,) = buckets_of(quantized_linears(prepared(component)).values())
    bucket.lay_out()
    with Operators() as operators:
        made = bucket.quantize(torch.float32)
        bucket.pull_back([{"weight": torch.ones_like(each["weight"])} for each in made])
    joins = {torch.ops.aten.cat.default, torch.ops.aten.stack.default}
    assert [name for name in operators.names if name in joins] == [torch.ops.aten.cat.default]


@pytest.mark.parametrize("name", ALONE)
def test_scales_beyond_groups_are_alone(name):
    component = ALONE[name]()
    component._include = ["*"]
    model = prepared(component)
    assert [len(b.layers) for b in buckets_of(quantized_linears(model).values())] == [1] * 4


def test_layers_of_a_bucket_may_be_hard_or_without_gradient():
    component = HestiaQATQuantizer(group_size=32, include=["*"])
    layers = [*quantized_linears(prepared(component)).values()]
    layers[1].weight_fake_quantizer.is_hard = True
    (bucket,) = buckets_of(layers)
    for k, (made, layer) in enumerate(zip(bucket.quantize(torch.float32), layers, strict=True)):
        expected = LatentRows(layer).quantize(torch.float32, is_hard=k == 1)
        assert torch.equal(made["weight"], expected["weight"])
    grads = [{"weight": torch.ones_like(layer.weight)} for layer in layers]
    pulled = bucket.pull_back([grads[0], {}, *grads[2:]])
    assert pulled[1] is None
    for layer, grad, own in zip(layers, grads, pulled, strict=True):
        assert own is None or torch.equal(own[0], LatentRows(layer).pull_back(grad)[0])


def test_buckets_are_bounded_and_large_layers_are_alone(monkeypatch):
    component = HestiaQATQuantizer(group_size=32, include=["*"])
    layers = [*quantized_linears(prepared(component)).values()]  # of 4, 6, 8 and 10 rows
    monkeypatch.setattr(buckets, "BUCKET_WEIGHTS", 64 * 10)
    found = [[len(layer.weight) for layer in b.layers] for b in buckets_of(layers)]
    assert found == [[10], [4, 6], [8]]


@pytest.mark.parametrize("name", ["ternary", "learned", "four levels"])
def test_the_number_of_kernels_does_not_grow_with_the_layers(name):
    counts = []
    for count in (4, 16):
        component = COMPONENTS[name]()
        component._include = ["*"]
        model = prepared(component, count)
        use_leaves(model)
        leaves = Leaves(model, torch.float32)
        for layer in quantized_linears(model).values():
            layer.effective.grad = torch.ones_like(layer.effective)
        with Operators() as operators:
            leaves.refresh()
            leaves.pull_back(torch.tensor(0.5))
        counts.append(len(operators.names))
    assert counts[0] == counts[1]
