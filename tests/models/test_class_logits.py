"""Tests that a model gives the logits of its transformers class, or is refused before any work."""

import copy
import json

import pytest
import torch
from families import family_config, make_family
from tiny import random_dataset, run
from torch import nn

from hestia_tune.commands.qat import run_reconstruct, run_sensitivity
from hestia_tune.config.run_config import RunConfig
from hestia_tune.models.decoder import model_on_meta, transformers_tensors
from hestia_tune.models.folder import SafetensorsFolder
from hestia_tune.models.loading import load_model
from hestia_tune.models.reference import check_logits

transformers = pytest.importorskip("transformers")

LLAMA = transformers.LlamaForCausalLM
TOKENS = torch.randint(1, 200, (2, 20), generator=torch.Generator().manual_seed(0))


def loaded(folder):
    """Return the plain model on the meta device, and its state dict."""
    return model_on_meta(folder), dict(transformers_tensors(SafetensorsFolder(folder)))


@torch.no_grad()
@pytest.mark.parametrize("chunks", [0, 3])
def test_the_head_of_opt_gets_hidden_states_once(tmp_path, chunks):
    folder = make_family(tmp_path / "model", "OPT")
    model, state = loaded(folder)
    assert model.backbone_name == "model.decoder"  # the base model of transformers is "model"
    assert model(TOKENS.to("meta")).shape == (2, 20, 264)
    model.load_state_dict(state, assign=True)
    with torch.device("cpu"):
        model.rope_init()
    model.eval().set_num_output_chunks(chunks)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found, expected = model(TOKENS), reference(TOKENS).logits
    assert torch.equal(torch.cat(found, 1) if chunks else found, expected)


def test_the_pretrained_loss_of_opt(tmp_path):
    """A run measures the loss of transformers, although it uses blocks and chunks of logits."""
    folder, out = make_family(tmp_path / "model", "OPT"), tmp_path / "out"
    run(family_config(folder, out, "max_steps=1"))
    found = json.loads((out / "results.json").read_text())["validation_loss"]["pretrained"]
    samples = [random_dataset(None, num=7, seed=1)[index]["tokens"] for index in range(7)]
    tokens = torch.tensor(samples)
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(folder)(tokens, labels=tokens)
    assert found == pytest.approx(float(expected.loss), rel=1e-5)


def forward_of(change_input=lambda x: x, change_hidden=lambda x, tokens: x):
    """Return a forward for Llamas that changes the embedded tokens or the head's hidden states."""

    def forward(self, input_ids=None, inputs_embeds=None, position_ids=None, use_cache=None):
        if inputs_embeds is None:
            inputs_embeds = change_input(self.model.embed_tokens(input_ids))
        hidden = self.model(inputs_embeds=inputs_embeds, use_cache=False).last_hidden_state
        hidden = change_hidden(hidden, input_ids)
        output = transformers.modeling_outputs.CausalLMOutputWithPast
        return output(logits=self.lm_head(hidden))

    return forward


DIFFERENT = {
    "another backbone": (forward_of(lambda x: 2 * x), "difference is [0-9.]+ instead of"),
    "mixed positions": (
        forward_of(change_hidden=lambda x, _: x.roll(1, 1)),
        "difference is [0-9.]+ instead of",
    ),
    "head of tokens": (
        forward_of(change_hidden=lambda x, tokens: x * tokens[..., None]),
        "it raises: 'NoneType' object is not subscriptable",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_logits_are_refused(tmp_path, monkeypatch, name):
    folder = make_family(tmp_path / "model", "Llama")
    check_logits(*loaded(folder))
    forward, message = DIFFERENT[name]
    monkeypatch.setattr(LLAMA, "forward", forward)
    with pytest.raises(ValueError, match=f"LlamaForCausalLM must give .*{message}") as caught:
        check_logits(*loaded(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_a_run_refuses_other_logits_before_it_begins(tmp_path, monkeypatch, init):
    folder, out = make_family(tmp_path / "model", "Llama"), tmp_path / "out"
    monkeypatch.setattr(LLAMA, "forward", DIFFERENT["another backbone"][0])
    with pytest.raises(ValueError, match="must give the same logits"):
        run(family_config(folder, out, f"init={init}"))
    assert not list(out.glob("*"))


@pytest.mark.parametrize("command", [run_sensitivity, run_reconstruct])
def test_commands_before_a_run_refuse_other_logits(tmp_path, monkeypatch, command):
    folder, out = make_family(tmp_path / "model", "Llama"), tmp_path / "out"
    monkeypatch.setattr(LLAMA, "forward", DIFFERENT["another backbone"][0])
    cfg = family_config(folder, out, "sensitivity_estimation.num_samples=2")
    try:
        with pytest.raises(ValueError, match="must give the same logits"):
            command(cfg)
    finally:
        torch.distributed.destroy_process_group()


def test_an_evaluation_refuses_other_logits(tmp_path, monkeypatch):
    folder = make_family(tmp_path / "model", "Llama")
    monkeypatch.setattr(LLAMA, "forward", DIFFERENT["another backbone"][0])
    cfg = RunConfig.parse(family_config(folder, tmp_path / "out"))
    with pytest.raises(ValueError, match="must give the same logits"):
        load_model("pretrained", cfg, device=torch.device("cpu"), dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_check_changes_nothing(tmp_path, dtype):
    """Weights of mixed dtypes are compared in float32, and keep their dtypes and their memory."""
    model, state = loaded(make_family(tmp_path / "model", "Gemma 3"))
    state = {name: v if "norm" in name else v.to(dtype) for name, v in state.items()}
    before, places = copy.deepcopy(state), {name: v.data_ptr() for name, v in state.items()}
    check_logits(model, state)
    assert all(value.is_meta for value in model.parameters()) and model.training
    assert places == {name: value.data_ptr() for name, value in state.items()}
    for name, value in before.items():
        assert state[name].dtype == value.dtype and torch.equal(state[name], value)


class Scaled(nn.Linear):
    def forward(self, hidden):
        return 3 * super().forward(hidden)


def test_a_tied_head_of_an_unknown_class_is_refused(tmp_path, monkeypatch):
    folder = make_family(tmp_path / "model", "Llama 3 (scaled rotary)")
    make = LLAMA.__init__

    def changed(self, config):
        make(self, config)
        self.lm_head.__class__ = Scaled

    monkeypatch.setattr(LLAMA, "__init__", changed)
    with pytest.raises(ValueError, match="plain linear without bias .* ties lm_head.weight"):
        model_on_meta(folder)
