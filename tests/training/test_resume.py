"""Test that a stopped and resumed run equals a run without a stop, bit for bit."""

import json
import shutil

import pytest
import torch
from ranks import run_forked
from safetensors.torch import load_file
from tiny import logged, make_config, make_model_dir, run, signal_at, write_config

from hestia_tune.config.run_config import overridden
from hestia_tune.files import differences
from hestia_tune.models.sources import complete_checkpoints, find_damage
from hestia_tune.training.checkpoint import check_same, random_state, set_random_state

# 2 epochs of 4 steps with accumulation and shuffling. The last epoch ends in its middle.
SETTINGS = (
    "epochs=2",
    "gradient_accumulation_steps=2",
    "batch_size=2",
    "max_steps_per_epoch=4",
    "run_val_every_n_steps=3",
)


@pytest.fixture(scope="module")
def uninterrupted(model_dir, tmp_path_factory):
    """Return the folder of a full run that kept a checkpoint of every step."""
    output = tmp_path_factory.mktemp("full")
    every_step = ("save_every_n_steps=1", "keep_last_checkpoints=100")
    run(make_config(model_dir, output, *SETTINGS, *every_step))
    return output


def weights(output):
    return {path.name: path.read_bytes() for path in (output / "hard_model").glob("*.safetensors")}


@pytest.mark.parametrize("step", range(1, 9))
def test_resuming_from_any_step_is_bit_exact(model_dir, uninterrupted, tmp_path, step):
    shutil.copytree(
        uninterrupted / "checkpoints" / f"step_{step}", tmp_path / "checkpoints" / f"step_{step}"
    )
    shutil.copy(uninterrupted / "metrics.jsonl", tmp_path)
    recipe = run(make_config(model_dir, tmp_path, *SETTINGS, "resume_from_checkpoint=True"))
    assert recipe.global_step == 8
    for key in ("loss", "lr", "grad_norm", "val_loss_hard", "val_loss_relaxed", "tau_max"):
        assert logged(tmp_path, key) == logged(uninterrupted, key), key
    assert weights(tmp_path) == weights(uninterrupted) != {}


@pytest.mark.parametrize("at_step", [3, 4])
def test_sigkill_and_resume(model_dir, uninterrupted, tmp_path, at_step):
    logger = signal_at(at_step, "SIGKILL")
    output = tmp_path / "run"
    cfg = make_config(model_dir, output, *SETTINGS, *logger, "save_every_n_steps=2")
    killed = run_forked("--config", write_config(cfg, tmp_path / "killed.yaml"))
    assert killed.returncode == -9, killed.stderr
    run(
        make_config(
            model_dir, output, *SETTINGS, "resume_from_checkpoint=True", "save_every_n_steps=2"
        )
    )
    assert logged(output) == logged(uninterrupted)
    assert weights(output) == weights(uninterrupted)


def test_ctrl_c_stops_after_the_step_with_a_checkpoint(model_dir, uninterrupted, tmp_path):
    logger = signal_at(5, "SIGINT")
    output = tmp_path / "run"
    cfg = make_config(model_dir, output, *SETTINGS, *logger)
    stopped = run_forked("--config", write_config(cfg, tmp_path / "stopped.yaml"))
    assert stopped.returncode == 130, stopped.stderr
    assert "resume_from_checkpoint=True" in stopped.stdout
    # The signal comes after step 5 was logged, so the next step is the last one.
    assert [step for step, _ in complete_checkpoints(output / "checkpoints")] == [6]
    assert not (output / "hard_model").exists()
    run(make_config(model_dir, output, *SETTINGS, "resume_from_checkpoint=True"))
    assert logged(output) == logged(uninterrupted)


def test_dropout_continues_as_without_a_stop(model_dir, tmp_path):
    """Resume within an epoch, at its end (step 4), and at validations (steps 3 and 6)."""
    settings = (*SETTINGS, "model.attn_dropout=0.3")
    every_step = ("save_every_n_steps=1", "keep_last_checkpoints=100")
    run(make_config(model_dir, tmp_path / "whole", *settings, *every_step))
    for step in (2, 3, 4, 6):
        cut = tmp_path / f"from_{step}"
        name = f"checkpoints/step_{step}"
        shutil.copytree(tmp_path / "whole" / name, cut / name)
        run(make_config(model_dir, cut, *settings, "resume_from_checkpoint=True"))
        losses = {k: v for k, v in logged(tmp_path / "whole").items() if k > step}
        assert logged(cut) == losses, step


def test_half_written_checkpoints_are_never_used(model_dir, uninterrupted, tmp_path):
    folder = tmp_path / "checkpoints"
    shutil.copytree(uninterrupted / "checkpoints" / "step_2", folder / "step_2")
    shutil.copytree(uninterrupted / "checkpoints" / "step_5", folder / "step_5.tmp")
    shutil.copytree(uninterrupted / "checkpoints" / "step_6", folder / "step_6")
    (folder / "step_6" / "meta.json").unlink()
    assert [step for step, _ in complete_checkpoints(folder)] == [2]
    run(make_config(model_dir, tmp_path, *SETTINGS, "resume_from_checkpoint=True"))
    assert not list(folder.glob("*.tmp"))


def test_only_the_newest_checkpoints_are_kept(model_dir, tmp_path):
    run(make_config(model_dir, tmp_path, "save_every_n_steps=1", "keep_last_checkpoints=3"))
    assert [step for step, _ in complete_checkpoints(tmp_path / "checkpoints")] == [4, 5, 6]


def test_a_damaged_checkpoint_is_not_kept_in_place_of_a_new_one(model_dir, tmp_path):
    run(make_config(model_dir, tmp_path, "save_every_n_steps=3"))
    folder = tmp_path / "checkpoints"
    (folder / "step_6" / "rank_0.json").write_text("{}")
    few = ("keep_last_checkpoints=1", "resume_from_checkpoint=True")
    assert not run(make_config(model_dir, tmp_path, *few, *signal_at(4, "SIGINT"))).finished
    ((step, path),) = complete_checkpoints(folder)
    assert step < 6 and find_damage(path) is None
    assert run(make_config(model_dir, tmp_path, *few)).finished


def test_checkpoint_holds_float32_latents(uninterrupted):
    folder = uninterrupted / "checkpoints" / "step_8"
    entries = {k: v for path in folder.glob("shard-*") for k, v in load_file(path).items()}
    weights = {name: value for name, value in entries.items() if name.startswith("model.")}
    assert weights and {value.dtype for value in weights.values()} == {torch.float32}
    assert not {path.suffix for path in folder.iterdir()} - {".safetensors", ".json"}


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("schedule.rho=0.7", "schedule.rho"),
        ("schedule.alpha=0.1", "schedule.alpha"),
        ("quantizer.group_size=tensor", "quantizer"),
        ("epochs=3", "total_steps"),
        ("seed=9", "seed"),
        ("lr_scheduler.warmup_ratio=0.1", "lr_scheduler"),
        ("clip_grad_norm=0.5", "clip_grad_norm"),
        ("schedule.hard_fraction=0.1", "schedule.hard_fraction"),
        ("distillation.weight=0.5", "distillation"),
        ("model.attn_dropout=0.3", "model"),
        ("~lr_scheduler.warmup_ratio", "lr_scheduler"),
    ],
)
def test_resuming_another_run_is_refused(model_dir, uninterrupted, tmp_path, override, key):
    shutil.copytree(uninterrupted / "checkpoints" / "step_8", tmp_path / "checkpoints" / "step_8")
    cfg = make_config(model_dir, tmp_path, *SETTINGS, "resume_from_checkpoint=True")
    cfg = overridden(cfg, [override])
    with pytest.raises(ValueError, match=f"has {key} .*; use the same"):
        run(cfg)


def test_options_that_a_component_no_longer_has_are_differences():
    saved = {"part": {"_component_": "a", "layers": {"x": "b"}, "codes": 2}, "typed": {"old": 1}}
    assert differences(saved, saved) == []
    found = differences({"part": {"_component_": "a"}, "typed": {}}, saved)
    assert sorted(found) == ["part.codes", "part.layers"]
    fewer = {"part": {"_component_": "a", "layers": {}, "codes": 2}}
    assert differences(fewer, saved) == ["part.layers.x"]


def test_a_random_seed_is_that_of_the_checkpoint(model_dir, tmp_path):
    stop = ("seed=null", "save_every_n_steps=2", "keep_last_checkpoints=9")
    first = run(make_config(model_dir, tmp_path / "a", *SETTINGS, *stop))
    shutil.copytree(tmp_path / "a" / "checkpoints" / "step_4", tmp_path / "b/checkpoints/step_4")
    shutil.copy(tmp_path / "a" / "metrics.jsonl", tmp_path / "b")
    again = (*stop, "resume_from_checkpoint=True")
    second = run(make_config(model_dir, tmp_path / "b", *SETTINGS, *again))
    assert second.seed == first.seed and logged(tmp_path / "a") == logged(tmp_path / "b")


def test_a_rate_of_learned_scales_is_not_changed_by_a_resume(model_dir, tmp_path):
    learned = ("quantizer.scale=learned", "quantizer.scale_lr=1e-3", "max_steps_per_epoch=1")
    run(make_config(model_dir, tmp_path, *learned))
    other = (*learned, "quantizer.scale_lr=2e-3", "resume_from_checkpoint=True")
    with pytest.raises(ValueError, match="has quantizer.scale_lr 0.001, this run 0.002"):
        run(make_config(model_dir, tmp_path, *other))


def test_other_validation_data_are_not_compared_with_the_losses_before(
    model_dir, uninterrupted, tmp_path, caplog
):
    shutil.copytree(uninterrupted / "checkpoints" / "step_7", tmp_path / "checkpoints" / "step_7")
    settings = (*SETTINGS, "resume_from_checkpoint=True")
    with caplog.at_level("INFO"):
        recipe = run(make_config(model_dir, tmp_path, *settings, "max_val_batches=1"))
    assert "validation data are not those of the checkpoint" in caplog.text
    assert [*recipe.validation_losses] == ["trained, hard"]
    assert "| trained, hard |" in recipe.summary()


def test_the_evaluation_of_an_earlier_model_is_removed(model_dir, tmp_path):
    short, file = ("max_steps_per_epoch=1", "dataset_val=null"), tmp_path / "evaluation.json"
    run(make_config(model_dir, tmp_path, *short))
    file.write_text("{}")
    run(make_config(model_dir, tmp_path, *short, "resume_from_checkpoint=True"))
    assert file.exists()  # of this model
    run(make_config(model_dir, tmp_path, *short, "overwrite_output=True"))
    assert not file.exists()


def test_resuming_with_other_pretrained_weights_is_refused(uninterrupted, tmp_path):
    other = make_model_dir(tmp_path / "other", seed=1)
    shutil.copytree(uninterrupted / "checkpoints" / "step_8", tmp_path / "checkpoints" / "step_8")
    with pytest.raises(ValueError, match="model_fingerprint"):
        run(make_config(other, tmp_path, *SETTINGS, "resume_from_checkpoint=True"))


def test_resume_without_a_checkpoint_and_start_over_a_run(model_dir, uninterrupted, tmp_path):
    with pytest.raises(ValueError, match="no complete checkpoint"):
        run(make_config(model_dir, tmp_path, *SETTINGS, "resume_from_checkpoint=True"))
    shutil.copytree(uninterrupted / "checkpoints" / "step_8", tmp_path / "checkpoints" / "step_8")
    with pytest.raises(ValueError, match="holds a run at step 8"):
        run(make_config(model_dir, tmp_path, *SETTINGS))
    run(make_config(model_dir, tmp_path, "max_steps_per_epoch=1", "overwrite_output=True"))
    meta = json.loads((tmp_path / "checkpoints" / "step_1" / "meta.json").read_text())
    assert meta["step"] == 1
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_auto_temperature_survives_a_resume(model_dir, tmp_path):
    auto = ("schedule.tau_init=auto", "save_every_n_steps=2")
    first = run(make_config(model_dir, tmp_path / "a", *SETTINGS, *auto))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step_8")
    second = run(
        make_config(model_dir, tmp_path / "b", *SETTINGS, *auto, "resume_from_checkpoint=True")
    )
    assert second.schedule.tau_init == first.schedule.tau_init
    assert 0.3 < first.schedule.tau_init < 0.4
    assert logged(tmp_path / "a") == logged(tmp_path / "b")


def test_random_numbers_saved_on_a_cpu_are_restored_on_a_gpu():
    """A run on a CPU saves no state for a GPU. A run on a GPU then keeps its own."""
    state = random_state(torch.device("cpu"))
    expected = torch.rand(3)
    set_random_state(state, torch.device("cuda"))
    assert torch.equal(torch.rand(3), expected)


def test_a_checkpoint_may_have_options_that_were_removed_since():
    saved = {"identity": {"distillation": {"weight": 0.5, "temperature": 1.0}, "cage_strength": 0}}
    check_same({"distillation": {"weight": 0.5}}, saved)
    with pytest.raises(ValueError, match="has distillation .*0.5.*, this run .*0.4"):
        check_same({"distillation": {"weight": 0.4}}, saved)
