"""What `PackedWeights` does once torchtune's generate has loaded the weights."""

import pytest
import torch
from torch import nn

from hestia_tune.models import PackedWeights, llama
from hestia_tune.tensors import TernaryTensor


@pytest.mark.parametrize("kernel", ["int4pack", "dequantize"])
def test_kernels_are_chosen_and_nothing_is_compiled(monkeypatch, kernel):
    stances = []
    monkeypatch.setattr(torch.compiler, "set_stance", stances.append)
    method = "ternary, group_size=32"
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(64, 16, bias=False)])})
    model = PackedWeights(method, include=["*"], kernel=kernel).quantize(model)
    packed = TernaryTensor.from_hp(torch.randn(16, 64), group_size=32)
    model.load_state_dict({"layers.0.weight": packed}, assign=True)
    weight = model["layers"][0].weight
    assert torch.equal(weight.qdata, packed.qdata) and stances == ["force_eager"]
    assert (weight.kernel is None) == (kernel == "dequantize")


@pytest.mark.parametrize("case", ["tied", "untied", "packed head"])
def test_the_head_of_generate(monkeypatch, case):
    monkeypatch.setattr(torch.compiler, "set_stance", lambda _: None)
    sizes = {"vocab_size": 48, "num_layers": 1, "embed_dim": 32, "intermediate_dim": 64}
    sizes |= {"num_heads": 4, "num_kv_heads": 2, "max_seq_len": 16}
    found, tokens = {}, torch.arange(10)[None]
    for head in ("dense", "int8"):
        torch.manual_seed(0)
        model = llama(**sizes, tie_word_embeddings=case == "tied").requires_grad_(False)
        options = {"include": ["*"] if case == "packed head" else None, "kernel": "dequantize"}
        packed = PackedWeights("ternary, group_size=32", head=head, **options)
        state = dict(model.state_dict())
        model = packed.quantize(model)
        for name, weight in model.state_dict().items():
            if isinstance(weight, TernaryTensor):
                state[name] = TernaryTensor.from_hp(state[name], group_size=32)
        model.load_state_dict(state, assign=True)
        found[head] = model(tokens)
        model.load_state_dict(state, assign=True)  # once more
        assert torch.equal(model(tokens), found[head])
    if case == "packed head":
        assert torch.equal(*found.values())
    else:
        difference = (found["int8"] - found["dense"]).norm() / found["dense"].norm()
        assert 0 < difference < 0.03


def test_options_that_there_are_not():
    with pytest.raises(ValueError, match="head must be one of dense, int8; got 'q8'"):
        PackedWeights("ternary, group_size=32", head="q8")
