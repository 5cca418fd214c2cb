"""Test that a hard model is finite, or that an error names the weight on every rank."""

import pytest
import torch
from torch import nn

import hestia_tune
from hestia_tune.distributed import ensure_process_group
from hestia_tune.export.torchao import packed_entries
from hestia_tune.methods import Fairy2iMethod
from hestia_tune.qat.hard_state import hard_state_dict

pytestmark = pytest.mark.usefixtures("end_process_group")


def prepared(component):
    torch.manual_seed(0)
    layers = {"up": nn.Linear(32, 16, bias=False), "norm": nn.LayerNorm(16)}
    model = nn.ModuleDict(layers | {"down": nn.Linear(16, 32, bias=False)})
    ensure_process_group(torch.device("cpu"))
    return component(group_size=8, include=["up", "down"]).prepare(model)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("kind", "parameter", "name"),
    [
        ("LSQ", "down.weight", "down.weight"),
        ("LSQ", "down.step", "down.weight"),
        ("SEQ", "up.weight", "up.weight"),
        ("DLT", "up.offset", "up.weight"),
        ("Tequila", "down.weight", "down.weight"),
        ("LSQ", "norm.weight", "norm.weight"),
    ],
)
def test_a_number_that_is_not_finite_names_its_weight(kind, parameter, name, bad):
    model = prepared(getattr(hestia_tune, kind))
    state = hard_state_dict(model)
    assert {"up.weight", "down.weight", "norm.weight"} <= state.keys()
    assert all(value.dtype == torch.bfloat16 and value.isfinite().all() for value in state.values())
    with torch.no_grad():
        model.get_parameter(parameter).view(-1)[3] = bad
    with pytest.raises(FloatingPointError, match=f"^{name} has NaN or infinity") as raised:
        hard_state_dict(model)
    assert raised.value.on_every_rank


def test_packing_latents_that_are_not_finite_names_the_weight():
    latent = torch.randn(8, 8)
    method = Fairy2iMethod()
    hard, latent[1, 2] = method.hard(latent), torch.nan
    entries = packed_entries(
        [("layers.0.q", hard)], {"layers.0.q": method}, latents={"layers.0.q": latent}
    )
    with pytest.raises(FloatingPointError, match=r"^layers\.0\.q has NaN or infinity"):
        list(entries)
