"""Test the plan for the memory of a GPU: its choices, their order, and its estimates."""

import pytest
from tiny import SHAPE, make_config

from hestia_tune.config.run_config import RunConfig
from hestia_tune.errors import InputError
from hestia_tune.memory import (
    EIGHT_BIT,
    FINAL,
    SENSITIVITY,
    TRAINING,
    WINDOW,
    changed,
    fit_to_memory,
    run_of_shapes,
)
from hestia_tune.qat import buckets
from hestia_tune.training import estimate as estimates
from hestia_tune.training.estimate import estimate

WIDE = {"num_layers": 8, "embed_dim": 128, "intermediate_dim": 512}
EVENING = ("reconstruction=auto", "reconstruct.kl_blocks=1000", "distillation.weight=1")


def config(*options, **shape):
    sizes = (f"model.{key}={value}" for key, value in (SHAPE | WIDE | shape).items())
    more = ("device=auto", "dtype=bf16", "batch_size=4", "global_batch_size=32")
    more += ("dataset.seq_len=64",)
    return RunConfig.parse(make_config("none", "out", *sizes, *more, *options))


@pytest.mark.parametrize("options", [(), ("distillation.weight=1",)])
@pytest.mark.parametrize("recomputes", [False, True])
def test_two_lengths_give_the_whole(options, recomputes):
    """Eight blocks, estimated from two and four, against a run of all eight."""
    plan = run_of_shapes(config(*options, f"enable_activation_checkpointing={recomputes}"))
    whole, short = estimate(plan), estimate(plan, (2, 4))
    assert short.peak == pytest.approx(whole.peak, rel=0.03)
    assert short.flops == pytest.approx(whole.flops, rel=0.01)


def test_less_memory_takes_more_savings(monkeypatch):
    """Every plan fits, and a smaller GPU never gets a larger micro-batch or fewer savings."""
    for module in (buckets, estimates):  # small beside the model, as for real models
        monkeypatch.setattr(module, "BUCKET_WEIGHTS", 2**12)
    whole = config()
    first = fit_to_memory(whole, 1)
    assert first.changes == {} and first.reasons == [] and first.recipe == "hestia_qat"
    seen, size = [], first.peak[TRAINING] / 0.9e9
    while True:
        try:
            plan = fit_to_memory(whole, size)
        except InputError as error:
            assert "too little for the stage 'training'" in str(error)
            break
        assert plan.peak[TRAINING] <= 0.9e9 * size and len(plan.reasons) == len(plan.changes)
        seen.append(plan.changes)
        size *= 0.88
    kinds = ("enable_activation_checkpointing", "optimizer._component_", "fsdp_cpu_offload")
    order = [next((k for k in reversed(kinds) if k in changes), "") for changes in seen]
    assert [*dict.fromkeys(order)] == ["", *kinds]
    assert any(changes.get("optimizer._component_") == EIGHT_BIT for changes in seen)
    final = changed(whole.changed(device="cuda"), seen[-1])
    assert final.fsdp_cpu_offload and final.enable_activation_checkpointing
    assert final.batch_size * final.gradient_accumulation_steps == 32


def test_a_reconstruction_without_the_training():
    """A frozen offloaded embedding is large: the blocks fit one by one, the training does not."""
    whole = config(*EVENING, "model.vocab_size=60000", "reconstruct.batch_size=4")
    large = fit_to_memory(whole, 10)
    assert large.recipe == "hestia_qat" and large.peak.keys() == {WINDOW, FINAL, TRAINING}
    size = large.peak[WINDOW] / 0.9e9 * 1.02
    small = fit_to_memory(whole, size)
    assert small.recipe == "hestia_reconstruct" and TRAINING not in small.peak
    assert "run hestia_reconstruct alone" in small.reasons[-1]
    assert max(small.peak.values()) <= 0.9e9 * size
    assert "options: " in small.table() or not small.changes


def test_the_sequences_of_a_step_stay_without_a_global_batch_size():
    options = ("global_batch_size=null", "gradient_accumulation_steps=2", "batch_size=32")
    whole = config(*options, "dataset.num=128")
    size = fit_to_memory(whole, 100).peak[TRAINING] / 0.9e9
    small = fit_to_memory(whole, 0.15 * size)
    assert small.changes["batch_size"] == 16
    final = changed(whole.changed(device="cuda"), small.changes)
    assert final.batch_size * final.gradient_accumulation_steps == 64
    assert len(small.reasons) == len(small.changes)


@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_a_sensitivity_that_bits_read_is_planned(alpha):
    """Where it does not fit, the errors of the weights choose the bits."""
    options = ("sensitivity=auto", f"schedule.alpha={alpha}", "bits.average=2.5")
    whole = config(*options, "model.vocab_size=60000")
    fits = fit_to_memory(whole, 100)
    assert fits.changes == {} and SENSITIVITY in fits.peak
    small = fit_to_memory(whole, fits.peak[SENSITIVITY] / 0.9e9 * 0.99)
    assert {"sensitivity": None, "bits.by": "error"}.items() <= small.changes.items()
    assert SENSITIVITY not in small.peak and len(small.reasons) == len(small.changes)
    final = changed(whole.changed(device="cuda"), small.changes)
    assert final.sensitivity is None and not final.bits.reads_sensitivity
    unread = config("sensitivity=auto", "schedule.alpha=0", "bits.average=2.5", "bits.by=error")
    assert SENSITIVITY not in fit_to_memory(unread, 100).peak


@pytest.mark.parametrize("size", [0, -1, float("nan"), float("inf")])
def test_sizes_that_are_none(size):
    with pytest.raises(InputError, match="must be a number of GB above 0"):
        fit_to_memory(config(), size)
