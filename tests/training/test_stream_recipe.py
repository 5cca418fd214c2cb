"""Test the recipe on a stream: steps, exact resuming, failing data."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from ranks import run_forked
from tiny import logged, make_config, run, signal_at, write_config
from torch import distributed
from torch.utils.data import DistributedSampler
from torchtune.training.metric_logging import DiskLogger

from hestia_tune.commands.qat import run_tokenize
from hestia_tune.data import DataStreamError, PositionSampler
from hestia_tune.models import sources
from hestia_tune.run import Run
from hestia_tune.stages import measure_sensitivity

pytestmark = pytest.mark.usefixtures("end_process_group")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return four jsonl files with about 700 documents. The tokenizer makes a token per byte."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(4):
        lines = [
            json.dumps({"text": f"Document {k} of file {number}, " + "word " * (k % 11)})
            for k in range(175)
        ]
        (folder / f"part_{number}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


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


@pytest.mark.parametrize(
    ("num_workers", "accumulation"),
    [(0, 1), (0, 2), pytest.param(2, 1, marks=pytest.mark.slow), (2, 2)],
)
def test_a_resumed_run_reads_the_same_tokens(model_dir, tmp_path, files, num_workers, accumulation):
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
    run(cfg, lambda recipe: measured.append(list(recipe.data.val_loader)))
    assert [len(batch["tokens"]) for batch in measured[-1]] == [4]  # less than one batch
    cfg.dataset_val.max_tokens = 15
    with pytest.raises(ValueError, match="dataset_val could not be loaded: it has no samples"):
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
        (["dataset.max_tokens=50"], "dataset has 3 samples, one step takes 4"),
        (["dataset.max_tokens=5"], "dataset could not be loaded: it has no samples"),
        (["dataset.column=content"], "content"),
        (["dataset.data_files=/nowhere/*.jsonl"], "dataset could not be loaded"),
        (["num_workers=-1"], "num_workers must be at least 0"),
        (["dataset.seq_length=3"], "unknown key dataset.seq_length; did you mean seq_len"),
        (["max_steps=0"], "max_steps must be at least 1"),
    ],
)
def test_errors_before_the_first_step(model_dir, tmp_path, files, overrides, message):
    with pytest.raises(ValueError, match=message):
        run(config(model_dir, tmp_path, files, *overrides))


def test_bad_data_in_the_middle_save_a_checkpoint_first(model_dir, tmp_path, files):
    folder = tmp_path / "text"
    folder.mkdir()
    lines = (files / "part_0.jsonl").read_text().splitlines()
    # The rows are read in order, 64 at a time. The bad row is in the second block.
    bad = [*lines[:90], '{"text": null}', *lines[90:]]
    (folder / "part_0.jsonl").write_text("\n".join(bad) + "\n")
    options = ("dataset.shuffle_buffer=0", "dataset_val=null", "batch_size=60")
    options += (f"dataset.max_tokens={6 * 60 * 16}",)
    cfg = config(model_dir, tmp_path / "run", folder, *options)
    with pytest.raises(DataStreamError, match=r"part_\*.jsonl .*holds NoneType, not text"):
        run(cfg)
    if distributed.is_initialized():
        distributed.destroy_process_group()
    ((step, _),) = sources.complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert 0 < step < 6
    # The repair has the same number of bytes, after the position, so the run can resume.
    mended = [*lines[:90], '{"text": "ab"}', *lines[90:]]
    (folder / "part_0.jsonl").write_text("\n".join(mended) + "\n")
    resumed = config(model_dir, tmp_path / "run", folder, *options, "resume_from_checkpoint=True")
    assert run(resumed).finished
    run(config(model_dir, tmp_path / "whole", folder, *options))
    assert logged(tmp_path / "run") == logged(tmp_path / "whole")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_error_of_a_worker_is_its_message_only(model_dir, tmp_path, files, num_workers):
    folder = tmp_path / "text"
    folder.mkdir()
    lines = (files / "part_0.jsonl").read_text().splitlines()
    lines.insert(90, '{"text": 3}')
    (folder / "part_0.jsonl").write_text("\n".join(lines) + "\n")
    options = ("dataset.shuffle_buffer=0", "dataset_val=null", "batch_size=60")
    options += (f"dataset.max_tokens={6 * 60 * 16}", f"num_workers={num_workers}")
    with pytest.raises(DataStreamError) as caught:
        run(config(model_dir, tmp_path / "run", folder, *options))
    assert "Traceback" not in str(caught.value) and "part_*.jsonl" in str(caught.value)


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
    saved = sources.complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert [step for step, _ in saved] == [3]


class BreakingLogger(DiskLogger):
    """A metric logger that damages a file when step 2 is logged."""

    def __init__(self, log_dir, file):
        super().__init__(log_dir)
        self._breaks = file

    def log_dict(self, payload, step):
        super().log_dict(payload, step)
        if step == 2:
            Path(self._breaks).write_text("{\n" * 50)


def test_a_stream_that_ends_too_soon_is_an_error(model_dir, tmp_path, files):
    options = ("dataset.max_tokens=null", "dataset.epochs=1", "max_steps=4000", "dataset_val=null")
    options += ("log_every_n_steps=1000", "batch_size=60")
    with pytest.raises(DataStreamError, match="the stream ended before the last step"):
        run(config(model_dir, tmp_path, files, *options))
    assert sources.complete_checkpoints(tmp_path / "checkpoints")


def test_calibration_samples_of_a_stream(model_dir, tmp_path, files):
    options = ("sensitivity_estimation.num_samples=5", "sensitivity_estimation.curvature=fisher")
    first = measure_sensitivity(Run.of(config(model_dir, tmp_path / "a", files, *options))).artifact
    second = measure_sensitivity(
        Run.of(config(model_dir, tmp_path / "b", files, *options))
    ).artifact
    assert first.traces == second.traces and first.dataset["num_samples"] == 5
    other = config(model_dir, tmp_path / "c", files, *options, "seed=9")
    assert measure_sensitivity(Run.of(other)).artifact.dataset["digest"] != first.dataset["digest"]


def tokenized(model_dir, folder, files):
    """Return overrides that train on the text as a tokenized set."""
    run_tokenize(config(model_dir, folder, files, max_tokens=9999999))
    return ("dataset.source=token_shards", f"dataset.data_files={folder}/tokens")


def cut_on_two_ranks(cfg, folder):
    """Run on 2 ranks until a Ctrl-C in the second step."""
    path = write_config(
        OmegaConf.merge(cfg, OmegaConf.from_dotlist([*signal_at(2, "SIGINT")])), folder
    )
    done = run_forked("--config", path, ranks=2)
    saved = sources.complete_checkpoints(Path(cfg.output_dir) / "checkpoints")
    assert saved and saved[-1][0] < 6, done.stderr


@pytest.mark.slow
def test_a_tokenized_set_resumes_on_another_number_of_ranks(model_dir, tmp_path, files):
    """A change from 2 ranks to 1 rank with 2 workers gives the losses of 1 rank alone."""
    options = ("dataset_val=null", "save_every_n_steps=2", "keep_last_checkpoints=9")
    options += tokenized(model_dir, tmp_path, files)
    one = ("gradient_accumulation_steps=2", "num_workers=2")
    run(config(model_dir, tmp_path / "whole", files, *options, *one, max_tokens=6 * 8 * 16))
    cfg = config(model_dir, tmp_path / "run", files, *options, max_tokens=6 * 8 * 16)
    cut_on_two_ranks(cfg, tmp_path / "two.yaml")
    resume = OmegaConf.from_dotlist([*one, "resume_from_checkpoint=True"])
    recipe = run(OmegaConf.merge(cfg, resume))
    assert recipe.finished and recipe.global_step == recipe.schedule.total_steps == 6
    assert recipe.tokens_seen == 6 * 8 * 15
    assert logged(tmp_path / "run") == pytest.approx(logged(tmp_path / "whole"), rel=1e-5)
    cfg.resume_from_checkpoint = True
    with pytest.raises(ValueError, match="sequences_per_step 8, this run 4"):
        run(cfg)


@pytest.mark.slow
def test_text_resumes_on_the_same_number_of_ranks(model_dir, tmp_path, files):
    options = ("dataset_val=null", "save_every_n_steps=2", "keep_last_checkpoints=9")
    whole = config(model_dir, tmp_path / "whole", files, *options, max_tokens=6 * 8 * 16)
    run_forked("--config", write_config(whole, tmp_path / "whole.yaml"), ranks=2)
    cfg = config(model_dir, tmp_path / "run", files, *options, max_tokens=6 * 8 * 16)
    cut_on_two_ranks(cfg, tmp_path / "two.yaml")
    cfg.resume_from_checkpoint = True
    with pytest.raises(ValueError, match="2 ranks with num_workers 0; use the same two"):
        run(OmegaConf.merge(cfg, OmegaConf.from_dotlist(["gradient_accumulation_steps=2"])))
    path = write_config(cfg, tmp_path / "resumed.yaml")
    done = run_forked("--config", path, ranks=2)
    assert done.returncode == 0, done.stderr
    assert logged(tmp_path / "run") == logged(tmp_path / "whole")
    assert len(logged(tmp_path / "run")) == 6


def test_text_on_another_number_of_workers_is_an_error(model_dir, tmp_path, files):
    options = ("dataset_val=null",)
    assert not run(config(model_dir, tmp_path, files, *options, *signal_at(2, "SIGINT"))).finished
    options += ("resume_from_checkpoint=True", "num_workers=1")
    with pytest.raises(ValueError, match="num_workers 0; .* a tokenized set .*hestia_tokenize"):
        run(config(model_dir, tmp_path, files, *options))


@pytest.mark.parametrize("length", [24, 27])
def test_the_order_of_map_style_data_does_not_depend_on_the_ranks(length):
    def order(rank, world_size, epoch=1, start=0):
        sampler = PositionSampler(
            length, length, rank=rank, world_size=world_size, seed=3, shuffle=True
        )
        sampler.epoch, sampler.start = epoch, start
        assert start or len(list(sampler)) == length // world_size
        return list(sampler)

    alone = order(0, 1)
    theirs = DistributedSampler(range(length), num_replicas=1, rank=0, shuffle=True, seed=3)
    theirs.set_epoch(1)
    assert alone == list(theirs) != order(0, 1, epoch=0)
    for world_size in (2, 4):
        for start in (0, 8, 16):
            ranks = [order(rank, world_size, start=start) for rank in range(world_size)]
            step = [index for rank in ranks for index in rank[: 8 // world_size]]
            assert sorted(step) == sorted(alone[start : start + 8])


def test_uneven_validation_samples_are_repeated():
    for length, world_size in ((7, 2), (3, 4), (8, 4)):
        whole = -(-length // world_size) * world_size
        ranks = [
            list(PositionSampler(length, whole, rank=rank, world_size=world_size, seed=0))
            for rank in range(world_size)
        ]
        assert len({len(rank) for rank in ranks}) == 1
        own = [rank[: len(range(k, length, world_size))] for k, rank in enumerate(ranks)]
        assert sorted(sum(own, [])) == list(range(length))
