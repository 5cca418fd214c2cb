"""Test the options that follow the machine: device, dtype, compile, workers, sequences per step."""

import logging
import shutil

import pytest
import torch
from tiny import logged, make_config, run

from hestia_tune.config import run_config
from hestia_tune.config.run_config import RunConfig, load_config
from hestia_tune.errors import InputError
from hestia_tune.files import read_json

AUTO = ("device=auto", "dtype=auto", "compile=auto", "num_workers=auto", "optimizer.fused=auto")


def parsed(*options, model_dir="none", folder="out"):
    return RunConfig.parse(make_config(model_dir, folder, *options))


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that pretends a GPU, with or without products in bfloat16."""

    def pretend(has_bf16=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated=True: has_bf16)

    return pretend


@pytest.fixture
def cpu(monkeypatch):
    """Return a function that pretends a processor, and compilers."""

    def pretend(is_slow=False, has_onednn=True, compilers=("g++",)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(run_config, "is_slow_in_bf16", lambda: is_slow)
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_onednn)
        monkeypatch.setattr(shutil, "which", lambda name: name if name in compilers else None)

    return pretend


def test_a_gpu_is_taken_if_there_is_one(gpu, monkeypatch):
    gpu()
    monkeypatch.setattr(run_config, "can_compile", lambda device: device == "cuda")
    config = parsed(*AUTO)
    assert (config.device, config.dtype, config.compile) == ("cuda", "bf16", True)
    assert (config.num_workers, config.optimizer["fused"]) == (2, True)
    assert parsed("device=auto", "dtype=fp32").dtype == "fp32"
    assert parsed("device=cpu", "num_workers=auto").num_workers == 0
    gpu(has_bf16=False)
    assert parsed(*AUTO).dtype == "fp32"


def test_a_gpu_that_is_not_here_is_one_of_today(cpu):
    """A config for another machine, on a laptop without a fast dtype and without compilers."""
    cpu(is_slow=True, compilers=())
    config = parsed("device=cuda", *AUTO[1:])
    assert (config.device, config.dtype, config.compile) == ("cuda", "bf16", True)
    assert config.chosen["dtype"] == "bf16" and config.num_workers == 2


@pytest.mark.parametrize(
    ("is_slow", "has_onednn", "compilers", "dtype", "compiles"),
    [
        (False, True, ("g++",), "bf16", True),
        (True, True, ("clang++",), "fp32", True),
        (False, False, (), "fp32", False),
    ],
)
def test_a_processor_decides(cpu, monkeypatch, is_slow, has_onednn, compilers, dtype, compiles):
    monkeypatch.delenv("CXX", raising=False)
    cpu(is_slow, has_onednn, compilers)
    config = parsed(*AUTO)
    assert (config.device, config.dtype, config.compile) == ("cpu", dtype, compiles)
    assert config.num_workers == 0
    assert config.chosen.keys() == {
        *("device", "dtype", "compile", "num_workers", "optimizer.fused"),
    }


def test_values_that_are_given_stay():
    given = ("device=cpu", "dtype=fp32", "num_workers=1", "compile=False", "optimizer.fused=False")
    config = parsed(*given)
    assert (config.num_workers, config.compile, config.optimizer["fused"]) == (1, False, False)
    assert config.chosen == {}
    assert "fused" not in parsed().optimizer  # PyTorch's own default


@pytest.mark.parametrize("name", ["torch.optim.Adadelta", "torch.optim.LBFGS"])
def test_an_optimizer_without_a_fused_kernel(name):
    config = parsed(f"optimizer._component_={name}", "optimizer.fused=auto")
    assert "fused" not in config.optimizer and "optimizer.fused" not in config.chosen


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("device=mps", "FSDP2.*does not run on Apple's GPU; leave device out"),
        ("device=xpu", "device must be auto, cpu, cuda or cuda:NUMBER; got xpu"),
        ("dtype=fp16", "dtype must be one of bf16, fp32, auto; got fp16"),
        ("compile=maybe", "compile must be true, false or one of auto; got maybe"),
        ("num_workers=many", "num_workers must be a number or one of auto; got many"),
        ("num_workers=-1", "num_workers must be at least 0"),
        ("global_batch_size=0", "global_batch_size must be at least 1"),
    ],
)
def test_wrong_values(option, message):
    with pytest.raises(InputError, match=message):
        parsed(option)


@pytest.mark.parametrize("ranks", [1, 2, 8, 16])
@pytest.mark.parametrize("name", ["llama3_2_1b", "llama3_2_3b+evening"])
def test_the_sequences_of_a_step_do_not_depend_on_the_ranks(monkeypatch, name, ranks):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    config = RunConfig.parse(load_config(name))
    assert config.batch_size * config.gradient_accumulation_steps * ranks == 256
    half = config.changed(batch_size=config.batch_size // 2)
    assert half.gradient_accumulation_steps == 2 * config.gradient_accumulation_steps
    free = config.changed(global_batch_size=None, gradient_accumulation_steps=3)
    assert free.changed(batch_size=1).gradient_accumulation_steps == 3


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (1, ("global_batch_size=256", "batch_size=24"), "set global_batch_size=240, "
         "global_batch_size=264, batch_size=16 or batch_size=32"),
        (8, ("global_batch_size=16", "batch_size=4"), "batch_size 4 x 8 ranks; got 16; set "
         "global_batch_size=32 or batch_size=2"),
        (3, ("global_batch_size=16", "batch_size=2"), "global_batch_size=12, global_batch_size=18 "
         "or another number of ranks"),
        (1, ("global_batch_size=8", "gradient_accumulation_steps=4"), "must be 2, because "
         "global_batch_size is 8 .*; got 4; leave gradient_accumulation_steps out"),
    ],
)  # fmt: skip
def test_steps_that_cannot_be_divided(monkeypatch, ranks, options, message):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(InputError, match=message):
        parsed(*options)


def test_both_ways_to_give_a_step_are_the_same_run(model_dir, tmp_path):
    options = ("max_steps=2", "dataset_val=null")
    steps = ("gradient_accumulation_steps=2", "batch_size=4")
    run(make_config(model_dir, tmp_path / "steps", *options, *steps))
    whole = ("global_batch_size=8", "batch_size=4")
    run(make_config(model_dir, tmp_path / "whole", *options, *whole))
    run(make_config(model_dir, tmp_path / "both", *options, *whole, *steps))
    losses = [logged(tmp_path / name, "loss") for name in ("steps", "whole", "both")]
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 2


def test_results_and_checkpoints_hold_what_was_chosen(model_dir, tmp_path, cpu, caplog):
    cpu(is_slow=True, compilers=())
    caplog.set_level(logging.INFO, "hestia_tune")
    options = ("max_steps=2", "dataset_val=null", "save_every_n_steps=1", *AUTO)
    cfg = make_config(model_dir, tmp_path, *options, "global_batch_size=4")
    run(cfg)
    chosen = "device: cpu, dtype: fp32, compile: False, num_workers: 0, optimizer.fused: True"
    assert caplog.messages.count(f"{chosen} (auto)") <= 1  # once a process
    expected = {"device": "cpu", "dtype": "fp32", "compile": False, "num_workers": 0}
    expected |= {"batch_size": 4, "gradient_accumulation_steps": 1, "ranks": 1}
    assert read_json(tmp_path / "results.json")["machine"] == expected
    meta = read_json(tmp_path / "checkpoints" / "step_2" / "meta.json")
    assert meta["machine"] == expected
    assert meta["identity"]["dtype"] == "fp32" and meta["identity"]["optimizer"]["fused"] is True


def test_a_run_that_resumes_elsewhere_says_what_differs(model_dir, tmp_path, cpu, caplog):
    caplog.set_level(logging.INFO, "hestia_tune")
    options = ("max_steps=3", "dataset_val=null", "save_every_n_steps=1", "dtype=auto")
    options += ("optimizer.fused=auto", "global_batch_size=4")
    cpu(is_slow=True)
    run(make_config(model_dir, tmp_path, *options))
    shutil.rmtree(tmp_path / "checkpoints" / "step_3")
    options += ("resume_from_checkpoint=True",)
    cpu(is_slow=False)
    with pytest.raises(InputError, match="has dtype fp32, this run bf16; set dtype=fp32, or"):
        run(make_config(model_dir, tmp_path, *options))
    run(make_config(model_dir, tmp_path, *options, "dtype=fp32", "batch_size=2"))
    odd = "batch_size 4, now 2; gradient_accumulation_steps 1, now 2"
    assert f"the checkpoint is from a run with {odd}" in caplog.messages
