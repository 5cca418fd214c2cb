"""Test mixtures of experts in the recipe: training, resuming, files, sensitivity."""

import json
import shutil

import pytest
import torch
from families import family_config, make_family
from safetensors.torch import load_file
from tiny import logged, run

import hestia_tune
from hestia_tune.commands.convert import ConvertRecipe
from hestia_tune.config.run_config import RunConfig
from hestia_tune.models import loading
from hestia_tune.models.sources import names_in_files
from hestia_tune.run import Run, TrainingRun
from hestia_tune.stages import measure_sensitivity

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(1, 200, (2, 20), generator=torch.Generator().manual_seed(0))
STEPS = ("dataset.num=12", "save_every_n_steps=1", "keep_last_checkpoints=9")
# Family -> number of tensors in the files of a block's experts.
MIXTURES = {"Qwen3-MoE": 12, "Granite-MoE": 2, "Mixtral": 12}


@pytest.fixture(scope="module", params=MIXTURES)
def trained(request, tmp_path_factory):
    """Return (family, folder, recipe). The run has three steps, and its output is ``out``."""
    folder = tmp_path_factory.mktemp("experts")
    model_dir = make_family(folder / "model", request.param)
    recipe = run(family_config(model_dir, folder / "out", *STEPS))
    return request.param, folder, recipe


def config_of(trained, *overrides):
    return family_config(trained[1] / "model", trained[1] / "out", *overrides)


@torch.no_grad()
def logits(folder) -> torch.Tensor:
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=torch.float32).eval()(TOKENS).logits


def is_hard(weight: torch.Tensor) -> bool:
    groups = weight.float().unflatten(-1, (-1, 32))
    return torch.equal(groups.abs().amax(-1, keepdim=True) * groups.sign(), groups)


def test_the_hard_model_is_the_trained_model(trained):
    """Every weight in the files is hard. transformers computes what the recipe's model computes."""
    family, folder, recipe = trained
    hard = folder / "out" / "hard_model"
    layers = json.loads((hard / "hestia.json").read_text())["layers"]
    assert sum(".experts." in name for name in layers) == 4
    found, source = (load_file(f / "model.safetensors") for f in (hard, folder / "model"))
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in source.items()}
    names, parts = names_in_files("HUGGING_FACE", hard), []
    for layer in layers:
        parts += names[layer if ".experts." in layer else f"{layer}.weight"]
    assert len(parts) == 8 + 2 * MIXTURES[family] and all(is_hard(found[name]) for name in parts)
    assert not any(is_hard(v) for k, v in found.items() if v.dim() > 1 and k not in parts)
    state = recipe.model.state_dict()
    component = loading.make_component(recipe.config.quantizer)
    with torch.no_grad():
        model = component.prepare(loading.plain_on_meta(recipe.config.model))
        model.load_state_dict(state, assign=True)
        loading.build_buffers(model, "cpu")
        for layer in hestia_tune.quantized_linears(model).values():
            layer.weight_fake_quantizer.reset_buffers("cpu")
        component.convert(model)
        rounded = {k: v.bfloat16().float() for k, v in model.state_dict().items()}
        model.load_state_dict(rounded, assign=True)
        assert torch.equal(model.eval()(TOKENS), logits(hard))


def test_resuming_is_bit_exact(trained):
    family, folder, _ = trained
    again = folder / "again"
    shutil.copytree(folder / "out" / "checkpoints" / "step_1", again / "checkpoints" / "step_1")
    run(family_config(folder / "model", again, *STEPS, "resume_from_checkpoint=True"))
    assert logged(again) == {k: v for k, v in logged(folder / "out").items() if k > 1}
    one, other = ((f / "hard_model" / "model.safetensors") for f in (again, folder / "out"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("source", ["trained", "pretrained"])
def test_files_hold_the_hard_model_or_are_refused(trained, source):
    family, folder, _ = trained
    options = (f"convert.source={source}", f"convert.output={folder / source}")
    recipe = ConvertRecipe(config_of(trained, *options, "convert.formats=[torchao,huggingface]"))
    sizes = recipe.run()["huggingface"]
    share = sizes["quantized_parameters"] / sizes["parameters"]
    assert share > 0.5 and recipe.source.quantized.keys() <= recipe.source.shapes.keys()
    expected = logits(folder / source / "huggingface")
    if source == "trained":
        assert torch.equal(expected, logits(folder / "out" / "hard_model"))
    packed = folder / source / "torchao"
    model = hestia_tune.load_quantized(packed, dtype=torch.float32, kernel="dequantize")
    with torch.no_grad():
        assert torch.equal(model(TOKENS), expected)
    kinds = {n: type(p).__name__ for n, p in model.named_parameters() if p.dim() > 1}
    assert "TernaryTensor" in kinds.values()
    assert {kind for name, kind in kinds.items() if ".experts." in name} == {"Parameter"}
    for form in ("compressed_tensors", "onnx"):
        with pytest.raises(ValueError, match=rf"{form} files cannot hold .*0\.\S+\.gate_up_proj"):
            ConvertRecipe(config_of(trained, *options, f"convert.formats=[{form}]"))


def test_formats_are_refused_before_training(trained):
    config = config_of(trained, "convert.formats=[compressed_tensors]", "overwrite_output=True")
    with pytest.raises(ValueError, match=r"cannot hold the weights of experts, such as \S+gate_up"):
        TrainingRun.of(RunConfig.parse(config))
    torch.distributed.destroy_process_group()


def test_tau_auto_and_sensitivity_cover_experts(trained):
    """Each weight of experts has its own trace, score and temperature."""
    family, folder, _ = trained
    cfg = config_of(trained, "max_steps=1", "schedule.tau_init=auto", "schedule.alpha=0.4")
    cfg.output_dir = str(folder / "sensitive")
    path = folder / "sensitivity.json"
    section = {"num_samples": 2, "num_probes": 2, "output": str(path)}
    cfg.sensitivity_estimation = section | {"curvature": "fisher", "target_standard_error": 0.5}
    scores = measure_sensitivity(Run.of(cfg)).artifact.scores
    torch.distributed.destroy_process_group()
    experts = {name: score for name, score in scores.items() if ".experts." in name}
    assert len(experts) == 4 and len(set(experts.values())) > 1
    cfg.sensitivity = str(path)
    recipe = run(cfg)
    taus = recipe.driver.temperatures(0)
    assert taus.keys() == scores.keys()
    assert sorted(taus, key=taus.get) == sorted(scores, key=scores.get)
