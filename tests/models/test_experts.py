"""Test that the experts of a mixture are quantized as if each were a linear of its own."""

import copy

import pytest
import torch
from families import EXPERTS, SHAPE
from torch import nn
from torch.func import functional_call

from hestia_tune import (
    INT2,
    LSQ,
    TWN,
    AbsMean,
    Fairy2iQATQuantizer,
    HestiaQATQuantizer,
    Tequila,
    quantized_linears,
)
from hestia_tune.functional import hard_ternary, relaxed_ternary
from hestia_tune.models.loading import kept_in_blocks

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(1, 200, (2, 12), generator=torch.Generator().manual_seed(0))
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
MIXTURES = {
    "Qwen3MoeConfig": EXPERTS | {"head_dim": 16},
    "MixtralConfig": LOCAL,
    "OlmoeConfig": EXPERTS,
    "Qwen2MoeConfig": EXPERTS | {"shared_expert_intermediate_size": 32},
    "DeepseekV3Config": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "GraniteMoeConfig": LOCAL,
    "GptOssConfig": LOCAL | {"head_dim": 16, "rope_parameters": None},
}
NAMES = [name for name in MIXTURES if name != "GptOssConfig"]
SCALARS = {"tau": torch.tensor(0.3), "pressure": torch.tensor(0.7)}
GROUP = 32


def mixture(name: str = "Qwen3MoeConfig", implementation: str = "eager") -> nn.Module:
    """Return a small random mixture of experts: float64, or float32 for grouped products."""
    config = getattr(transformers, name)(**SHAPE | MIXTURES[name])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config,
        experts_implementation=implementation,
        dtype=torch.float32 if implementation == "grouped_mm" else torch.float64,
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0.0, 0.1)
    return model


def prepared(*args, **options) -> nn.Module:
    model = HestiaQATQuantizer(group_size=GROUP, **options).prepare(mixture(*args))
    for layer in quantized_linears(model).values():
        for key, value in SCALARS.items():
            getattr(layer.weight_fake_quantizer, key).copy_(value)
    return model


def is_expert(name: str) -> bool:
    return ".experts." in name


def one_by_one(function, weight: torch.Tensor, *args) -> torch.Tensor:
    """Return a function of a matrix, or of the matrix of each expert, one after the other."""
    if weight.dim() == 2:
        return function(weight, *args, group_size=GROUP)
    return torch.stack([function(each, *args, group_size=GROUP) for each in weight])


@pytest.mark.parametrize("name", NAMES)
def test_every_expert_is_quantized_as_a_matrix_of_its_own(name):
    plain = dict(mixture(name).named_parameters())
    layers = quantized_linears(prepared(name))
    experts = [n for n, p in plain.items() if p.dim() == 3]
    assert [n for n in layers if is_expert(n)] == experts and len(experts) == 4
    for key in experts:
        expected = one_by_one(relaxed_ternary, plain[key], *SCALARS.values())
        assert torch.equal(layers[key](), expected)
        assert not torch.equal(expected, plain[key])


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_a_plain_model_with_the_relaxed_weights(name, implementation):
    model, plain = prepared(name, implementation), mixture(name, implementation)
    names = [n if is_expert(n) else f"{n}.weight" for n in quantized_linears(model)]
    weights = dict(plain.named_parameters())
    relaxed = {n: one_by_one(relaxed_ternary, weights[n], *SCALARS.values()) for n in names}
    expected = functional_call(plain, relaxed, (), {"input_ids": TOKENS, "labels": TOKENS}).loss
    loss = model(TOKENS, labels=TOKENS).loss
    rtol, atol = (1e-9, 1e-12) if loss.dtype == torch.float64 else (1e-4, 1e-6)
    torch.testing.assert_close(loss, expected, rtol=rtol, atol=atol)
    expected.backward()
    loss.backward()
    found = dict(model.named_parameters())
    assert found.keys() == weights.keys()
    for key, value in weights.items():
        if value.grad is None:  # An expert that no token takes may have no gradient.
            assert found[key].grad is None
        else:
            torch.testing.assert_close(found[key].grad, value.grad, rtol=rtol, atol=atol)


def test_prepare_changes_no_names_and_no_values():
    plain, model = mixture(), prepared()
    state = model.state_dict()
    assert state.keys() == plain.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in plain.state_dict().items())
    again = HestiaQATQuantizer(group_size=GROUP).prepare(model)
    assert len(quantized_linears(again)) == len(quantized_linears(prepared()))


@torch.no_grad()
def test_convert_leaves_hard_weights_and_no_trace():
    model = prepared()
    for layer in quantized_linears(model).values():
        layer.weight_fake_quantizer.is_hard = True
    expected = model(TOKENS).logits
    twin = copy.deepcopy(model)
    assert torch.equal(twin(TOKENS).logits, expected)
    HestiaQATQuantizer(group_size=GROUP).convert(model)
    assert torch.equal(model(TOKENS).logits, expected) and not quantized_linears(model)
    plain = mixture()
    assert str(model) == str(plain)
    for key, value in plain.named_parameters():
        if is_expert(key):
            assert torch.equal(model.get_parameter(key), one_by_one(hard_ternary, value))
    block = model.model.layers[0].mlp.experts
    assert not block._forward_pre_hooks and not block._forward_hooks
    assert torch.equal(twin(TOKENS).logits, expected)
    twin.model.layers[0].mlp.experts.down_proj.zero_()  # A copy reads its own weights.
    assert not torch.equal(twin(TOKENS).logits, expected)


@torch.no_grad()
def test_the_parameter_is_back_after_an_error():
    model = prepared()
    experts = model.model.layers[0].mlp.experts
    with pytest.raises(RuntimeError):
        experts(torch.zeros(3, 5), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
    assert isinstance(experts.gate_up_proj, nn.Parameter)


@torch.no_grad()
def test_a_cast_model_quantizes_in_the_new_dtype():
    model = prepared().bfloat16()
    assert model(TOKENS).logits.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert prepared().float()(TOKENS).logits.isfinite().all()
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.float())  # as FSDP2's mixed precision does
    with pytest.raises(ValueError, match="quantize_shards"):
        model(TOKENS)


def test_patterns_name_experts():
    exclude = prepared(exclude=["*.experts.*"])
    assert not any(map(is_expert, quantized_linears(exclude)))
    only = prepared(include=["*.1.mlp.experts.down_proj"])
    assert [*quantized_linears(only)] == ["model.layers.1.mlp.experts.down_proj"]
    assert "gate_up_proj" in kept_in_blocks(only)
    with pytest.raises(ValueError, match="matches no linear"):
        prepared(include=["*.mlp.gate"])  # a router


def test_transposed_experts_stay_dense_and_are_reported():
    model = prepared("GptOssConfig")
    assert not any(map(is_expert, quantized_linears(model)))
    assert "mlp.experts.gate_up_proj" in kept_in_blocks(model)


@pytest.mark.parametrize("component", [AbsMean, TWN, INT2])
def test_baselines_without_parameters_take_experts(component):
    model = component(group_size=GROUP).prepare(mixture())
    assert sum(map(is_expert, quantized_linears(model))) == 4
    model(TOKENS, labels=TOKENS).loss.backward()
    component(group_size=GROUP).convert(model)
    assert model(TOKENS).logits.isfinite().all()


@pytest.mark.parametrize(
    "component",
    [
        lambda **options: HestiaQATQuantizer(group_size="tensor", **options),
        lambda **options: HestiaQATQuantizer(group_size=GROUP, scale="learned", **options),
        lambda **options: LSQ(group_size=GROUP, **options),
        lambda **options: Tequila(group_size=GROUP, **options),
        lambda **options: Fairy2iQATQuantizer(**options),
    ],
)
def test_methods_that_cannot_take_experts_are_refused_by_name(component):
    with pytest.raises(ValueError, match=r"within rows.*experts.gate_up_proj; leave the experts"):
        component().prepare(mixture())
    skipping = component(skip_incompatible=True)
    model = skipping.prepare(mixture())
    assert len(skipping.skipped) == 4 and all(map(is_expert, skipping.skipped))
    assert quantized_linears(model).keys().isdisjoint(skipping.skipped)
