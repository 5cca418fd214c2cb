"""Test ``hestia_tokenize``: a set that trains like the stream, errors, the command."""

import json
import shutil

import pytest
from test_stream_recipe import config, files  # noqa: F401 (fixtures)
from tiny import logged, make_config, run, signal_at, tune_run, write_config

from hestia_tune.commands.qat import run_tokenize
from hestia_tune.data import verify_token_shards
from hestia_tune.errors import InputError

TOKENS = 6 * 4 * 16


@pytest.mark.parametrize("shuffle_buffer", [0, 20])
def test_training_on_the_set_in_order_equals_training_on_the_stream(
    model_dir,
    tmp_path,
    files,  # noqa: F811
    shuffle_buffer,
    capsys,
):
    options = (f"dataset.shuffle_buffer={shuffle_buffer}", "dataset_val=null")
    run(config(model_dir, tmp_path / "stream", files, *options))
    assert run_tokenize(config(model_dir, tmp_path, files, *options, max_tokens=9999999)) == 0
    folder = tmp_path / "tokens"
    assert f"dataset.data_files={folder}" in capsys.readouterr().out
    verify_token_shards(folder)
    assert json.loads((folder / "index.json").read_text())["num_tokens"] > TOKENS
    tokens = ("dataset.source=token_shards", f"dataset.data_files={folder}")
    options = ("dataset.shuffle_buffer=0", "dataset_val=null")
    run(config(model_dir, tmp_path / "set", files, *options, *tokens))
    assert logged(tmp_path / "set") == logged(tmp_path / "stream")
    shuffled = ("dataset.shuffle_buffer=1", "dataset_val=null", "num_workers=1")
    run(config(model_dir, tmp_path / "shuffled", files, *shuffled, *tokens))
    assert logged(tmp_path / "shuffled") != logged(tmp_path / "stream")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_reads_the_same_tokens(model_dir, tmp_path, files, num_workers):  # noqa: F811
    """The run resumes across the end of a pass, and on another number of workers."""
    run_tokenize(config(model_dir, tmp_path, files, max_tokens=800))
    options = ("dataset.source=token_shards", f"dataset.data_files={tmp_path}/tokens")
    options += ("gradient_accumulation_steps=2",)
    tokens = {"max_tokens": 6 * 8 * 16}
    cfg = config(model_dir, tmp_path / "whole", files, *options, **tokens)
    cfg.dataset_val = cfg.dataset
    run(cfg)
    cut = (f"num_workers={num_workers}", "dataset_val=null", *signal_at(4, "SIGINT"))
    assert not run(config(model_dir, tmp_path / "cut", files, *options, *cut, **tokens)).finished
    resumed = ("dataset_val=null", "resume_from_checkpoint=True", "num_workers=1")
    recipe = run(config(model_dir, tmp_path / "cut", files, *options, *resumed, **tokens))
    assert recipe.finished and recipe.tokens_seen == 6 * 8 * 15
    assert logged(tmp_path / "cut") == logged(tmp_path / "whole")
    results = json.loads((tmp_path / "cut" / "results.json").read_text())
    assert results["stream"] == {"sequences": 48}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dataset.max_tokens=0"], "dataset.max_tokens must be at least 1"),
        (["dataset.max_token=9"], "unknown key dataset.max_token; did you mean max_tokens"),
        (["tokenize.max_tokens=9"], "unknown key tokenize"),
        (["dataset.column=content"], "content"),
    ],
)
def test_errors(model_dir, tmp_path, files, overrides, message):  # noqa: F811
    with pytest.raises(InputError, match=message):
        run_tokenize(config(model_dir, tmp_path, files, *overrides))


def test_another_order_of_the_set_is_refused(model_dir, tmp_path, files):  # noqa: F811
    run_tokenize(config(model_dir, tmp_path, files))
    options = ["dataset.source=token_shards", f"dataset.data_files={tmp_path}/tokens"]
    options += ["dataset_val=null", "save_every_n_steps=2", "keep_last_checkpoints=9"]
    run(config(model_dir, tmp_path / "run", files, *options))
    for step in (4, 6):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{step}")
    options += ["resume_from_checkpoint=True"]
    for other in ("dataset.seed=5", "dataset.shuffle_buffer=0"):
        with pytest.raises(ValueError, match="the checkpoint is from data of s.* is .* now; use"):
            run(config(model_dir, tmp_path / "run", files, *options, other))
    assert run(config(model_dir, tmp_path / "run", files, *options)).finished


def test_only_streams_of_text_are_tokenized(model_dir, tmp_path, files):  # noqa: F811
    with pytest.raises(ValueError, match="got .*tiny.random_dataset"):
        run_tokenize(make_config(model_dir, tmp_path))
    shards = config(model_dir, tmp_path, files, "dataset.source=token_shards")
    with pytest.raises(ValueError, match="got .*'source': 'token_shards'"):
        run_tokenize(shards)
    several = config(model_dir, tmp_path, files)
    several.dataset = [several.dataset, several.dataset]
    with pytest.raises(ValueError, match="must be one .* with a source of text"):
        run_tokenize(several)


@pytest.mark.slow
def test_the_command(model_dir, tmp_path, files):  # noqa: F811
    path = write_config(config(model_dir, tmp_path, files), tmp_path / "config.yaml")
    done = tune_run("--config", path, recipe="hestia_tokenize")
    assert done.returncode == 0, done.stderr
    verify_token_shards(tmp_path / "tokens")
