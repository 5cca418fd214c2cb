"""Tests `PackedWeights` after torchtune's generate recipe has loaded the weights."""

import pytest
import torch
from torch import nn

from hestia_tune.models import PackedWeights
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
