"""Test ``hestia_reconstruct``: its files, resuming, two ranks, hestia_qat from its weights."""

import contextlib
import functools
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from omegaconf import OmegaConf
from ranks import run_forked
from safetensors.torch import load_file
from tiny import NUM_QUANTIZED, logged, make_config, make_model_dir, run, write_config

from hestia_tune.commands.convert import run_convert
from hestia_tune.commands.launch import Stopped
from hestia_tune.commands.qat import run_qat, run_reconstruct, run_tokenize
from hestia_tune.config.run_config import RunConfig
from hestia_tune.functional import hard_ternary
from hestia_tune.models import sources
from hestia_tune.models.sources import check_can_hold
from hestia_tune.qat.linear import full_tensor, quantized_linears
from hestia_tune.reconstruction import engine
from hestia_tune.reconstruction import reconstruct as reconstruct
from hestia_tune.reconstruction.reconstruct import ReconstructionRecipe
from hestia_tune.run import Run
from hestia_tune.training.loader import TrainingData, calibration_batches

pytestmark = pytest.mark.usefixtures("end_process_group")

FEW = (
    "quantizer.scale=learned",
    "quantizer.start=least_squares",
    "reconstruct.num_samples=12",
    "reconstruct.batch_size=4",
    "reconstruct.epochs=3",
    "reconstruct.kl_blocks=2",
    "reconstruct.kl_epochs=3",
)


def config(model_dir, output_dir, *overrides):
    return make_config(model_dir, output_dir, *FEW, *overrides)


@pytest.fixture(scope="module")
def finished(model_dir, tmp_path_factory):
    """Return the folder of a finished reconstruction, and its description."""
    output = tmp_path_factory.mktemp("run")
    assert run_reconstruct(config(model_dir, output)) == 0
    folder = output / "reconstruction"
    return folder, json.loads((folder / "reconstruction.json").read_text())


def test_what_it_writes(finished):
    folder, found = finished
    expected = ["errors.png", "hard_model", "latents.safetensors", "reconstruction.json"]
    assert sorted(path.name for path in folder.glob("[!.]*")) == expected
    assert [window["end"] for window in found["windows"]] == [1, 2, 2]
    assert [window["measure"] for window in found["windows"]] == ["error", "error", "divergence"]
    assert all(window["error"] < window["naive_error"] for window in found["windows"])
    losses = found["validation_loss"]
    assert [*losses] == ["pretrained", "naive ternary", "reconstructed, hard"]
    latents = load_file(folder / "latents.safetensors")
    hard = load_file(next((folder / "hard_model").glob("*.safetensors")))
    ours = latents["layers.1.mlp.w2.weight"]
    stored = hard["model.layers.1.mlp.down_proj.weight"].float().unflatten(1, (-1, 32))
    logit, start = (latents[f"layers.1.mlp.w2.{key}"] for key in ("scale_logit", "scale_start"))
    scale = (2 * torch.sigmoid(logit) * start).to(torch.bfloat16).float().unsqueeze(-1)
    codes = torch.where(
        ours.unflatten(1, (-1, 32)).abs() > scale / 2, ours.sign().unflatten(1, (-1, 32)), 0.0
    )
    assert torch.equal(stored, scale * codes)


def test_the_head_computes_the_same_without_a_copy_of_its_own(model_dir, tmp_path, monkeypatch):
    """In bfloat16, autocast rounds the matrix of the head to the same numbers in every step."""
    few = ("dtype=bf16", "reconstruct.epochs=1", "reconstruct.kl_epochs=1")
    assert run_reconstruct(config(model_dir, tmp_path / "own", *few)) == 0
    monkeypatch.setattr(reconstruct, "copied", lambda *_: contextlib.nullcontext())
    assert run_reconstruct(config(model_dir, tmp_path / "none", *few)) == 0
    files = [tmp_path / f"{name}/reconstruction/latents.safetensors" for name in ("own", "none")]
    own, expected = map(load_file, files)
    assert all(torch.equal(value, expected[name]) for name, value in own.items())


def test_a_finished_reconstruction_is_used_again_and_not_replaced(model_dir, finished):
    folder, _ = finished
    written = (folder / "reconstruction.json").stat().st_mtime_ns
    recipe = ReconstructionRecipe(Run.of(config(model_dir, folder.parent)))
    recipe.run()
    assert recipe.finished and not recipe.computed
    assert (folder / "reconstruction.json").stat().st_mtime_ns == written
    with pytest.raises(
        ValueError, match=r"other settings \(settings.lr\); set reconstruct.overwrite=True"
    ):
        ReconstructionRecipe(Run.of(config(model_dir, folder.parent, "reconstruct.lr=0.1"))).run()
    with pytest.raises(ValueError, match=r"made with other settings \(quantizer\)"):
        other = config(model_dir, folder.parent, "quantizer.group_size=16")
        ReconstructionRecipe(Run.of(other)).run()


def test_other_validation_data_are_measured(model_dir, finished, tmp_path):
    """hestia_reconstruct and auto measure the losses on new validation data.

    A path alone leaves out losses on other data, and needs no settings to use losses on the same
    data.
    """
    folder, found = finished
    own = tmp_path / "reconstruction"
    shutil.copytree(folder, own)
    other = ("dataset_val.num=5", "dataset_val.seed=9", "max_steps_per_epoch=1")
    by_path = run(config(model_dir, tmp_path / "path", f"reconstruction={own}", *other))
    assert [*by_path.validation_losses] == ["reconstructed, hard", "trained, hard"]
    assert run_qat(config(model_dir, tmp_path, "reconstruction=auto", *other)) == 0
    again = json.loads((own / "reconstruction.json").read_text())
    losses = again["validation_loss"]
    assert [*losses] == [*found["validation_loss"]]
    assert all(losses[label] != loss for label, loss in found["validation_loss"].items())
    assert losses["reconstructed, hard"] == pytest.approx(
        by_path.validation_losses["reconstructed, hard"], rel=1e-5
    )
    changed = {key for key in again if again[key] != found.get(key)}
    assert changed == {"validation", "validation_loss"} and again.keys() == found.keys()
    assert json.loads((own / "hard_model/hestia.json").read_text())["validation_loss"] == losses
    for file in ("latents.safetensors", "hard_model/model-00001-of-00001.safetensors"):
        before, after = load_file(folder / file), load_file(own / file)
        assert all(torch.equal(after[name], value) for name, value in before.items()), file
    results = json.loads((tmp_path / "results.json").read_text())["validation_loss"]
    assert {label: results[label] for label in losses} == pytest.approx(losses, rel=1e-5)


class StopsAfter:
    """A `StopRequest` that stops or interrupts after a number of steps and ends of windows."""

    def __init__(self, times: int, *, at_once: bool = False):
        self.left, self._at_once = times, at_once

    @property
    def requested(self) -> bool:
        self.left -= 1
        if self.left < 0 and self._at_once:
            raise KeyboardInterrupt
        return self.left < 0

    def installed(self):
        return contextlib.nullcontext()


class Bar(contextlib.nullcontext):
    """A `progress_bar` that counts its updates and keeps the stages that it shows."""

    def __init__(self, total, initial, bar_format):
        super().__init__()
        self.total, self.initial, self.n, self.stages = total, initial, initial, []

    def set_description_str(self, text, refresh):
        if text and text not in self.stages:
            self.stages.append(text)

    def update(self, count):
        self.n += count


@pytest.mark.parametrize(
    ("steps", "windows", "at_once"),
    [
        (4, 0, False),
        (9, 1, False),  # while the error of a window is measured
        (12, 1, False),
        (21, 2, False),
        (27, 3, False),
        (12, 1, True),
        (9, 1, True),
    ],
)
def test_a_stopped_reconstruction_resumes_at_its_step(
    model_dir, finished, tmp_path, monkeypatch, steps, windows, at_once
):
    """The reconstruction has three windows of nine steps, and stops after some steps.

    A stop saves. An interrupt comes in the next step, and then every step has been saved. After
    nine steps the saved state belongs to a finished window.
    """
    stop, bars = StopsAfter(steps + windows - (not at_once), at_once=at_once), []
    monkeypatch.setattr(reconstruct, "StopRequest", lambda: stop)
    monkeypatch.setattr(
        reconstruct, "progress_bar", lambda **given: bars.append(Bar(**given)) or bars[-1]
    )
    monkeypatch.setattr(reconstruct, "_SECONDS_BETWEEN_SAVES", 0.0 if at_once else 1e9)
    if at_once:
        with pytest.raises(KeyboardInterrupt):
            run_reconstruct(config(model_dir, tmp_path))
    else:
        assert run_reconstruct(config(model_dir, tmp_path)) == 130
    output = tmp_path / "reconstruction"
    assert not (output / "reconstruction.json").exists()
    assert len(list((output / "windows").glob("window_*.safetensors"))) == windows
    rest = StopsAfter(100)
    monkeypatch.setattr(reconstruct, "StopRequest", lambda: rest)
    assert run_reconstruct(config(model_dir, tmp_path)) == 0
    assert 100 - rest.left == 27 - steps + 3 - windows
    before = min(steps, 18) + 2 * max(0, steps - 18)  # the last window has two blocks
    assert (bars[1].initial, bars[1].n, bars[1].total) == (before, 36, 36)
    stages = ["block 1 of 2", "block 2 of 2", "all 2 blocks"]
    assert bars[1].stages == stages[steps // 9 :]
    folder, whole = finished
    found = json.loads((output / "reconstruction.json").read_text())
    for window, other in zip(found["windows"], whole["windows"], strict=True):
        assert window | {"seconds": 0} == other | {"seconds": 0}
    assert found["validation_loss"] == whole["validation_loss"]
    own, other = (load_file(f / "latents.safetensors") for f in (output, folder))
    assert all(torch.equal(own[name], other[name]) for name in other)


def test_a_stopped_run_says_how_to_go_on(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(reconstruct, "StopRequest", lambda: StopsAfter(11))
    cfg = config(model_dir, tmp_path, "reconstruction=auto", "overwrite_output=True")
    with pytest.raises(Stopped, match="kept; to go on: hestia qat .*overwrite_output=True"):
        run_qat(cfg)


def test_other_settings_of_the_last_stage_keep_the_windows(
    model_dir, finished, tmp_path, monkeypatch
):
    monkeypatch.setattr(reconstruct, "StopRequest", lambda: StopsAfter(11))
    other = ("reconstruct.kl_epochs=1", "reconstruct.kl_blocks=1")
    assert run_reconstruct(config(model_dir, tmp_path, *other)) == 130
    with pytest.raises(
        ValueError, match=r"other settings \(settings.lr\); set reconstruct.overwrite"
    ):
        run_reconstruct(config(model_dir, tmp_path, *other, "reconstruct.lr=2e-2"))
    rest = StopsAfter(100)
    monkeypatch.setattr(reconstruct, "StopRequest", lambda: rest)
    assert run_reconstruct(config(model_dir, tmp_path)) == 0
    assert 100 - rest.left == 18 + 2  # nothing is kept of the unfinished window
    folder, _ = finished
    own, other = (
        load_file(f / "latents.safetensors") for f in (tmp_path / "reconstruction", folder)
    )
    assert all(torch.equal(own[name], other[name]) for name in other)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.nope=1"], "optimizer: "),
        (["lr_scheduler.nope=1"], "lr_scheduler: "),
        (["loss._component_=nope.Nope"], "loss: "),
        (["metric_logger._component_=nope.Nope"], "nope"),
        (["distillation.weight=1", "distillation.teacher=/nope"], "/nope has no config.json"),
        (["eval.every_n_steps=1", "eval.tasks=[nope]"], "nope"),
    ],
)
def test_training_errors_come_before_the_reconstruction(model_dir, tmp_path, overrides, message):
    cfg = config(model_dir, tmp_path, "reconstruction=auto", *overrides)
    with pytest.raises(ValueError, match=message):
        run_qat(cfg)
    assert not (tmp_path / "reconstruction").exists()


def test_auto_writes_into_no_locked_folder(model_dir, tmp_path):
    folder = tmp_path / "shared"
    hold = f"from hestia_tune.files import locked\nwith locked({str(folder)!r}):\n"
    code = f"{hold}    print('held', flush=True)\n    input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as holder:
        assert holder.stdout.readline() == "held\n"
        cfg = config(model_dir, tmp_path, "reconstruction=auto", f"reconstruct.output={folder}")
        with pytest.raises(ValueError, match=f"{folder} is being written by process {holder.pid}"):
            run_qat(cfg)
        holder.communicate("")
    assert not (folder / "windows").exists()


def test_a_failing_save_ends_only_a_run_that_stops(model_dir, tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr(reconstruct, "_SECONDS_BETWEEN_SAVES", 0.0)
    few = ("reconstruct.epochs=1", "reconstruct.kl_blocks=0", "dataset_val=null")
    assert run_reconstruct(config(model_dir, tmp_path, *few)) == 0
    monkeypatch.setattr(reconstruct, "StopRequest", lambda: StopsAfter(1))
    with pytest.raises(ValueError, match="could not be written .no space left.; make room"):
        run_reconstruct(config(model_dir, tmp_path / "stopped", *few))


@pytest.mark.slow
def test_two_ranks_and_the_command(model_dir, finished, tmp_path):
    path = write_config(config(model_dir, tmp_path), tmp_path / "config.yaml")
    done = run_forked("--config", path, ranks=2, recipe="hestia_reconstruct")
    assert done.returncode == 0, done.stderr
    assert "reconstructed, hard" in done.stdout
    _, whole = finished
    found = json.loads((tmp_path / "reconstruction" / "reconstruction.json").read_text())
    for window, other in zip(found["windows"], whole["windows"], strict=True):
        assert window["error"] == pytest.approx(other["error"], rel=1e-2)
    for label, loss in found["validation_loss"].items():
        assert loss == pytest.approx(whole["validation_loss"][label], rel=1e-3)


@pytest.mark.gpu
def test_on_a_gpu(model_dir, tmp_path):
    options = ("device=cuda", "dtype=bf16", "compile=True")
    assert run_reconstruct(config(model_dir, tmp_path, *options)) == 0
    found = json.loads((tmp_path / "reconstruction" / "reconstruction.json").read_text())
    assert all(window["error"] < window["naive_error"] for window in found["windows"])


def test_training_starts_from_it(model_dir, finished, tmp_path):
    folder, found = finished
    latents = load_file(folder / "latents.safetensors")

    def as_loaded(recipe):
        for name, layer in quantized_linears(recipe.model).items():
            for key in ("weight", "scale_logit", "scale_start"):
                own = full_tensor(getattr(layer, key))
                assert torch.equal(own, latents[f"{name}.{key}"]), (name, key)

    options = (f"reconstruction={folder}", "optimizer.lr=0", "optimizer.weight_decay=0")
    recipe = run(config(model_dir, tmp_path, *options, "max_steps_per_epoch=1"), as_loaded)
    losses = recipe.validation_losses
    assert [*losses][:3] == ["pretrained", "naive ternary", "reconstructed, hard"]
    for label, loss in found["validation_loss"].items():
        assert losses[label] == pytest.approx(loss, rel=1e-5)
    assert losses["trained, hard"] == pytest.approx(losses["reconstructed, hard"], rel=1e-6)


def test_hidden_states_in_files_change_nothing(model_dir, finished, tmp_path, caplog, monkeypatch):
    folder, _ = finished
    monkeypatch.setattr(engine, "MEMORY_GIB", 0)
    with caplog.at_level("INFO", "hestia_tune"):
        assert run_reconstruct(config(model_dir, tmp_path)) == 0
    assert re.search(r"writing hidden states of \d+ kB to /", caplog.text)
    own = load_file(tmp_path / "reconstruction" / "latents.safetensors")
    assert all(torch.equal(own[k], v) for k, v in load_file(folder / "latents.safetensors").items())


def test_auto_computes_it_first(model_dir, tmp_path):
    cfg = config(model_dir, tmp_path, "reconstruction=auto", "max_steps_per_epoch=2")
    assert run_qat(cfg) == 0
    assert (tmp_path / "reconstruction" / "reconstruction.json").exists()
    results = json.loads((tmp_path / "results.json").read_text())
    assert "reconstructed, hard" in results["validation_loss"]
    assert len(logged(tmp_path)) == 2
    shutil.rmtree(tmp_path / "reconstruction")
    damaged = tmp_path / "checkpoints" / "step_9"
    shutil.copytree(tmp_path / "checkpoints" / "step_2", damaged)
    (damaged / "meta.json").write_text("{")
    other = {"quantizer": {"threshold": "learned"}, "resume_from_checkpoint": True}
    with pytest.raises(ValueError, match="the checkpoint to resume from has quantizer ternary"):
        run_qat(OmegaConf.merge(cfg, other))
    assert not (tmp_path / "reconstruction").exists()  # it was told first


def test_it_is_converted(model_dir, finished, tmp_path):
    folder, _ = finished
    source = f"convert.source={folder / 'hard_model'}"
    formats = "convert.formats=[torchao,huggingface,gguf,compressed_tensors,onnx]"
    assert run_convert(config(model_dir, tmp_path, source, formats)) == 0
    assert (tmp_path / "converted" / "model.gguf").exists()
    assert (tmp_path / "converted" / "onnx" / "onnx" / "model_q2.onnx").exists()


def test_a_method_without_parameters(model_dir, tmp_path):
    few = [option for option in FEW if "quantizer" not in option]
    assert run_reconstruct(make_config(model_dir, tmp_path, *few)) == 0
    state = load_file(tmp_path / "reconstruction" / "latents.safetensors")
    hard = load_file(next((tmp_path / "reconstruction/hard_model").glob("*.safetensors")))
    expected = hard_ternary(state["layers.1.mlp.w2.weight"], group_size=32)
    assert torch.equal(hard["model.layers.1.mlp.down_proj.weight"].float(), expected)


def test_a_method_that_adds_biases(model_dir, tmp_path, monkeypatch):
    few = [option for option in FEW if "quantizer" not in option]
    cfg = make_config(model_dir, tmp_path, *few, "optimizer.lr=0", "max_steps_per_epoch=1")
    cfg.quantizer = {"_component_": "hestia_tune.Tequila", "group_size": 32, "epsilon": 0.05}
    cfg.schedule = {}
    with monkeypatch.context() as patch:
        mistral = functools.partial(check_can_hold, model_type="MISTRAL")
        patch.setattr(sources, "check_can_hold", lambda method, _: mistral(method))
        with pytest.raises(ValueError, match="Llamas .* have room for it; got model_type MISTRAL"):
            run_reconstruct(cfg)
    assert run_reconstruct(cfg) == 0
    folder = tmp_path / "reconstruction"
    cfg.reconstruction = str(folder)
    losses = run(cfg).validation_losses
    assert losses["trained, hard"] == pytest.approx(losses["reconstructed, hard"], rel=1e-6)
    cfg.dataset_val.num = 5  # the finished reconstruction is loaded and measured again
    recipe = ReconstructionRecipe(Run.of(cfg))
    recipe.run()
    assert not recipe.computed and recipe.losses["reconstructed, hard"] == pytest.approx(
        run(OmegaConf.merge(cfg, {"overwrite_output": True})).validation_losses["trained, hard"],
        rel=1e-6,
    )
    states = [
        load_file(file)
        for path in (folder, tmp_path)
        for file in sorted((path / "hard_model").glob("*.safetensors"))
    ]
    biases = [{k: v for k, v in state.items() if k.endswith("bias")} for state in states]
    biases = [some for some in biases if some]
    assert len(biases) == 2 and len(biases[0]) == NUM_QUANTIZED
    for name, value in biases[0].items():
        assert value.any() and torch.equal(value, biases[1][name]), name


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reconstruct.stride=2"], "unknown key reconstruct.stride"),
        (["reconstruct.num_samples=2"], "num_samples 2 must be at least batch_size 4"),
        (["dataset.num=4", "reconstruct.batch_size=5"], "fewer samples than .*batch_size 5"),
        (["reconstruct.alpha=0.4"], "unknown key reconstruct.alpha"),
    ],
)
def test_errors(model_dir, tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        run_reconstruct(config(model_dir, tmp_path, *overrides))


def test_training_refuses_a_reconstruction_of_another_run(model_dir, finished, tmp_path):
    folder, _ = finished
    with pytest.raises(ValueError, match="holds no finished reconstruction"):
        run(config(model_dir, tmp_path, f"reconstruction={tmp_path / 'none'}"))
    other = config(model_dir, tmp_path, f"reconstruction={folder}", "quantizer.group_size=16")
    with pytest.raises(ValueError, match="was made by quantizer ternary, group_size=32"):
        run(other)
    fewer = config(
        model_dir, tmp_path, f"reconstruction={folder}", "quantizer.exclude=['*.w2','*.w3']"
    )
    with pytest.raises(ValueError, match=r"differ in 4 layers, such as layers.0.mlp.w2; use the"):
        run(fewer)
    stranger = make_model_dir(tmp_path / "stranger", seed=1)
    with pytest.raises(ValueError, match="made from another model"):
        run(config(stranger, tmp_path, f"reconstruction={folder}"))


@pytest.mark.parametrize("source", ["samples", "stream", "tokens"])
def test_training_after_a_reconstruction_has_another_order(model_dir, tmp_path, source):
    """The reconstruction learns the sequences with which training alone begins."""
    cfg = config(model_dir, tmp_path, "seed=0", "shuffle=True")
    if source != "samples":
        lines = (json.dumps({"text": f"Document {k} " + "word " * (k % 11)}) for k in range(300))
        (tmp_path / "text.jsonl").write_text("\n".join(lines))
        cfg.dataset = {
            "_component_": "hestia_tune.data.streaming_text_dataset",
            "source": "json",
            "data_files": str(tmp_path / "text.jsonl"),
            "seq_len": 16,
            "shuffle_buffer": 300,
            "max_tokens": 1600,
        }
    if source == "tokens":
        run_tokenize(cfg)
        cfg.dataset = cfg.dataset | {
            "source": "token_shards",
            "data_files": str(tmp_path / "tokens"),
        }
    parsed = RunConfig.parse(cfg)
    planned = Run.of(parsed)
    [drawn] = calibration_batches(parsed, planned.tokenizer, num_samples=8, batch_size=8)

    def first(parsed):
        data = TrainingData(parsed, planned.tokenizer, seed=0)
        return next(data.begin(0))["tokens"]

    alone = first(parsed)
    assert torch.equal(alone, drawn.tokens[: len(alone)])
    after = first(parsed.changed(reconstruction="auto"))
    assert not any(map(torch.equal, after, drawn.tokens))
