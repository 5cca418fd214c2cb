"""Test that the experts of a mixture are quantized as if each were a linear of its own."""

import copy

import pytest
import torch
from families import EXPERTS, SHAPE
from torch import nn
from torch.distributed.tensor import DTensor

from hestia_tune import Fairy2iQATQuantizer, HestiaQATQuantizer, LSQ, quantized_linears
from hestia_tune.functional import hard_ternary, relaxed_ternary

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(1, 200, (2, 12), generator=torch.Generator().manual_seed(0))
MIXTURES = {
    "Qwen3MoeConfig": EXPERTS | {"head_dim": 16},
    "MixtralConfig": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "OlmoeConfig": EXPERTS,
    "GraniteMoeConfig": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
TAU, PRESSURE, GROUP = 0.3, 0.7, 32


def mixture(name: str = "Qwen3MoeConfig", implementation: str = "eager") -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, name)(**SHAPE | MIXTURES[name])
    model = transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation=implementation
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0.0, 0.1)
    return model


def prepared(*args, **options) -> nn.Module:
    component = HestiaQATQuantizer(group_size=GROUP, **options)
    model = component.prepare(mixture(*args))
    for layer in quantized_linears(model).values():
        layer.weight_fake_quantizer.tau.fill_(TAU)
        layer.weight_fake_quantizer.pressure.fill_(PRESSURE)
    return model


def experts_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.dim() == 3}


def test_first():
    for name in MIXTURES:
        model = prepared(name)
        print(name, [*quantized_linears(model)][:8])
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        print(loss, [(n, p.grad.abs().mean()) for n, p in experts_of(model).items()][:1])
        m2 = copy.deepcopy(model)
        assert torch.equal(m2(TOKENS).logits, model(TOKENS).logits)
        print(model.model.layers[0])
