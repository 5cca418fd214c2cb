"""Test a method that the package does not have: one class is enough for both of its doors."""

import io
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from tiny import logged, make_config, run, signal_at
from torch import nn
from torchao.quantization import quantize_

import hestia_tune
from hestia_tune.commands.convert import ConvertRecipe
from hestia_tune.config.run_config import RunConfig
from hestia_tune.errors import require_number
from hestia_tune.methods import Method
from hestia_tune.methods.groups import SCALE_EPS, nearest_code, round_scale
from hestia_tune.methods.straight_through import StraightThroughMethod
from hestia_tune.models.loading import load_model
from hestia_tune.tensors import TernaryTensor

pytestmark = pytest.mark.usefixtures("end_process_group")


@dataclass(frozen=True, kw_only=True)
class PeakMethod(StraightThroughMethod):
    """Codes {-1, 0, 1} times a share of the largest weight of a group.

    Args:
        group_size: See `GroupMethod`; not "tensor".
        share: The scale divided by the largest weight, in [0.1, 1].
    """

    name: ClassVar[str] = "peak"
    share: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        self.require_rows("peak")
        require_number("share", self.share, 0.1, 1)

    def scale_and_code(self, w, parameters, total, is_final):
        scale = (self.share * w.detach().abs().amax(-1, keepdim=True)).clamp(min=SCALE_EPS)
        scale = round_scale(scale, self.levels).to(w.dtype)
        return scale, nearest_code(w, scale)


METHOD = PeakMethod(group_size=32, share=0.6)


def test_the_names_follow_from_the_class():
    assert hestia_tune.Peak.__name__ == "Peak"
    assert hestia_tune.PeakConfig(group_size=32, share=0.6).method() == METHOD
    assert hestia_tune.Peak(group_size=32, share=0.6).method == METHOD
    assert Method.from_key("peak, group_size=32, share=0.6") == METHOD
    assert "share: The scale divided" in hestia_tune.Peak.__doc__
    assert not hestia_tune.Peak.has_temperature
    with pytest.raises(
        hestia_tune.errors.InputTypeError, match="unknown option shar; did you mean"
    ):
        hestia_tune.Peak(shar=1)
    with pytest.raises(ValueError, match=r"share must be in \[0.1, 1\]"):
        hestia_tune.PeakConfig(share=2)
    for wrong in ("Peek", "PeekConfig", "Config", "Any"):
        with pytest.raises(AttributeError, match=f"No hestia_tune attribute {wrong}"):
            getattr(hestia_tune, wrong)


def test_the_component_trains_resumes_evaluates_and_converts(model_dir, tmp_path):
    def config(folder, *options):
        config = make_config(model_dir, folder)
        config.quantizer = {"_component_": "hestia_tune.Peak", "group_size": 32, "share": 0.6}
        return OmegaConf.merge(config, OmegaConf.from_dotlist(list(options)))

    run(config(tmp_path / "whole"))
    cut = tmp_path / "cut"
    assert not run(config(cut, *signal_at(3, "SIGINT"))).finished
    run(config(cut, "resume_from_checkpoint=True"))
    assert logged(cut) == logged(tmp_path / "whole")

    final = config(cut, "convert.formats=[torchao,huggingface]")
    assert set(ConvertRecipe(final).run()) == {"torchao", "huggingface"}
    parsed = RunConfig.parse(final)
    arguments = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    checkpoint, about = load_model("checkpoint_hard", parsed, **arguments)
    assert about["quantizer"] == METHOD.key()
    tokens = torch.tensor([[1, 2, 3, 200]])
    for kind in ("trained", "packed"):
        model, _ = load_model(kind, parsed, **arguments)
        assert torch.equal(model(tokens), checkpoint(tokens))


def test_quantize_trains_saves_packs_and_converts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))
    x, y = torch.randn(16, 64), torch.randn(16, 64)
    quantize_(model, hestia_tune.PeakConfig(group_size=32, share=0.6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        losses.append(F.mse_loss(model(x), y))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))
    quantize_(again, hestia_tune.PeakConfig(group_size=32, share=0.6))
    again.load_state_dict(torch.load(file, weights_only=True))
    expected = model(x)
    quantize_(model, hestia_tune.PeakConfig(step="convert"))
    quantize_(again, hestia_tune.PeakConfig(step="convert", target="ternary"))
    assert type(model[0]) is type(again[0]) is nn.Linear
    assert isinstance(again[0].weight, TernaryTensor)
    assert torch.equal(model(x), expected) and torch.equal(again(x), expected)
