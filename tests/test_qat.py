"""Test prepare and convert on small models, without a trainer. See also test_qat_models."""

import copy
import dataclasses
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchao.quantization import quantize_
from torchao.quantization.qat.linear import (
    FakeQuantizedLinear,
    disable_linear_fake_quant,
    enable_linear_fake_quant,
)

from hestia_tune import (
    INT4,
    AnnealingSchedule,
    HestiaConfig,
    HestiaQATQuantizer,
    ScheduleDriver,
    is_transformer_linear,
    quantized_linears,
)
from hestia_tune.functional import hard_ternary, relaxed_ternary


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """An embedding, two blocks of two linears, and a head, as in a transformer."""

    def __init__(self, dim: int = 32, vocab: int = 11):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Block(dim) for _ in range(2)])
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


QUANTIZED = ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"]
TOKENS = torch.arange(22).view(2, 11) % 11
HARD = {"tau": 0.0, "pressure": 1.0}


def make_model(seed: int = 0, **options) -> Model:
    torch.manual_seed(seed)
    return Model(**options)


def make_prepared(group_size=32, **options) -> Model:
    model = make_model()
    config = HestiaConfig(group_size=group_size, **options)
    quantize_(model, config, filter_fn=is_transformer_linear)
    return model


def convert(model: nn.Module) -> nn.Module:
    quantize_(model, HestiaConfig(step="convert"))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", [16, "channel", "tensor"])
def test_prepared_and_hard_equals_converted_without_tolerance(group_size, dtype):
    model = make_prepared(group_size, **HARD).to(dtype)
    latent = {name: linear.weight for name, linear in quantized_linears(model).items()}
    prepared = model(TOKENS)
    assert torch.equal(convert(model)(TOKENS), prepared)
    for name, weight in latent.items():
        linear = model.get_submodule(name)
        assert type(linear) is nn.Linear and linear.weight.dtype == dtype
        assert torch.equal(linear.weight, hard_ternary(weight, group_size=group_size))


def test_prepared_and_hard_equals_converted_under_autocast():
    model = make_prepared(**HARD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(TOKENS), convert(model)(TOKENS))


def test_prepare_computes_with_the_effective_weight():
    model, plain = make_prepared(tau=0.2, pressure=0.7), make_model()
    for name in QUANTIZED:
        linear = plain.get_submodule(name)
        linear.weight.data = relaxed_ternary(linear.weight.data, 0.2, 0.7, group_size=32)
    torch.testing.assert_close(model(TOKENS), plain(TOKENS))


def test_prepare_shares_parameters_and_leaves_the_rest_alone():
    model = make_model().eval()
    model.layers[0].up.weight.requires_grad_(False)
    parameters, keys, before = dict(model.named_parameters()), list(model.state_dict()), model.head
    assert HestiaQATQuantizer(group_size=16).prepare(model) is model
    assert list(quantized_linears(model)) == QUANTIZED
    assert {name: id(p) for name, p in model.named_parameters()} == {
        name: id(p) for name, p in parameters.items()
    }
    assert list(model.state_dict()) == keys
    assert model.head is before and type(model.embedding) is nn.Embedding
    assert not any(module.training for module in model.modules())
    assert all(isinstance(m, FakeQuantizedLinear) for m in quantized_linears(model).values())
    assert model.layers[0].up.bias is parameters["layers.0.up.bias"]
    assert model.layers[0].down.bias is None


def test_prepare_and_convert_twice_change_nothing_more():
    model = make_prepared(**HARD)
    linear = model.layers[0].up
    HestiaQATQuantizer(group_size=32).prepare(model)
    assert model.layers[0].up is linear
    once = convert(model).layers[0].up
    assert convert(model).layers[0].up is once


def test_convert_keeps_bias_mode_names_and_frozen_weights():
    model = make_prepared().eval()
    model.layers[0].up.weight.requires_grad_(False)
    keys, bias = list(model.state_dict()), model.layers[0].up.bias
    HestiaQATQuantizer(group_size=32).convert(model)
    assert list(model.state_dict()) == keys and model.layers[0].up.bias is bias
    assert not any(module.training for module in model.modules())
    assert not model.layers[0].up.weight.requires_grad and model.layers[1].up.weight.requires_grad


def make_tied() -> nn.ModuleDict:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(32, 32, bias=False), "b": nn.Linear(32, 32)})
    model["b"].weight = model["a"].weight
    return model


def test_tied_weights_stay_tied():
    model = make_tied()
    quantizer = HestiaQATQuantizer(group_size=32, include=["*"])
    quantizer.prepare(model)
    assert len(quantized_linears(model)) == 2
    assert model["a"].weight is model["b"].weight
    quantizer.convert(model)
    assert model["a"].weight is model["b"].weight


def test_a_linear_used_in_two_places_is_quantized_in_both():
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(shared), nn.Sequential(shared)])})
    HestiaQATQuantizer(group_size=32).prepare(model)
    first, second = model["layers"][0][0], model["layers"][1][0]
    assert type(first) is type(second) and first.weight is second.weight


def test_a_linear_of_two_names_in_one_place_is_quantized_and_converted_under_both():
    block = nn.Module()
    block.up = block.gate = nn.Linear(32, 32)
    model = nn.ModuleDict({"layers": nn.ModuleList([block])})
    quantizer = HestiaQATQuantizer(group_size=32, include=["*"])
    quantizer.prepare(model)
    assert isinstance(block.up, FakeQuantizedLinear) and block.up is block.gate
    quantizer.convert(model)
    assert type(block.up) is type(block.gate) is nn.Linear
    assert block.up.weight is block.gate.weight


def test_meta_device_then_materialised():
    """Swap on meta without touching memory. The buffers are created again after to_empty."""
    with torch.device("meta"):
        model = Model()
    HestiaQATQuantizer(group_size=32).prepare(model)
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    model.to_empty(device="cpu")
    for linear in quantized_linears(model).values():
        linear.weight_fake_quantizer.reset_buffers("cpu")
    model.load_state_dict(make_model().state_dict())
    expected = make_model()
    HestiaQATQuantizer(group_size=32).prepare(expected)
    assert torch.equal(model(TOKENS), expected(TOKENS))


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16, torch.float64])
def test_temperature_and_pressure_keep_dtype_and_value_when_the_model_is_cast(cast):
    model = make_prepared(tau=0.3, pressure=0.7).to(cast)
    assert model.layers[0].up.weight.dtype == cast
    for linear in quantized_linears(model).values():
        buffers = linear.weight_fake_quantizer
        assert buffers.tau.dtype == buffers.pressure.dtype == torch.float32
        assert torch.equal(buffers.tau, torch.tensor(0.3))
        assert torch.equal(buffers.pressure, torch.tensor(0.7))


def test_fake_quantization_can_be_switched_off_the_torchao_way():
    plain, model = make_model()(TOKENS), make_prepared()
    quantized = model(TOKENS)
    assert not torch.equal(quantized, plain)
    model.apply(disable_linear_fake_quant)
    assert torch.equal(model(TOKENS), plain)
    weight = model.layers[0].up.weight
    assert model.layers[0].up.weight_fake_quantizer(weight) is weight
    model.apply(enable_linear_fake_quant)
    assert torch.equal(model(TOKENS), quantized)
    model.layers[0].up.weight_fake_quantizer.enabled = False
    assert not torch.equal(model(TOKENS), quantized)


def test_the_fake_quantizer_module_gives_the_effective_weight():
    linear = make_prepared(tau=0.2, pressure=0.5).layers[0].up
    expected = relaxed_ternary(linear.weight, 0.2, 0.5, group_size=32)
    torch.testing.assert_close(linear.weight_fake_quantizer(linear.weight), expected)


def test_a_deep_copy_is_independent():
    model = make_prepared()
    model(TOKENS).sum().backward()
    twin = copy.deepcopy(model)
    before = model(TOKENS)
    assert torch.equal(twin(TOKENS), before)
    driver = ScheduleDriver(AnnealingSchedule(10), quantized_linears(twin))
    with torch.no_grad():
        twin.layers[0].up.weight.zero_()
    driver.set_step(9)
    assert torch.equal(model(TOKENS), before)
    assert not torch.equal(twin(TOKENS), before)


def test_a_prepared_model_loads_the_state_of_a_plain_one_and_back():
    plain, prepared = make_model(seed=1), make_prepared()
    prepared.load_state_dict(plain.state_dict())
    assert torch.equal(prepared.layers[1].down.weight, plain.layers[1].down.weight)
    plain.load_state_dict(make_prepared().state_dict())
    assert torch.equal(plain.layers[1].down.weight, make_model().layers[1].down.weight)


def test_prepare_reaches_through_compile_and_checkpoint_wrappers():
    model = make_model()
    HestiaQATQuantizer(group_size=32).prepare(model)
    expected = model(TOKENS)

    wrapped = make_model()
    for i, layer in enumerate(wrapped.layers):
        wrapped.layers[i] = checkpoint_wrapper(layer)
    wrapped = torch.compile(wrapped, backend="eager")
    latent = wrapped(TOKENS)
    HestiaQATQuantizer(group_size=32, include=["layers.*"], exclude=[]).prepare(wrapped)
    assert list(quantized_linears(wrapped)) == QUANTIZED
    quantized = wrapped(TOKENS)
    torch.testing.assert_close(quantized, expected)
    assert not torch.allclose(quantized, latent)


def test_a_wrapper_around_a_linear_itself_does_not_show_in_its_name():
    model = make_model()
    model.layers[0].up = checkpoint_wrapper(model.layers[0].up)
    HestiaQATQuantizer(group_size=32, include=["layers.*.up"]).prepare(model)
    assert list(quantized_linears(model)) == ["layers.0.up", "layers.1.up"]


def test_training_without_a_trainer_lowers_the_loss_of_the_hard_model():
    torch.manual_seed(0)
    model = make_prepared()
    steps = 60
    driver = ScheduleDriver(AnnealingSchedule(steps), quantized_linears(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    target = (TOKENS * 3 + 1) % 11

    def loss():
        return nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), target.flatten())

    with driver.hard():
        before = loss().item()
    for step in range(steps):
        driver.set_step(step)
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    with driver.hard():
        after = loss().item()
    assert after < 0.2 * before
    convert(model)
    assert loss().item() == after


def test_the_core_does_not_import_torchtune():
    modules = "hestia_tune, hestia_tune.functional, hestia_tune.methods.hestia"
    code = f"import sys, {modules}; print([m for m in sys.modules if 'torchtune' in m])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip().splitlines()[-1] == "[]", result.stderr


def test_a_linear_under_two_names_of_one_parent_is_swapped_under_both():
    parent = nn.Module()
    parent.q = parent.k = nn.Linear(32, 32)
    model = nn.ModuleList([nn.Sequential(parent)])
    HestiaQATQuantizer(group_size=32).prepare(model)
    assert parent.q is parent.k and type(parent.q).__name__ == "QuantizedLinear"


def test_linears_that_cannot_be_swapped():
    with pytest.raises(ValueError, match="is itself a linear"):
        HestiaQATQuantizer(group_size=32, include=["*"]).prepare(nn.Linear(32, 32))
    layers = nn.ModuleList([nn.TransformerEncoderLayer(32, 2, 64)])
    HestiaQATQuantizer(group_size=32).prepare(layers)
    assert list(quantized_linears(layers)) == ["0.linear1", "0.linear2"]


def test_encoder_layers_of_torch_are_quantized_in_evaluation():
    """In evaluation they read the weights of plain linears themselves."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True), 2)
    HestiaQATQuantizer(group_size=32).prepare(encoder.eval())
    x = torch.randn(2, 5, 32)
    expected = encoder(x).detach()  # with gradients
    with torch.no_grad():
        assert torch.allclose(encoder(x), expected, atol=1e-5)


@pytest.mark.parametrize("target", ["dense", "ternary"])
@pytest.mark.parametrize("name", ["weight", "scale_logit"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_converting_nan_or_infinity_names_the_layer(target, name, bad):
    component = HestiaQATQuantizer(group_size=32, scale="learned")
    component.config = dataclasses.replace(component.config, target=target)
    model = component.prepare(make_model())
    with torch.no_grad():
        getattr(model.layers[1].up, name)[0, 0] = bad
    with pytest.raises(FloatingPointError, match=r"^layers\.1\.up has NaN or infinity"):
        component.convert(model)
    with pytest.raises(FloatingPointError, match="^a linear has NaN or infinity"):
        convert(model)


def blocks_of_two() -> nn.Module:
    """Return two blocks with the linears "up" and "down"."""
    return nn.ModuleDict(
        {
            "layers": nn.ModuleList(
                nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)}) for _ in "ab"
            )
        }
    )


def test_every_layer_has_the_method_of_the_last_pattern_that_names_it():
    layers = {
        "*.down": INT4(group_size=32),
        "layers.0.*": {"_component_": "hestia_tune.SEQ", "bits": 2, "group_size": 16},
        "layers.1.up": None,
    }
    component = HestiaQATQuantizer(group_size=32, scale_lr=0.1, layers=layers)
    model = component.prepare(blocks_of_two())
    found = {name: layer.method.key() for name, layer in quantized_linears(model).items()}
    seq = "seq, group_size=16, start=absmax, bits=2"
    assert found == {
        "layers.0.up": seq,
        "layers.0.down": seq,
        "layers.1.down": "int4, group_size=32",
    }
    assert component.name == "mixed"
    assert component.key().startswith("mixed, layers=")
    assert component.key().endswith(f": ternary, group_size=32; int4, group_size=32; {seq}; dense")
    assert component.describe(model)["methods"] == found
    swapped = dict(reversed(layers.items()))  # another pattern wins
    assert HestiaQATQuantizer(group_size=32, layers=swapped).key() != component.key()
    latent = model["layers"][1]["down"].weight.detach().clone()
    hard = component.convert(model)["layers"][1]["down"]
    assert type(hard) is nn.Linear
    assert torch.equal(hard.weight, INT4(group_size=32).method.hard(latent))


def test_one_method_is_named_as_before():
    for layers, count in (({}, 4), ({"layers.1.*": None}, 2)):  # dense layers are no method
        component = HestiaQATQuantizer(group_size=32, layers=layers)
        model = component.prepare(blocks_of_two())
        assert component.key() == component.method.key() and component.name == "ternary"
        description = component.describe(model)
        assert description.keys() == {"quantizer", "layers"} and len(description["layers"]) == count


@pytest.mark.parametrize(
    ("component", "layers", "message"),
    [
        (HestiaQATQuantizer, ["*.up"], "layers must map patterns to components; got list"),
        (HestiaQATQuantizer, {"*.up": "int4"}, "must be a component of hestia_tune.*got 'int4'"),
        (HestiaQATQuantizer, {"*.up": {"bits": 4}}, "must be a component of hestia_tune"),
        (HestiaQATQuantizer, {"*.up": {"_component_": "os.system"}}, "os.system, which is no"),
        (HestiaQATQuantizer, {"*.up": {"_component_": "INT4", "exclude": []}}, "got exclude"),
        (HestiaQATQuantizer, {"*.up": {"_component_": "INT4", "grp": 1}}, "unknown option grp"),
        (HestiaQATQuantizer, {"*.upp": None}, "layers pattern '.*.upp' matches no linear.*named"),
        (HestiaQATQuantizer, {"*.up": INT4(group_size=24)}, "24 does not divide.*layers.0.up"),
        (HestiaQATQuantizer, {"*": None}, "can quantize none of the 4 selected linears"),
        (INT4, {"*.up": HestiaQATQuantizer(group_size=32)}, "make the component with a temp"),
    ],
)
def test_wrong_methods_of_layers(component, layers, message):
    with pytest.raises((ValueError, TypeError), match=message):
        component(group_size=32, layers=layers).prepare(blocks_of_two())
