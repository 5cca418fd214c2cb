"""Test that two gloo ranks equal one process: losses, final weights, results."""

import shutil
from pathlib import Path

import pytest
import torch
from ranks import free_port, run_forked
from safetensors.torch import load_file
from tiny import (
    logged,
    make_config,
    make_model_dir,
    run,
    signal_at,
    tune_process,
    tune_run,
    write_config,
)

from hestia_tune.models.sources import complete_checkpoints

TWO_RANKS = ("--nproc_per_node", "2")
STEPS = ("epochs=2", "gradient_accumulation_steps=2", "run_val_every_n_steps=2")
STEPS += ("distillation.weight=0.5",)  # which must be sharded and accumulated too
# Nothing divides by 2 here: 97 rows and 265 token ids on two ranks, 7 validation samples.
UNEVEN = {"intermediate_dim": 97, "vocab_size": 265}


def hard_weights(output: Path) -> dict[str, torch.Tensor]:
    files = (output / "hard_model").glob("*.safetensors")
    return {name: value for file in files for name, value in load_file(file).items()}


def assert_same_run(first: Path, second: Path) -> None:
    """Assert that two runs are equal but for the order in which sums of ranks are added."""
    for key in ("loss", "grad_norm", "val_loss_hard", "val_loss_relaxed", "quantization_error"):
        expected = logged(first, key)
        assert expected and logged(second, key) == pytest.approx(expected, rel=1e-5), key
    for key in ("flip_rate", "zero_fraction"):
        assert logged(second, key) == pytest.approx(logged(first, key), abs=2e-4), key
    expected, actual = hard_weights(first), hard_weights(second)
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        if name.endswith(".bias"):  # a sum over a row of latent weights
            torch.testing.assert_close(actual[name], value, rtol=2e-2, atol=1e-5)
            continue
        # A latent weight at a boundary, or one bit of a scale, may round to the other side.
        different = (value != actual[name]).float().mean()
        assert different < 0.01, (name, different)


@pytest.mark.parametrize(
    ("group_size", "shape", "frozen"),
    [
        pytest.param("32", {}, "[]", marks=pytest.mark.slow),
        ("tensor", UNEVEN, "[]"),
        pytest.param("32", {}, "[tok_embeddings]", marks=pytest.mark.slow),
    ],
    ids=["group", "tensor-uneven", "frozen"],
)
def test_two_ranks_equal_one_process(tmp_path, group_size, shape, frozen):
    model_dir = make_model_dir(tmp_path / "model", **shape)
    options = (
        *STEPS,
        f"quantizer.group_size={group_size}",
        f"frozen_modules={frozen}",
        *(f"model.{key}={value}" for key, value in shape.items()),
    )
    run(make_config(model_dir, tmp_path / "one", *options))
    cfg = make_config(model_dir, tmp_path / "two", *options, "batch_size=2")
    two = run_forked("--config", write_config(cfg, tmp_path / "two.yaml"), ranks=2)
    assert two.returncode == 0, two.stderr
    assert_same_run(tmp_path / "one", tmp_path / "two")
    before = load_file(model_dir / "model.safetensors")["model.embed_tokens.weight"].bfloat16()
    after = hard_weights(tmp_path / "two")["model.embed_tokens.weight"]
    assert torch.equal(before, after) == (frozen != "[]")


@pytest.mark.slow
def test_two_ranks_resume_after_a_kill(tmp_path):
    model_dir = make_model_dir(tmp_path / "model")
    options = (*STEPS, "batch_size=2", "save_every_n_steps=2", "keep_last_checkpoints=9")
    full = write_config(make_config(model_dir, tmp_path / "full", *options), tmp_path / "full.yaml")
    assert run_forked("--config", full, ranks=2).returncode == 0

    killer = signal_at(5, "SIGKILL")
    output = tmp_path / "killed"
    cfg = make_config(model_dir, output, *options, *killer)
    killed = tune_run("--config", write_config(cfg, tmp_path / "k.yaml"), torchrun=TWO_RANKS)
    assert killed.returncode != 0
    assert complete_checkpoints(output / "checkpoints")[-1][0] == 4

    cfg = make_config(model_dir, output, *options, "resume_from_checkpoint=True")
    config = write_config(cfg, tmp_path / "resumed.yaml")
    other_size = run_forked("--config", config)
    assert other_size.returncode == 1
    assert "has sequences_per_step" in other_size.stderr
    shutil.copytree(output, tmp_path / "one")
    more = ("batch_size=4", "resume_from_checkpoint=True")
    assert run(make_config(model_dir, tmp_path / "one", *options, *more)).finished
    assert_same_run(tmp_path / "one", tmp_path / "full")
    resumed = run_forked("--config", config, ranks=2)
    assert resumed.returncode == 0, resumed.stderr
    for key in ("loss", "grad_norm", "val_loss_hard"):
        assert logged(output, key) == logged(tmp_path / "full", key), key
    for name, value in hard_weights(tmp_path / "full").items():
        assert torch.equal(hard_weights(output)[name], value), name


@pytest.mark.slow
def test_two_nodes(tmp_path):
    """Two torchrun agents that meet on the loopback address play two nodes."""
    model_dir = make_model_dir(tmp_path / "model")
    run(make_config(model_dir, tmp_path / "one", *STEPS))
    cfg = make_config(model_dir, tmp_path / "two", *STEPS, "batch_size=2")
    config = write_config(cfg, tmp_path / "two.yaml")
    node = ("--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d")
    node += ("--rdzv_endpoint", f"127.0.0.1:{free_port()}", "--rdzv_id", "nodes")
    agents = [tune_process("--config", config, torchrun=node) for _ in range(2)]
    for agent in agents:
        _, err = agent.communicate(timeout=300)
        assert agent.returncode == 0, err
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_an_error_of_all_ranks_is_printed_once(tmp_path):
    options = ("batch_size=2", "loss._component_=tiny.InfiniteLaterLoss", "dataset_val=null")
    cfg = make_config(make_model_dir(tmp_path / "model"), tmp_path / "run", *options)
    done = tune_run("--config", write_config(cfg, tmp_path / "run.yaml"), torchrun=TWO_RANKS)
    told = [line for line in done.stderr.splitlines() if ": error: " in line]
    assert done.returncode != 0 and len(told) == 1 and "though all weights are finite" in told[0]
