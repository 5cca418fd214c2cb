"""Test which linears are quantized: the default filter on real models, patterns, errors."""

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_
from torchtune.models.llama3_2 import llama3_2
from torchtune.models.qwen2 import qwen2
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hestia_tune import HestiaConfig, HestiaQATQuantizer, is_transformer_linear, quantized_linears

SHAPE = {"vocab_size": 96, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 64}
TORCHTUNE = {"attn": ["q_proj", "k_proj", "v_proj", "output_proj"], "mlp": ["w1", "w2", "w3"]}
TRANSFORMERS = {
    "self_attn": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "mlp": ["gate_proj", "up_proj", "down_proj"],
}
HUGGING_FACE = {
    "vocab_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "tie_word_embeddings": True,
}
MODELS = {
    "torchtune llama3_2": (
        lambda: llama3_2(**SHAPE, max_seq_len=32, intermediate_dim=96),
        "layers",
        TORCHTUNE,
    ),
    "torchtune qwen2": (
        lambda: qwen2(**SHAPE, max_seq_len=32, intermediate_dim=96, tie_word_embeddings=True),
        "layers",
        TORCHTUNE,
    ),
    "transformers llama": (
        lambda: LlamaForCausalLM(LlamaConfig(**HUGGING_FACE)),
        "model.layers",
        TRANSFORMERS,
    ),
    "transformers qwen2": (
        lambda: Qwen2ForCausalLM(Qwen2Config(**HUGGING_FACE)),
        "model.layers",
        TRANSFORMERS,
    ),
}
TOKENS = torch.arange(16).view(2, 8)


def logits(output) -> torch.Tensor:
    return getattr(output, "logits", output)


@pytest.mark.parametrize("name", MODELS)
def test_all_seven_linears_of_every_block_and_no_other(name):
    build, prefix, names = MODELS[name]
    torch.manual_seed(0)
    model = build()
    parameters = {key: id(p) for key, p in model.named_parameters()}
    HestiaQATQuantizer(group_size=32).prepare(model)
    expected = {
        f"{prefix}.{i}.{part}.{linear}"
        for i in range(2)
        for part, linears in names.items()
        for linear in linears
    }
    assert set(quantized_linears(model)) == expected
    assert {key: id(p) for key, p in model.named_parameters()} == parameters
    for linear in quantized_linears(model).values():
        linear.weight_fake_quantizer.tau.zero_()
    prepared = logits(model(TOKENS))
    HestiaQATQuantizer(group_size=32).convert(model)
    assert torch.equal(logits(model(TOKENS)), prepared)


def make_blocks(in_features: int = 64) -> nn.Module:
    def block():
        attention = nn.ModuleDict({n: nn.Linear(in_features, 8) for n in ("q_proj", "v_proj")})
        return nn.ModuleDict({"attn": attention, "mlp": nn.ModuleDict({"w1": nn.Linear(64, 8)})})

    blocks = nn.ModuleList([block() for _ in range(3)])
    return nn.ModuleDict({"layers": blocks, "output": nn.Linear(64, 8)})


@pytest.mark.parametrize(
    "include, exclude, expected",
    [
        (None, None, "layers.*.attn.q_proj layers.*.attn.v_proj layers.*.mlp.w1"),
        (["*"], None, "layers.*.attn.q_proj layers.*.attn.v_proj layers.*.mlp.w1 output"),
        (["*.mlp.*"], None, "layers.*.mlp.w1"),
        (["*.q_proj", "output"], None, "layers.*.attn.q_proj output"),
        (None, ["layers.*.attn.*"], "layers.*.mlp.w1"),
        (["layers.*"], ["*.[qk]_proj", "*.w1"], "layers.*.attn.v_proj"),
    ],
)
def test_include_and_exclude(include, exclude, expected):
    model = make_blocks()
    HestiaQATQuantizer(group_size=32, include=include, exclude=exclude).prepare(model)
    names = [pattern.replace("*", str(i), 1) for i in range(3) for pattern in expected.split()]
    assert set(quantized_linears(model)) == set(names)


def test_first_and_last_block_left_out():
    model = make_blocks()
    HestiaQATQuantizer(group_size=32, exclude=["layers.0.*", "layers.2.*"]).prepare(model)
    assert all(name.startswith("layers.1.") for name in quantized_linears(model))
    assert len(quantized_linears(model)) == 3


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"include": ["layers.*.k_proj"]}, ValueError, "include pattern 'layers.*.k_proj' matches"),
        ({"exclude": ["lm_head"]}, ValueError, "exclude pattern 'lm_head' matches no linear"),
        ({"include": ["outputs"]}, ValueError, "did you mean output?"),
        ({"include": ["output"], "exclude": ["*"]}, ValueError, "no linear of the model is selec"),
        ({"include": []}, ValueError, "no linear of the model is selected (it has 10)"),
        ({"include": "layers.*"}, TypeError, "include must be a list of patterns; got the string"),
        ({"exclude": "output"}, TypeError, "exclude must be a list of patterns; got the string"),
        ({"group_size": 48}, ValueError, "48 does not divide in_features 64 of layers.0.attn.q_"),
        ({"group_size": 0}, ValueError, "group_size must be a positive int"),
        ({"group_size": "block"}, ValueError, 'must be a positive int, "channel" or "tensor"'),
        ({"group_size": 1.5}, TypeError, "got 1.5 of type float"),
    ],
)
def test_errors_name_the_rule_and_leave_the_model_as_it_was(options, error, message):
    model = make_blocks()
    with pytest.raises(error) as caught:
        HestiaQATQuantizer(**({"group_size": 32} | options)).prepare(model)
    assert message in str(caught.value)
    assert not quantized_linears(model)


def test_the_layer_that_does_not_fit_is_named_with_the_sizes_that_do():
    """Check that no layer is swapped before all are checked, although the first layers fit."""
    model = make_blocks(in_features=128)
    with pytest.raises(ValueError) as caught:
        HestiaQATQuantizer(group_size=128).prepare(model)
    assert "group_size 128 does not divide in_features 64 of layers.0.mlp.w1" in str(caught.value)
    assert 'use one of 32, 64, "channel" or "tensor"' in str(caught.value)
    assert not quantized_linears(model)


def test_a_model_without_blocks_says_how_to_name_its_linears():
    with pytest.raises(ValueError, match=r"\(it has 1\); name the linears to quantize by"):
        HestiaQATQuantizer(group_size=32).prepare(nn.Sequential(nn.Linear(32, 32)))


def test_plain_quantize_takes_every_linear_unless_filtered():
    model = make_blocks()
    quantize_(model, HestiaConfig(group_size=32), filter_fn=is_transformer_linear)
    assert len(quantized_linears(model)) == 9
    quantize_(model, HestiaConfig(group_size=32))
    assert "output" in quantized_linears(model) and len(quantized_linears(model)) == 10


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"step": "train"}, ValueError, 'step must be "prepare" or "convert"; got \'train\''),
        ({"tau": -1.0}, ValueError, r"tau must be in \[0, 100\]; got -1.0"),
        ({"tau": float("nan")}, ValueError, r"tau must be in \[0, 100\]; got nan"),
        ({"tau": "auto"}, TypeError, "tau must be a number; got 'auto'"),
        ({"pressure": 1.5}, ValueError, r"pressure must be in \[0, 1\]; got 1.5"),
        ({"pressure": True}, TypeError, "pressure must be a number; got True"),
        ({"group_size": -128}, ValueError, "group_size must be a positive int"),
        ({"group_size": [128]}, TypeError, "of type list"),
    ],
)
def test_the_config_checks_itself(options, error, message):
    with pytest.raises(error, match=message):
        HestiaConfig(**options)
