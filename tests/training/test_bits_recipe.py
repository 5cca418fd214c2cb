"""Test a run with a budget of bits: its choices, their file, resuming, and what is refused."""

import json
import re
import shutil

import pytest
import torch
from omegaconf import OmegaConf
from tiny import NUM_QUANTIZED, logged, make_config, run

from hestia_tune.commands.convert import ConvertRecipe
from hestia_tune.commands.qat import run_qat, run_reconstruct
from hestia_tune.config.run_config import RunConfig
from hestia_tune.errors import InputError
from hestia_tune.files import write_json
from hestia_tune.methods.straight_through import round_embedding
from hestia_tune.models.contents import read_gguf
from hestia_tune.models.folder import SafetensorsFolder
from hestia_tune.run import Run, TrainingRun
from hestia_tune.stages import choose_bits

SETTINGS = (
    "bits.average=3.3",
    "sensitivity=auto",
    "sensitivity_estimation.curvature=fisher",
    "sensitivity_estimation.num_samples=4",
    "schedule.alpha=0.4",
    "max_steps=4",
    "save_every_n_steps=2",
)


@pytest.fixture(scope="module")
def finished(model_dir, tmp_path_factory):
    """Return the config and the folder of a finished run."""
    folder = tmp_path_factory.mktemp("bits")
    config = make_config(model_dir, folder, *SETTINGS)
    assert run_qat(config) == 0
    return config, folder


@pytest.fixture(autouse=True)
def _end(end_process_group):
    """End the process group of every test."""


def choices_in(folder):
    """Return name -> choice in a run's file."""
    layers = json.loads((folder / "bits.json").read_text())["layers"]
    return {name: entry["choice"] for name, entry in layers.items()}


def edit(path, **choices):
    """Change choices in a file, as a user does."""
    saved = json.loads(path.read_text())
    for name, choice in choices.items():
        saved["layers"][name]["choice"] = choice
    write_json(path, saved)


def test_a_run_trains_what_it_has_chosen(finished):
    _, folder = finished
    saved = json.loads((folder / "bits.json").read_text())
    choices = choices_in(folder)
    assert len(choices) == NUM_QUANTIZED and len(set(choices.values())) > 1
    assert saved["mean_bits"] <= 3.3 and saved["gap"] == 0 and saved["predicted_increase"] > 0
    traces = json.loads((folder / "sensitivity.json").read_text())["layers"]
    assert all(saved["layers"][name]["trace"] == traces[name]["trace"] for name in choices)
    assert (folder / "bits.png").is_file() and (folder / "hard_model" / "config.json").is_file()
    description = json.loads((folder / "hard_model" / "hestia.json").read_text())
    keys = {"int2": "even, group_size=32, codebook=int2", "int4": "int4, group_size=32"}
    expected = {name: keys[choice] for name, choice in choices.items() if choice in keys}
    assert description["methods"] == expected
    assert set(description["layers"]) == {n for n, choice in choices.items() if choice != "bf16"}
    assert len(logged(folder)) == 4


def test_a_resumed_run_reads_its_choices(finished, caplog):
    config, folder = finished
    config = OmegaConf.merge(config, {"resume_from_checkpoint": True})
    path, text = folder / "bits.json", (folder / "bits.json").read_text()
    name, choice = next(iter(choices_in(folder).items()))
    try:
        edit(path, **{name: "int2" if choice == "int4" else "int4"})
        with pytest.raises(InputError, match="has quantizer mixed, .*this run mixed, "):
            TrainingRun.of(RunConfig.parse(config))
        path.unlink()
        with pytest.raises(InputError, match=r"bits\.json does not exist"):
            TrainingRun.of(RunConfig.parse(config))
    finally:
        path.write_text(text)
    weights = (folder / "hard_model" / "model-00001-of-00001.safetensors").read_bytes()
    shutil.rmtree(folder / "checkpoints" / "step_4")
    caplog.set_level("INFO", "hestia_tune")
    assert run_qat(config) == 0
    assert f"the choices come from {path}" in caplog.text and "edited" not in caplog.text
    assert (folder / "hard_model" / "model-00001-of-00001.safetensors").read_bytes() == weights
    assert path.read_text() == text


@pytest.mark.parametrize("component", ["HestiaQATQuantizer", "TwoBit"])
def test_ternary_weights_and_four_levels_share_a_budget(model_dir, tmp_path, component):
    """All three stages, resumed once, and a file whose weights are those of the hard model."""
    stages = ("reconstruction=auto", "reconstruct.num_samples=8", "reconstruct.batch_size=4")
    stages += ("reconstruct.epochs=1", "reconstruct.kl_blocks=2", "schedule.alpha=0")
    budget = ("bits.average=2.3", "bits.choices=[ternary,two_bit]", "bits.by=error")
    learned = ("quantizer.scale=learned", "quantizer.start=least_squares")
    steps = ("max_steps=4", "save_every_n_steps=2", "convert.formats=[gguf]")
    cfg = make_config(model_dir, tmp_path, *stages, *budget, *learned, *steps)
    cfg.quantizer._component_ = f"hestia_tune.{component}"
    assert run_qat(cfg) == 0
    choices = choices_in(tmp_path)
    assert {*choices.values()} == {"ternary", "two_bit"}
    description = json.loads((tmp_path / "hard_model" / "hestia.json").read_text())
    options = "group_size=32, scale=learned, start=least_squares"
    own = "ternary" if component == "HestiaQATQuantizer" else "two_bit"
    expected = {n: f"{choice}, {options}" for n, choice in choices.items() if choice != own}
    assert description["methods"] == expected
    weights = (tmp_path / "hard_model" / "model-00001-of-00001.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "checkpoints" / "step_4")
    assert run_qat(OmegaConf.merge(cfg, {"resume_from_checkpoint": True})) == 0
    assert (tmp_path / "hard_model" / "model-00001-of-00001.safetensors").read_bytes() == weights
    recipe = ConvertRecipe(cfg)
    recipe.run()  # compares what it has written
    kinds = {each.stored for each in read_gguf(recipe.output / "model.gguf").values()}
    assert "Q2_0" in kinds or "Q4_0" in kinds


def test_the_embedding_of_a_trained_model_can_be_rounded(finished, tmp_path):
    folder, formats = finished[1], "convert.formats=[huggingface]"
    for embedding in ("null", "int8"):
        bits = (f"bits.embedding={embedding}", f"convert.output={tmp_path / embedding}")
        ConvertRecipe(OmegaConf.merge(finished[0], OmegaConf.from_dotlist([*bits, formats]))).run()
    files = (tmp_path / name / "huggingface" for name in ("null", "int8"))
    own, rounded = (SafetensorsFolder(path).read("model.embed_tokens.weight") for path in files)
    assert not torch.equal(own, rounded)
    assert torch.equal(rounded, round_embedding(own.float(), "int8").bfloat16())
    assert json.loads((folder / "bits.json").read_text())["embedding"] is None


def test_choices_may_be_edited_and_other_settings_are_refused(finished, tmp_path, caplog):
    config, folder = finished
    changes = {"output_dir": str(tmp_path), "sensitivity": str(folder / "sensitivity.json")}
    config = RunConfig.parse(OmegaConf.merge(config, changes))
    first = choose_bits(Run.of(config)).config
    path = tmp_path / "bits.json"
    assert choices_in(tmp_path) == choices_in(folder)
    name, other = list(choices_in(tmp_path))[:2]
    edit(path, **{name: "bf16", other: "bf16"})
    caplog.set_level("INFO", "hestia_tune")
    second = choose_bits(Run.of(config)).config
    assert second.quantizer["layers"][name] is None and second.bits.average is None
    assert second.quantizer != first.quantizer
    assert "edited by hand" in caplog.text and "exceed bits.average 3.3" in caplog.text
    with pytest.raises(
        InputError, match=r"bits\.json: it was made with other settings \(average\); use the"
    ):
        choose_bits(Run.of(config.changed(bits={"average": 3.4})))
    write_json(path, (saved := json.loads(path.read_text())) | {"embedding": "int8"})
    with pytest.raises(InputError, match=r"made with other settings \(embedding\)"):
        choose_bits(Run.of(config))
    write_json(path, saved)
    with pytest.raises(
        InputError, match=r"made with other settings \(by\); use the same settings, delete"
    ):
        Run.of(config.changed(bits={"by": "error"}))
    by_error = config.changed(bits={"by": "error"}, overwrite_output=True)
    choose_bits(Run.of(by_error), overwrite=True)
    assert choices_in(tmp_path) != choices_in(folder)
    edit(path, **dict.fromkeys(choices_in(tmp_path), "bf16"))
    with pytest.raises(InputError, match="leaves every linear dense"):
        choose_bits(Run.of(by_error))
    edit(path, **{name: "int3"})
    with pytest.raises(InputError, match=rf"the choice of {name} must be one of ternary, int2"):
        choose_bits(Run.of(by_error))
    edit(path, **dict.fromkeys(choices_in(tmp_path), "int4"))
    saved = json.loads(path.read_text())
    del saved["layers"][name]
    write_json(path, saved)
    with pytest.raises(InputError, match=f"linears differ in {name}; correct the file"):
        choose_bits(Run.of(by_error))


def test_a_reconstruction_chooses_and_training_starts_from_it(finished, model_dir, tmp_path):
    few = ("reconstruct.num_samples=4", "reconstruct.batch_size=4", "reconstruct.epochs=1")
    config = make_config(model_dir, tmp_path, *SETTINGS, *few)
    assert run_reconstruct(config) == 0
    assert choices_in(tmp_path) == choices_in(finished[1])
    folder, chosen = tmp_path / "reconstruction", (tmp_path / "bits.json").read_text()
    methods = json.loads((folder / "reconstruction.json").read_text())["methods"]
    assert methods == json.loads((finished[1] / "hard_model/hestia.json").read_text())["methods"]
    assert run_qat(OmegaConf.merge(config, {"reconstruction": str(folder)})) == 0
    assert (tmp_path / "bits.json").read_text() == chosen
    by_error = make_config(model_dir, tmp_path / "error", *SETTINGS, *few, "bits.by=error")
    assert run_reconstruct(by_error) == 0
    assert not (tmp_path / "error" / "sensitivity.json").exists()
    with pytest.raises(InputError, match=r"made with other settings \(by\)"):
        run_reconstruct(OmegaConf.merge(config, {"bits": {"by": "error"}}))


REFUSED = {
    "bits.average=1.9": "bits.average must be at least 2.1000",
    "bits.average=0.5": "bits.average must be in [1, 16]",
    "bits.choices=[ternary,int3]": "bits.choices must be one of binary, ternary, two_bit, int2",
    "bits.choices=[]": "bits.choices must name each choice once",
    "bits.by=size": "bits.by must be one of sensitivity, error; got size",
    "bits.by=uniform": "bits.by=uniform was a control of an experiment, and is no option any more",
    "bits.by=position": "set bits.by=sensitivity or bits.by=error, or run benchmarks/bits.py",
    "sensitivity=null": "bits.by=sensitivity reads the traces of sensitivity, which is null",
    "quantizer.layers={'*.v_proj': null}": "bits and quantizer.layers both choose",
    "init=random": "init: random does not go with",
    "quantizer={_component_: hestia_tune.Fairy2iQATQuantizer}": "or hestia_tune.TwoBit, because",
}


@pytest.mark.parametrize("override", REFUSED)
def test_it_is_refused_before_anything_is_read(model_dir, tmp_path, override):
    config = make_config(model_dir, tmp_path, *SETTINGS)
    config.merge_with_dotlist([override])
    if "Fairy2i" in override:
        config.quantizer = {"_component_": "hestia_tune.Fairy2iQATQuantizer"}
    with pytest.raises(InputError, match=re.escape(REFUSED[override])):
        TrainingRun.of(RunConfig.parse(config))
    assert not (tmp_path / "bits.json").exists()


def test_a_recipe_does_not_train_before_the_choice(model_dir, tmp_path):
    config = make_config(model_dir, tmp_path, *SETTINGS)
    with pytest.raises(InputError, match=r"bits\.json does not exist"):
        run(config)
