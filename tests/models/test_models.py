"""Tests components by YAML key, writing the hard model, and packed weights in torchtune."""

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from hestia_tune import Fairy2iTensor, TernaryTensor
from hestia_tune.export.torchao import packed_entries
from hestia_tune.methods import Fairy2iMethod, TernaryMethod
from hestia_tune.models import PackedWeights
from hestia_tune.models.loading import instantiate
from hestia_tune.tensors import INT4Tensor
from hestia_tune.training.outputs import write_hard_model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"_component_": "torch.nn.Linear", "in_feature": 3}, "part: .*in_feature"),
        ({"_component_": "torch.nn.Nothing"}, "part: .*torch.nn.Nothing"),
        ({"in_features": 3}, "part: .*_component_"),
        (
            {"_component_": "json.load", "fp": 3},
            None,
        ),  # a bug in the component does not name the key
        ({"_component_": "hestia_tune.models.HuggingFaceTokenizer", "path": "/nowhere"}, "part: "),
        ({"_component_": "hestia_tune.HestiaQATQuantizer", "group_size": 1.5}, "part: group_size"),
    ],
)
def test_errors_of_a_component_name_its_key(options, message):
    error = AttributeError if message is None else ValueError
    with pytest.raises(error, match=message):
        instantiate(OmegaConf.create(options), "part")


def test_a_component_gets_its_arguments():
    linear = instantiate(
        OmegaConf.create({"_component_": "torch.nn.Linear", "bias": False}), "k", 3, 2
    )
    assert linear.weight.shape == (2, 3) and linear.bias is None
    assert instantiate(None, "k") is None


class Checkpointer:
    """A checkpointer that writes into epoch_0 of its output folder, as torchtune's does."""

    def __init__(self, fails: bool = False):
        self._output_dir, self.fails = Path("/nowhere"), fails

    def save_checkpoint(self, state, epoch, intermediate_checkpoint):
        folder = self._output_dir / f"epoch_{epoch}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"dtype": "float32"}')
        (folder / "config.json").chmod(0o444)
        if self.fails:
            raise OSError(28, "No space left on device")
        torch.save(state, folder / "weights")


def test_the_hard_model_replaces_the_old_one_only_when_it_is_whole(tmp_path):
    folder, checkpointer = tmp_path / "hard_model", Checkpointer()
    write_hard_model({"w": torch.zeros(1)}, checkpointer, folder, {"step": 1})
    with pytest.raises(OSError, match="No space left"):
        write_hard_model({"w": torch.ones(1)}, Checkpointer(fails=True), folder, {"step": 2})
    assert json.loads((folder / "hestia.json").read_text()) == {"step": 1}
    assert json.loads((folder / "config.json").read_text()) == {"torch_dtype": "bfloat16"}
    assert torch.load(folder / "weights", weights_only=True)["model"]["w"] == 0
    write_hard_model({"w": torch.ones(1)}, checkpointer, folder, {"step": 3})
    assert json.loads((folder / "hestia.json").read_text()) == {"step": 3}
    assert torch.load(folder / "weights", weights_only=True)["model"]["w"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["hard_model"]
    assert checkpointer._output_dir == Path("/nowhere")


def test_packed_weights_of_every_method():
    def make():
        layers = [nn.Linear(8, 6), nn.Linear(6, 5)]
        return nn.ModuleDict({"layers": nn.ModuleList(layers)})

    kinds = {"ternary, group_size=4": TernaryTensor, "fairy2i, num_stages=1": Fairy2iTensor}
    for method, kind in kinds.items():
        first, second = PackedWeights(method, include=["*"]).quantize(make())["layers"]
        assert type(first.weight.data) is kind and not first.weight.requires_grad
        assert first.weight.shape == (6, 8)
        assert (
            type(second.weight) is nn.Parameter
        )  # 4 does not divide 6, and the number of rows is odd
        assert type(second.weight.data) is torch.Tensor
    first, second = PackedWeights("ternary, group_size=channel", ["*"], ["*.0"]).quantize(make())[
        "layers"
    ]
    assert type(first.weight.data) is torch.Tensor and type(second.weight.data) is TernaryTensor
    others = {"layers.1": "int4, group_size=3"}
    first, second = PackedWeights("ternary, group_size=4", ["*"], layers=others).quantize(make())[
        "layers"
    ]
    assert type(first.weight.data) is TernaryTensor and type(second.weight.data) is INT4Tensor


@pytest.mark.parametrize("method", [TernaryMethod(group_size=8), Fairy2iMethod(granularity=2)])
def test_entries_equal_the_dense_weight(method):
    """Codes are read from hard weights if they follow from them, otherwise from latent weights."""
    latents = {name: torch.randn(4, 8) for name in ("a", "b", "norm")}
    hard = {
        name: (method.hard(w) if name != "norm" else w).to(torch.bfloat16)
        for name, w in latents.items()
    }
    quantized = dict.fromkeys("ab", method)
    arguments = {} if method.codes_follow_from_hard else {"latents": latents}
    for name, stored in packed_entries(iter(hard.items()), quantized, **arguments):
        assert (type(stored) is torch.Tensor) == (name == "norm")
        plain = stored if name == "norm" else stored.dequantize()
        assert stored.dtype == torch.bfloat16 and torch.equal(plain, hard[name])


def test_codes_of_other_latents_are_refused():
    method, weight = Fairy2iMethod(granularity=2), torch.randn(4, 8)
    entries = packed_entries(
        [("a", method.hard(weight))], {"a": method}, latents={"a": torch.randn(4, 8)}
    )
    with pytest.raises(RuntimeError, match="a packed differs from the hard model"):
        list(entries)
