"""Test every model family: training, resuming on two ranks, sensitivity, files."""

import json
import shutil

import pytest
import torch
from families import FAMILIES, STATE_SPACES, family_config, make_family
from ranks import run_forked
from safetensors.torch import load_file
from tiny import logged, run, tune_run, write_config

import hestia_tune
from hestia_tune.commands.convert import ConvertRecipe
from hestia_tune.commands.launch import main
from hestia_tune.export.gguf_families import LlamaModel, check_architecture
from hestia_tune.models.sources import complete_checkpoints, names_in_files
from hestia_tune.qat.linear import weights_of
from hestia_tune.reconstruction.reconstruct import ReconstructionRecipe
from hestia_tune.run import Run
from hestia_tune.stages import measure_sensitivity

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(1, 200, (2, 20), generator=torch.Generator().manual_seed(0))
STEPS = ("dataset.num=12", "save_every_n_steps=1", "keep_last_checkpoints=9")
QUICK = ("Qwen3", "Gemma 3")


def families():
    """Return the families: one for every test run, one marked slow, the others marked long."""
    marks = {QUICK[0]: (), QUICK[1]: pytest.mark.slow}
    return [pytest.param(f, marks=marks.get(f, pytest.mark.long), id=f) for f in FAMILIES]


@pytest.fixture(scope="module", params=families())
def trained(request, tmp_path_factory):
    """Return (family, folder). The folder holds ``model`` and, after three steps, ``out``."""
    folder = tmp_path_factory.mktemp("family")
    model_dir = make_family(folder / "model", request.param)
    recipe = run(family_config(model_dir, folder / "out", *STEPS))
    assert recipe.finished
    return request.param, folder


def config_of(trained, *overrides):
    _, folder = trained
    return family_config(folder / "model", folder / "out", *overrides)


@torch.no_grad()
def logits(folder) -> torch.Tensor:
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=torch.float32).eval()(TOKENS).logits


def test_the_hard_model_is_a_complete_folder(trained):
    family, folder = trained
    source, hard = load_file(folder / "model" / "model.safetensors"), folder / "out" / "hard_model"
    found = load_file(hard / "model.safetensors")
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in source.items()}
    config, theirs = (json.loads((f / "config.json").read_text()) for f in (folder / "model", hard))
    theirs.pop("torch_dtype"), config.pop("dtype", None)
    assert theirs == config
    description = json.loads((hard / "hestia.json").read_text())
    names = weights_of(description["layers"], names_in_files("HUGGING_FACE", hard))
    for name in sum(names.values(), []):
        weight = found[name].float().unflatten(-1, (-1, 32))
        assert (weight.abs().amax(-1, keepdim=True) * weight.sign() == weight).all(), name
    validation = json.loads((folder / "out" / "results.json").read_text())["validation_loss"]
    assert validation["pretrained"] != validation["trained, hard"]


def test_files_load_in_transformers_with_equal_logits(trained, monkeypatch):
    family, folder = trained
    formats = ["torchao", "huggingface", "compressed_tensors"]
    if family == "Qwen3-MoE":
        formats.pop()
        with pytest.raises(ValueError, match="files cannot hold the weights of experts"):
            ConvertRecipe(config_of(trained, "convert.formats=[compressed_tensors]"))
    recipe = ConvertRecipe(config_of(trained, f"convert.formats=[{','.join(formats)}]"))
    recipe.run()
    expected = logits(folder / "out" / "hard_model")
    for name in formats[1:]:
        assert torch.equal(logits(recipe.output / name), expected)
    # The packed folder is complete: it does not need the folder that it was made from.
    moved = folder / "moved"
    shutil.copytree(recipe.output / "torchao", moved)
    (folder / "model").rename(folder / "gone")
    try:
        model = hestia_tune.load_quantized(moved, dtype=torch.float32, kernel="dequantize")
    finally:
        (folder / "gone").rename(folder / "model")
    assert any(isinstance(p, hestia_tune.TernaryTensor) for p in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(TOKENS), expected)


def test_gguf_is_written_or_refused_before_training(trained, monkeypatch, capsys):
    pytest.importorskip("gguf")
    _, folder = trained
    cfg = config_of(trained, "convert.formats=[gguf]", "convert.block_type=Q4_0")
    try:
        check_architecture(json.loads((folder / "model" / "config.json").read_text()))
    except ValueError as error:
        from hestia_tune.commands.qat import run_qat

        cfg.output_dir = str(folder / "untrained")
        config = write_config(cfg, folder / "untrained.yaml")
        monkeypatch.setattr("sys.argv", ["hestia_qat", "--config", config])
        assert main(run_qat, "hestia_qat") == 1
        assert str(error) in capsys.readouterr().err
        assert not (folder / "untrained" / "checkpoints").exists()
    else:
        recipe = ConvertRecipe(cfg)
        entries = LlamaModel(recipe.source).entries.values()
        quantized = [e for e in entries if set(e.sources) & recipe.source.quantized.keys()]
        assert len(quantized) >= len(recipe.methods)  # llama.cpp splits gate and up of experts
        assert recipe.run()["gguf"]["types"]["Q4_0"] == len(quantized)


def test_sensitivity(trained):
    """The recipe with Fisher traces, because a random model's Hessian traces have any sign."""
    section = {"num_samples": 2, "curvature": "fisher", "target_standard_error": 0.5}
    cfg = config_of(trained)
    cfg.sensitivity_estimation = section
    artifact = measure_sensitivity(Run.of(cfg)).artifact
    torch.distributed.destroy_process_group()
    description = json.loads((trained[1] / "out" / "hard_model" / "hestia.json").read_text())
    assert list(artifact.scores) == description["layers"]
    assert all(trace > 0 for trace in artifact.traces.values())


@pytest.mark.slow
def test_two_ranks_resume(trained):
    """Two ranks resume after the first step of one process, with equal losses and weights."""
    family, folder = trained
    (step, start), *_ = complete_checkpoints(folder / "out" / "checkpoints")
    assert step == 1
    two = folder / "two"
    shutil.copytree(start, two / "checkpoints" / start.name)
    cfg = family_config(
        folder / "model", two, *STEPS, "batch_size=2", "resume_from_checkpoint=True"
    )
    done = run_forked("--config", write_config(cfg, folder / "two.yaml"), ranks=2)
    assert done.returncode == 0, done.stderr
    expected = {k: v for k, v in logged(folder / "out").items() if k > 1}
    assert logged(two) == pytest.approx(expected, rel=1e-5)
    one, other = (load_file(f / "hard_model" / "model.safetensors") for f in (folder / "out", two))
    for name, value in one.items():
        if value.dim() == 1:
            torch.testing.assert_close(value, other[name], rtol=2**-7, atol=1e-4)
        else:
            assert (value != other[name]).float().mean() < 0.01, name


@pytest.mark.slow
def test_reconstruction(trained):
    family, folder = trained
    overrides = ("reconstruct.num_samples=8", "reconstruct.batch_size=4", "reconstruct.epochs=8")
    cfg = config_of(trained, *overrides, "reconstruct.kl_blocks=2")
    recipe = ReconstructionRecipe(Run.of(cfg))
    recipe.run()
    torch.distributed.destroy_process_group()
    assert recipe.finished
    for window in recipe.results:
        assert window.error < window.naive_error
    assert torch.isfinite(logits(recipe.output / "hard_model")).all()


@pytest.mark.slow
@pytest.mark.parametrize("family", STATE_SPACES)
def test_state_space_models_train(tmp_path, family):
    """Models without attention train too, and transformers reads their hard models."""
    model_dir = make_family(tmp_path / "model", family)
    options = ("dataset.num=12", "optimizer.lr=3e-3")
    assert run(family_config(model_dir, tmp_path / "out", *options)).finished
    losses = json.loads((tmp_path / "out" / "results.json").read_text())["validation_loss"]
    assert losses["trained, hard"] != losses["pretrained"]
    found = logits(tmp_path / "out" / "hard_model")
    recipe = ConvertRecipe(family_config(model_dir, tmp_path / "out", *options))
    recipe.run()
    with torch.no_grad():
        model = hestia_tune.load_quantized(
            recipe.output / "torchao", dtype=torch.float32, kernel="dequantize"
        )
        assert torch.equal(model(TOKENS), found)


def options_of_families():
    """Return the families with options. Compiling a family takes a minute or two."""
    options = [
        ("enable_activation_checkpointing=True",),
        ("enable_activation_offloading=True", "enable_activation_checkpointing=True"),
        ("compile=True",),
        ("loss._component_=torch.nn.CrossEntropyLoss",),
    ]
    for family in (*QUICK, "OPT"):
        for some in options:
            mark = pytest.mark.long if (family, some) == ("Gemma 3", options[2]) else ()
            name = some[0].partition("=")[0]
            yield pytest.param(family, some, marks=mark, id=f"{name}-{family}")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "overrides"), options_of_families())
def test_options_do_not_change_the_result(tmp_path, family, overrides):
    if "offloading" in overrides[0] and not torch.cuda.is_available():
        pytest.skip("offloading needs a CUDA device")
    model_dir = make_family(tmp_path / "model", family)
    for name, options in (("plain", ()), ("other", overrides)):
        run(family_config(model_dir, tmp_path / name, "dataset.num=12", *options))
    assert logged(tmp_path / "other") == pytest.approx(logged(tmp_path / "plain"), rel=1e-4)


@pytest.mark.slow
def test_documents_in_one_sequence_train(tmp_path):
    """Masks follow from positions, in training with FSDP and in the sensitivity."""
    model_dir = make_family(tmp_path / "model", "Gemma 3")
    text = tmp_path / "text.jsonl"
    rows = [json.dumps({"text": f"A short document, number {n}, of many."}) for n in range(60)]
    text.write_text("\n".join(rows))
    data = {
        "_component_": "hestia_tune.data.text_dataset",
        "source": "json",
        "data_files": str(text),
        "split": "train",
        "column": "text",
        "seq_len": 48,
        "document_masks": True,
    }
    cfg = family_config(model_dir, tmp_path / "out", "dataset_val=null", "max_steps=2")
    cfg.dataset = data
    assert run(cfg).finished
    cfg.sensitivity_estimation = {"num_samples": 2, "num_probes": 2}
    assert measure_sensitivity(Run.of(cfg)).artifact.scores
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_torchtunes_generate(trained, tmp_path):
    family, folder = trained
    if family != "Qwen3":
        pytest.skip("one will do")
    recipe = ConvertRecipe(config_of(trained, "convert.overwrite=True"))
    recipe.run()
    done = tune_run(
        "--config",
        str(recipe.output / "torchao" / "generate.yaml"),
        "max_new_tokens=5",
        "temperature=0.01",
        recipe="generate",
    )
    assert done.returncode == 0, done.stderr
    assert "Once upon a time" in done.stdout + done.stderr
