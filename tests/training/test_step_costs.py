"""Test the estimates of memory and time: bytes and operations that can be counted by hand."""

from types import SimpleNamespace

import psutil
import pytest
import torch
from tiny import SHAPE, make_config

from hestia_tune import run as runs
from hestia_tune.config.run_config import RunConfig
from hestia_tune.run import TrainingRun
from hestia_tune.training import estimate as estimates


def planned(model_dir, folder, *overrides):
    return TrainingRun.of(RunConfig.parse(make_config(model_dir, folder, *overrides)))


def test_live_bytes_counts_what_exists_at_the_same_time():
    x = torch.zeros(8, 4)
    with estimates.LiveBytes() as live:
        y = x @ torch.zeros(4, 16)  # 256 bytes and 512 bytes; the first is freed after the product
        z = y + 1  # 512 bytes beside y
        del y
        z = z.view(16, 8)  # a view needs no memory
        z += 1
        w = torch.zeros(4)  # 16 bytes
    assert live.peak == 512 + 512
    assert (z.numel(), w.numel()) == (128, 4)


def test_the_state_is_counted_per_weight(model_dir, tmp_path):
    layer = 64 * (2 * 64 + 2 * 32) + 3 * 64 * 96 + 2 * 64  # attention, MLP, norms
    blocks, outside = SHAPE["num_layers"] * layer, 264 * 64 + 64  # embedding (tied), last norm
    whole = blocks + outside
    need = estimates.estimate(planned(model_dir, tmp_path / "a"))
    effective = 4 * (blocks - SHAPE["num_layers"] * 2 * 64)
    assert need.state == pytest.approx(12 * whole + effective, rel=1e-2)  # AdamW keeps its step
    assert need.gathered == 0  # One process has no FSDP2.
    rounded = estimates.estimate(planned(model_dir, tmp_path / "a", "dtype=bf16"))
    assert rounded.state == pytest.approx(12 * whole + 2 * whole, rel=1e-2)  # a leaf each
    overrides = ("frozen_modules=[tok_embeddings]", "distillation.weight=0.5")
    cfg = make_config(model_dir, tmp_path / "b", *overrides)
    cfg.optimizer = {"_component_": "torch.optim.SGD", "lr": 0.1}
    need = estimates.estimate(TrainingRun.of(RunConfig.parse(cfg)))
    assert need.state == 4 * whole + 4 * whole + effective  # latents and teacher


def test_gradients_of_earlier_micro_batches_are_counted(model_dir, tmp_path):
    layer = 64 * (2 * 64 + 2 * 32) + 3 * 64 * 96 + 2 * 64
    gradients = 4 * (SHAPE["num_layers"] * layer + 264 * 64 + 64)
    needs = []
    for steps in (1, 2):
        options = (f"gradient_accumulation_steps={steps}", "batch_size=64", "dataset.num=256")
        needs.append(estimates.estimate(planned(model_dir, tmp_path / "a", *options)).activations)
    assert needs[1] - needs[0] == gradients


def test_several_ranks_share_the_state_and_gather_blocks(model_dir, tmp_path):
    need = estimates.estimate(planned(model_dir, tmp_path / "a"))
    outside, block = 264 * 64 + 64, 64 * (2 * 64 + 2 * 32) + 3 * 64 * 96 + 2 * 64
    # Weights outside the blocks, two blocks, and the gradients of one part of these.
    assert need.gathered_by_several == 4 * (outside + 2 * block) + 4 * (outside + block)
    assert need.on(1) == need.peak
    assert need.on(4) == need.state / 4 + need.gathered_by_several + need.activations


@pytest.mark.parametrize(("weight", "models"), [(0.0, 1), (1.0, 2)])
def test_several_ranks_keep_logits(model_dir, tmp_path, monkeypatch, weight, models):
    logits = 4 * 4 * 16 * 264
    monkeypatch.setattr(runs, "_SMALL_LOGITS", logits - 1)
    run = planned(model_dir, tmp_path / "a", f"distillation.weight={weight}")
    assert (run.drops_logits, run.kept_logits) == ("at_once", logits)
    need = estimates.estimate(run)
    shared = need.state / 4 + need.gathered_by_several + need.activations
    assert need.on(4) == shared + (models + 1) * logits  # and their gradients
    monkeypatch.setattr(runs, "_LARGE_LOGITS", logits - 1)
    assert planned(model_dir, tmp_path / "a").kept_logits == 0


def test_the_operations_are_six_per_weight_and_token(model_dir, tmp_path):
    decided = planned(model_dir, tmp_path / "run", "gradient_accumulation_steps=2")
    tokens = decided.data.sequences_per_step * 16
    linears = SHAPE["num_layers"] * (64 * (2 * 64 + 2 * 32) + 3 * 64 * 96) + 264 * 64
    products = 6 * linears * tokens  # forward, gradient of the input, gradient of the weight
    assert estimates.estimate(decided).flops == products


def test_recomputing_activations_saves_memory_and_costs_operations(model_dir, tmp_path):
    size = ("dataset.seq_len=64", "batch_size=8", "dataset.num=64")
    plain = estimates.estimate(planned(model_dir, tmp_path / "run", *size))
    options = (*size, "enable_activation_checkpointing=True")
    again = estimates.estimate(planned(model_dir, tmp_path / "run", *options))
    assert again.activations < plain.activations and again.flops > plain.flops
    assert again.state == plain.state


def test_what_dropped_logits_save_and_cost(model_dir, tmp_path, monkeypatch):
    options = ("distillation.weight=1", "dataset.seq_len=64", "dataset.num=64", "batch_size=8")
    needs = {}
    for drop in (None, "recompute", "at_once"):
        monkeypatch.setattr(runs.TrainingRun, "drops_logits", drop)
        needs[drop] = estimates.estimate(planned(model_dir, tmp_path / "run", *options))
    kept, again, once = needs.values()
    tokens = 8 * 64
    for dropped in (again, once):
        assert kept.activations - dropped.activations > 4 * 264 * tokens  # logits of a model
    assert again.flops - kept.flops == 2 * 2 * 264 * 64 * tokens  # one more head of each
    assert once.flops == kept.flops


def test_a_step_that_does_not_fit_is_named(model_dir, tmp_path, monkeypatch):
    decided = planned(model_dir, tmp_path / "run")
    assert "too little" not in estimates.describe_costs(decided)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1000))
    assert "kB (too little: lower batch_size)" in estimates.describe_costs(decided)
    absent = estimates.describe_costs(decided, has_device=False)
    assert "; 1 GPU of 80 GB" in absent and "time" not in absent and "several GPUs share" in absent
