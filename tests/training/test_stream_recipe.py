"""The recipe on a stream: steps, exact resume on as many ranks and on others, failing data."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from tiny import logged, make_config, make_model_dir, run, signal_at, tune_run, write_config
from torch import distributed
from torchtune.training.metric_logging import DiskLogger

from hestia_tune.commands.sensitivity import SensitivityRecipe
from hestia_tune.data import DataStreamError
from hestia_tune.training import checkpoint


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Four jsonl files of some 700 documents in all; the tokenizer makes a token of each byte."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(4):
        lines = [
            json.dumps({"text": f"Document {k} of file {number}, " + "word " * (k % 11)})
            for k in range(175)
        ]
        (folder / f"part_{number}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(autouse=True)
def end_process_group():
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


def config(model_dir, output_dir, files, *overrides, max_tokens=6 * 4 * 16):
    section = {
        "_component_": "hestia_tune.data.streaming_text_dataset",
        "source": "json",
        "data_files": f"{files}/part_*.jsonl",
        "seq_len": 16,
        "shuffle_buffer": 20,
        "max_tokens": max_tokens,
    }
    cfg = make_config(model_dir, output_dir)
    cfg.dataset = section
    return OmegaConf.merge(cfg, OmegaConf.from_dotlist(list(overrides)))


def test_the_stream_gives_the_number_of_steps(model_dir, tmp_path, files):
    recipe = run(config(model_dir, tmp_path, files))
    assert recipe.total_steps == recipe.schedule.total_steps == 6
    assert logged(tmp_path, "tokens_seen")[6] == 6 * 4 * 15
    assert set(logged(tmp_path, "data_wait")) == set(range(1, 7))
    limited = run(config(model_dir, tmp_path / "b", files, "max_steps=4"))
    assert limited.total_steps == 4
    endless = config(model_dir, tmp_path / "c", files, "max_steps=5", "dataset.max_tokens=null")
    assert run(endless).total_steps == 5
    assert logged(tmp_path / "c")[1] == logged(tmp_path)[1]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_resuming_goes_on_with_the_same_tokens(
    model_dir, tmp_path, files, num_workers, accumulation
):
    options = (
        f"num_workers={num_workers}",
        f"gradient_accumulation_steps={accumulation}",
        "dataset_val=null",
    )
    tokens = 6 * 4 * 16 * accumulation
    run(config(model_dir, tmp_path / "whole", files, *options, max_tokens=tokens))
    stop = signal_at(3, "SIGINT")
    cut = config(model_dir, tmp_path / "cut", files, *options, *stop, max_tokens=tokens)
    assert not run(cut).finished
    resumed = config(
        model_dir,
        tmp_path / "cut",
        files,
        *options,
        "resume_from_checkpoint=True",
        max_tokens=tokens,
    )
    recipe = run(resumed)
    assert recipe.finished and recipe.tokens_seen == 6 * 4 * 15 * accumulation
    assert logged(tmp_path / "cut") == logged(tmp_path / "whole")


def test_validation_on_a_held_out_stream(model_dir, tmp_path, files):
    held_out = {
        "_component_": "hestia_tune.data.streaming_text_dataset",
        "source": "json",
        "data_files": f"{files}/part_3.jsonl",
        "seq_len": 16,
        "max_tokens": 160,
    }
    cfg = config(model_dir, tmp_path, files, "run_val_every_n_steps=2", "batch_size_val=5")
    cfg.dataset_val = held_out
    measured = []
    run(cfg, lambda recipe: measured.extend([recipe.evaluate(), recipe.evaluate()]))
    losses = logged(tmp_path, "val_loss_relaxed")
    assert list(losses) == [2, 4, 6]
    assert measured[0] == measured[1] == losses[6]  # the same tokens every time
    cfg.overwrite_output = True
    cfg.dataset_val.max_tokens = 64
    with pytest.raises(ValueError, match="4 sequences for each rank, less than one batch of 5"):
        run(cfg)
    cfg.dataset_val.max_tokens = None
    with pytest.raises(ValueError, match="dataset_val is a stream without end"):
        run(cfg)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dataset.max_tokens=null"], "give dataset.max_tokens or max_steps"),
        (["epochs=2"], "a stream has epochs of its own"),
        (["max_steps_per_epoch=2"], "a stream has epochs of its own"),
        (["dataset.max_tokens=50"], "makes 3 sequences on each rank, less than one step of 4"),
        (["dataset.max_tokens=5"], "max_tokens 5 is less than one sequence of 16"),
        (["dataset.column=content"], "content"),
        (["dataset.data_files=/nowhere/*.jsonl"], "dataset could not be loaded"),
        (["num_workers=-1"], "num_workers must be at least 0"),
        (["prefetch_factor=2"], "prefetch_factor needs num_workers"),
        (["dataset.batch_size=3"], "dataset.batch_size must be that of the loader, 4; got 3"),
        (["max_steps=0"], "max_steps must be at least 1"),
    ],
)
def test_errors_before_the_first_step(model_dir, tmp_path, files, overrides, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        run(config(model_dir, tmp_path, files, *overrides))


def test_bad_data_in_the_middle_save_a_checkpoint_first(model_dir, tmp_path, files):
    folder = tmp_path / "text"
    folder.mkdir()
    lines = (files / "part_0.jsonl").read_text().splitlines()
    # Read in order, 64 documents at a time; the bad line is in the second lot.
    bad = [*lines[:90], '{"text": 3', *lines[90:]]
    (folder / "part_0.jsonl").write_text("\n".join(bad) + "\n")
    options = ("dataset.shuffle_buffer=0", "dataset_val=null", "batch_size=60")
    options += (f"dataset.max_tokens={6 * 60 * 16}",)
    cfg = config(model_dir, tmp_path / "run", folder, *options)
    with pytest.raises(DataStreamError, match=r"part_0.jsonl.*line 91"):
        run(cfg)
    if distributed.is_initialized():
        distributed.destroy_process_group()
    ((step, _),) = checkpoint.complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert 0 < step < 6
    # Told to skip it, the run goes on from there as if the line had never been.
    resumed = config(
        model_dir,
        tmp_path / "run",
        folder,
        *options,
        "dataset.skip_bad_rows=True",
        "resume_from_checkpoint=True",
    )
    assert run(resumed).finished
    skipping = config(model_dir, tmp_path / "whole", folder, *options, "dataset.skip_bad_rows=True")
    run(skipping)
    assert logged(tmp_path / "run") == logged(tmp_path / "whole")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_workers_error_is_its_message_alone(model_dir, tmp_path, files, num_workers):
    folder = tmp_path / "text"
    folder.mkdir()
    lines = (files / "part_0.jsonl").read_text().splitlines()
    (folder / "part_0.jsonl").write_text("\n".join([*lines[:90], "{", *lines[90:]]) + "\n")
    options = ("dataset.shuffle_buffer=0", "dataset_val=null", "batch_size=60")
    options += (f"dataset.max_tokens={6 * 60 * 16}", f"num_workers={num_workers}")
    with pytest.raises(DataStreamError) as caught:
        run(config(model_dir, tmp_path / "run", folder, *options))
    assert "Traceback" not in str(caught.value) and "part_0.jsonl" in str(caught.value)


def test_a_failing_validation_stream_loses_nothing(model_dir, tmp_path, files):
    folder = tmp_path / "text"
    folder.mkdir()
    held_out = folder / "held_out.jsonl"
    held_out.write_text((files / "part_3.jsonl").read_text())
    cfg = config(model_dir, tmp_path / "run", files, "run_val_every_n_steps=3")
    cfg.dataset_val = {
        "_component_": "hestia_tune.data.streaming_text_dataset",
        "source": "json",
        "data_files": str(held_out),
        "seq_len": 16,
        "max_tokens": 160,
    }
    cfg.metric_logger = {
        "_component_": "test_stream_recipe.BreakingLogger",
        "log_dir": str(tmp_path / "logs"),
        "file": str(held_out),
    }
    with pytest.raises(DataStreamError, match="held_out"):
        run(cfg)
    saved = checkpoint.complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert [step for step, _ in saved] == [3]


class BreakingLogger(DiskLogger):
    """Breaks a file when step 2 is logged."""

    def __init__(self, log_dir, file):
        super().__init__(log_dir)
        self._breaks = file

    def log_dict(self, payload, step):
        super().log_dict(payload, step)
        if step == 2:
            Path(self._breaks).write_text("{\n" * 50)


def test_a_stream_that_ends_too_soon_says_so(model_dir, tmp_path, files):
    options = ("dataset.max_tokens=null", "dataset.epochs=1", "max_steps=4000", "dataset_val=null")
    options += ("log_every_n_steps=1000", "code_statistics=False", "batch_size=60")
    with pytest.raises(DataStreamError, match="the stream ended before the last step"):
        run(config(model_dir, tmp_path, files, *options))
    assert checkpoint.complete_checkpoints(tmp_path / "checkpoints")


def test_calibration_samples_of_a_stream(model_dir, tmp_path, files):
    options = ("sensitivity_estimation.num_samples=5", "sensitivity_estimation.curvature=fisher")
    first = SensitivityRecipe(config(model_dir, tmp_path / "a", files, *options)).run()
    second = SensitivityRecipe(config(model_dir, tmp_path / "b", files, *options)).run()
    assert first.traces == second.traces and first.dataset["num_samples"] == 5
    other = config(model_dir, tmp_path / "c", files, *options, "sensitivity_estimation.seed=9")
    assert SensitivityRecipe(other).run().dataset["digest"] != first.dataset["digest"]


@pytest.mark.slow
def test_resuming_on_another_number_of_ranks(model_dir, tmp_path, files):
    """2 ranks to 1: each sequence of the old shares' rest is seen, the schedules go on."""
    options = ("dataset_val=null", "save_every_n_steps=2", "keep_last_checkpoints=9")
    tokens = 6 * 8 * 16
    cfg = config(model_dir, tmp_path / "run", files, *options, *signal_at(2, "SIGINT"))
    cfg.dataset.max_tokens = tokens
    path = write_config(cfg, tmp_path / "two.yaml")
    done = tune_run("--config", path, torchrun=("--nproc_per_node", "2"))
    saved = checkpoint.complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert saved and saved[-1][0] < 6, done.stderr
    one = config(
        model_dir,
        tmp_path / "run",
        files,
        *options,
        "resume_from_checkpoint=True",
        "gradient_accumulation_steps=2",
    )
    one.dataset.max_tokens = tokens
    recipe = run(one)
    assert recipe.finished and recipe.global_step == recipe.schedule.total_steps == 6
    assert recipe.tokens_seen == 6 * 8 * 15
    wrong = config(model_dir, tmp_path / "run", files, *options, "resume_from_checkpoint=True")
    wrong.dataset.max_tokens = tokens
    with pytest.raises(ValueError, match="sequences_per_step 8, this run 4"):
        run(wrong)


def test_map_style_data_name_the_remedy(model_dir, tmp_path):
    run(make_config(model_dir, tmp_path, "dataset_val=null", "save_every_n_steps=2"))
    path = checkpoint.complete_checkpoints(tmp_path / "checkpoints")[0][1] / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"world_size": 2}))
    for _, folder in checkpoint.complete_checkpoints(tmp_path / "checkpoints")[1:]:
        (folder / "meta.json").unlink()
    cfg = make_config(model_dir, tmp_path, "dataset_val=null", "resume_from_checkpoint=True")
    with pytest.raises(ValueError, match="written by 2 ranks .* use hestia_tune.data.streaming"):
        run(cfg)
