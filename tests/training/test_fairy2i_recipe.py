"""Test Fairy2i: recipe, ranks, resuming, sensitivity, evaluation, hard model, errors."""

import json
import shutil

import pytest
import torch
from omegaconf import OmegaConf
from ranks import run_forked
from safetensors.torch import load_file
from tiny import logged, make_config, make_model_dir, run, signal_at, tune_run, write_config
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torchtune.models.convert_weights import hf_to_tune

from hestia_tune import Fairy2iQATQuantizer, Fairy2iTensor
from hestia_tune.commands.convert import ConvertRecipe
from hestia_tune.commands.qat import run_qat
from hestia_tune.config.run_config import RunConfig
from hestia_tune.functional import hard_fairy2i
from hestia_tune.models.loading import load_model
from hestia_tune.qat.linear import full_tensor
from hestia_tune.run import Run
from hestia_tune.stages import measure_sensitivity

pytestmark = pytest.mark.usefixtures("end_process_group")

FAIRY = {"_component_": "hestia_tune.Fairy2iQATQuantizer", "num_stages": 2}
HARDENED = ("schedule.tau_init=0.2",)


def config(model_dir, output_dir, *overrides, **quantizer):
    base = make_config(model_dir, output_dir, *HARDENED)
    base.quantizer = FAIRY | quantizer
    return OmegaConf.merge(base, OmegaConf.from_dotlist(list(overrides)))


def hard_folder_state(folder):
    (file,) = (folder / "hard_model").glob("*.safetensors")
    return hf_to_tune(load_file(file), num_heads=4, num_kv_heads=2, dim=64)


@pytest.mark.parametrize("granularity", ["tensor", 16])
def test_the_hard_model_follows_from_the_latent_weights(model_dir, tmp_path, granularity):
    latents = {}

    def keep(recipe):
        state = get_model_state_dict(recipe._model)
        latents.update({name: full_tensor(value).clone() for name, value in state.items()})

    recipe = run(config(model_dir, tmp_path, granularity=granularity), keep)
    assert recipe.run.component.method.key() == f"fairy2i, num_stages=2, granularity={granularity}"
    losses = json.loads((tmp_path / "results.json").read_text())["validation_loss"]
    assert list(losses) == ["pretrained", "naive fairy2i", "trained, hard"]
    assert "zero_fraction" not in (tmp_path / "metrics.jsonl").read_text()
    assert set(logged(tmp_path, "flip_rate")) == set(range(1, 7))
    found = hard_folder_state(tmp_path)
    for name, latent in latents.items():
        expected = latent
        if "proj" in name or ".mlp.w" in name:
            expected = hard_fairy2i(latent, num_stages=2, granularity=granularity)
        assert torch.equal(found[name], expected.to(torch.bfloat16)), name


def test_resuming_changes_nothing(model_dir, tmp_path):
    run(config(model_dir, tmp_path / "whole"))
    assert not run(config(model_dir, tmp_path / "cut", *signal_at(3, "SIGINT"))).finished
    run(config(model_dir, tmp_path / "cut", "resume_from_checkpoint=True"))
    assert logged(tmp_path / "cut") == logged(tmp_path / "whole")
    other = config(model_dir, tmp_path / "cut", "resume_from_checkpoint=True", num_stages=1)
    with pytest.raises(ValueError, match="quantizer fairy2i, num_stages=2"):
        run(other)


@pytest.mark.parametrize("num_kv_heads", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_two_ranks_equal_one(tmp_path, num_kv_heads):
    """Rows i and n + i of a weight are on different ranks. Scales depend on the whole weight."""
    folder = make_model_dir(tmp_path / "model", num_kv_heads=num_kv_heads)
    shape = (f"model.num_kv_heads={num_kv_heads}",)
    run(config(folder, tmp_path / "one", *shape, "batch_size=4"))
    two = config(folder, tmp_path / "two", *shape, "batch_size=2")
    path = write_config(two, tmp_path / "two.yaml")
    done = run_forked("--config", path, ranks=2)
    assert done.returncode == 0, done.stderr
    assert list(logged(tmp_path / "two").values()) == pytest.approx(
        list(logged(tmp_path / "one").values()), rel=1e-4
    )


def test_the_sensitivity_changes_the_temperatures(model_dir, tmp_path):
    options = ("sensitivity_estimation.num_samples=4", "sensitivity_estimation.curvature=fisher")
    assert run_qat(config(model_dir, tmp_path, *options, "sensitivity=auto")) == 0
    assert logged(tmp_path, "tau_max")[1] > logged(tmp_path, "tau_min")[1]
    artifact = measure_sensitivity(Run.of(config(model_dir, tmp_path, *options))).artifact  # reused
    assert len(artifact.scores) == 14


def test_tau_init_auto(model_dir, tmp_path):
    recipe = run(config(model_dir, tmp_path, "schedule.tau_init=auto", "max_steps=1"))
    assert 0.01 < recipe.schedule.tau_init < 1.5


def test_naive_and_checkpoints_load_for_evaluation(model_dir, tmp_path):
    cfg = RunConfig.parse(config(model_dir, tmp_path))
    run(config(model_dir, tmp_path))
    arguments = {"device": torch.device("cpu"), "dtype": torch.float32}
    naive, _ = load_model("naive", cfg, **arguments)
    pretrained, _ = load_model("pretrained", cfg, **arguments)
    weight = pretrained.layers[0].mlp.w1.weight
    assert torch.equal(naive.layers[0].mlp.w1.weight, hard_fairy2i(weight))
    hard, about = load_model("checkpoint_hard", cfg, **arguments)
    assert about["quantizer"].startswith("fairy2i")
    tokens = torch.tensor([[1, 2, 3]])
    trained, _ = load_model("trained", cfg, **arguments)
    torch.testing.assert_close(hard(tokens), trained(tokens), rtol=0.05, atol=0.05)


def test_odd_dimensions_are_named_or_skipped(caplog):
    def make():
        layers = [torch.nn.Linear(6, 5), torch.nn.Linear(4, 6)]
        return torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})

    with pytest.raises(ValueError, match=r"layers\.0.*skip_incompatible"):
        Fairy2iQATQuantizer(include=["*"]).prepare(make())
    component = Fairy2iQATQuantizer(include=["*"], skip_incompatible=True)
    model = component.prepare(make())
    assert component.skipped == ["layers.0"] and "layers.0" in caplog.text
    assert type(model["layers"][0]) is torch.nn.Linear
    assert type(model["layers"][1]) is not torch.nn.Linear
    with pytest.raises(ValueError, match="none of the 1 selected linears"):
        Fairy2iQATQuantizer(include=["layers.0"], skip_incompatible=True).prepare(make())


def test_bias_is_kept():
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(8, 6)])})
    bias, weight = model["layers"][0].bias, model["layers"][0].weight.detach().clone()
    component = Fairy2iQATQuantizer(include=["*"])
    component.prepare(model)
    assert model["layers"][0].bias is bias
    component.convert(model)
    x = torch.randn(3, 8)
    expected = torch.nn.functional.linear(x, hard_fairy2i(weight), bias)
    assert torch.equal(model["layers"][0](x), expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_packed_model_is_the_hard_model(model_dir, tmp_path, dtype):
    cfg = config(model_dir, tmp_path, f"dtype={dtype}")
    run(cfg)
    found = ConvertRecipe(cfg).run()["torchao"]
    assert found["quantized_bits_per_weight"] == pytest.approx(2, abs=0.1)
    arguments = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    packed, about = load_model("packed", RunConfig.parse(cfg), **arguments)
    assert about["kind"] == "packed"
    assert isinstance(packed.layers[1].mlp.w2.weight, Fairy2iTensor)
    dense, _ = load_model("trained", RunConfig.parse(cfg), **arguments)
    tokens = torch.tensor([[1, 2, 3, 200]])
    assert torch.equal(packed(tokens), dense(tokens))


def test_packing_the_naive_model_and_refusing_other_formats(model_dir, tmp_path):
    cfg = config(model_dir, tmp_path, "convert.source=pretrained")
    ConvertRecipe(cfg).run()
    arguments = {"device": torch.device("cpu"), "dtype": torch.bfloat16}
    packed, _ = load_model("packed", RunConfig.parse(cfg), **arguments)
    pretrained, _ = load_model(
        "pretrained", RunConfig.parse(cfg), **arguments | {"dtype": torch.float32}
    )
    for block, latent in zip(packed.layers, pretrained.layers, strict=True):
        expected = hard_fairy2i(latent.mlp.w1.weight).to(torch.bfloat16)
        assert torch.equal(block.mlp.w1.weight.dequantize(), expected)
    refused = {
        "convert.formats=[gguf]": "can only be written as torchao; got gguf",
        "convert.formats=[intx]": "can only be written as torchao; got intx",
    }
    for option, message in refused.items():
        with pytest.raises(ValueError, match=message):
            ConvertRecipe(config(model_dir, tmp_path, "convert.source=pretrained", option))
    run(config(model_dir, tmp_path / "b", "max_steps=1"))
    shutil.rmtree(tmp_path / "b" / "checkpoints")
    with pytest.raises(ValueError, match="follow from latent weights, and there is no"):
        ConvertRecipe(config(model_dir, tmp_path / "b"))


@pytest.mark.slow
def test_torchtunes_own_generate_runs_it(model_dir, tmp_path):
    cfg = config(model_dir, tmp_path)
    run(cfg)
    ConvertRecipe(cfg).run()
    yaml = tmp_path / "converted" / "torchao" / "generate.yaml"
    arguments = ("prompt.user=abc", "top_k=1", "max_new_tokens=4")
    done = tune_run("--config", str(yaml), *arguments, recipe="generate")
    assert done.returncode == 0, done.stderr
