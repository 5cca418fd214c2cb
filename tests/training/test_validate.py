"""Test ``python -m hestia_tune validate``: the same errors as a run, and no changed file."""

import pytest
import torch
from test_errors import CASES
from tiny import NUM_QUANTIZED, logged, make_config, run, write_config

from hestia_tune.__main__ import main
from hestia_tune.commands.qat import run_qat


def validate(monkeypatch, capsys, path, *overrides):
    """Run the command and return (exit code, stdout, the error)."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["python"])
    code = main(["validate", path, *overrides])
    assert not torch.distributed.is_initialized()
    out, err = capsys.readouterr()
    return code, out, "\n".join(x for x in err.splitlines() if x.startswith("validate: error:"))


@pytest.mark.parametrize("override", CASES)
def test_it_refuses_what_a_run_refuses(model_dir, tmp_path, monkeypatch, capsys, override):
    path = write_config(make_config(model_dir, tmp_path / "run"), tmp_path / "config.yaml")
    code, _, line = validate(monkeypatch, capsys, path, override)
    assert code == 1 and CASES[override] in line


def test_it_reports_all_problems_at_once(model_dir, tmp_path, monkeypatch, capsys):
    path = write_config(make_config(model_dir, tmp_path / "run"), tmp_path / "config.yaml")
    wrong = {
        "quantizer.group_size=48": "group_size 48 does not divide in_features 64",
        "optimizer.lrr=1": "did you mean lr?",
        "lr_scheduler.decay_ratio=0.95": "warmup_ratio + decay_ratio must be at most 1",
        "dataset.num=3": "dataset has 3 samples",
        "sensitivity=/nowhere/sensitivity.json": "/nowhere/sensitivity.json does not",
        "resume_from_checkpoint=True": "no complete checkpoint in",
    }
    code, _, lines = validate(monkeypatch, capsys, path, *wrong)
    # The sensitivity is compared with the layers of the model, which is not prepared here.
    seen = [text for text in wrong.values() if text in lines]
    assert code == 1 and len(lines.splitlines()) == len(seen) == len(wrong) - 1


def test_a_valid_config_changes_no_file(model_dir, tmp_path, monkeypatch, capsys):
    cfg = make_config(model_dir, tmp_path / "run", "max_steps=2")
    run(cfg)
    kept = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()
    }
    path = write_config(cfg, tmp_path / "config.yaml")
    code, _, line = validate(monkeypatch, capsys, path)
    assert code == 1 and "holds a run at step 2" in line
    code, out, line = validate(
        monkeypatch,
        capsys,
        path,
        "overwrite_output=True",
        "~dataset.num",
        "dataset._component_=hestia_tune.data.self_generated_dataset",
        "dataset.seq_len=8",
        "dataset.num_sequences=16",
        f"dataset.cache_dir={tmp_path / 'text'}",
    )
    assert (code, line) == (0, "")
    assert f"when the run begins, the model writes 16 sequences of 8 tokens into {tmp_path}" in out
    assert "the number of steps cannot be checked" in out
    # These options need a GPU, or results that a run computes or replaces first.
    more = ("overwrite_output=True", "device=cuda", "compile=True", "sensitivity=auto")
    more += ("optimizer.fused=True", "reconstruction=auto", "distillation.weight=1")
    more += ("enable_activation_checkpointing=True", "enable_activation_offloading=True")
    code, out, line = validate(monkeypatch, capsys, path, *more)
    assert (code, line) == (0, "")
    summary = f"valid: {NUM_QUANTIZED} linear layers become ternary, group_size=32; 2 steps of 4"
    assert summary in out
    assert ("device cuda: not here" in out) == (not torch.cuda.is_available())
    code, _, line = validate(monkeypatch, capsys, path, "resume_from_checkpoint=True", "seed=5")
    assert code == 1 and "the checkpoint to resume from has seed 3, this run 5" in line
    meta = tmp_path / "run" / "checkpoints" / "step_2" / "meta.json"
    text = meta.read_text()
    meta.write_text(text.replace('"world_size": 1', '"world_size": 2'))
    code, out, _ = validate(monkeypatch, capsys, path, "resume_from_checkpoint=True")
    assert code == 0 and "resuming a run of 2 processes: not checked here" in out
    meta.write_text(text)
    kept[meta] = meta.stat().st_mtime_ns
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert kept == {path: path.stat().st_mtime_ns for path in files if path.name != ".lock"}
    assert len(logged(tmp_path / "run")) == 2


def test_a_run_with_computed_results_can_resume(model_dir, tmp_path, monkeypatch, capsys):
    small = ("reconstruct.num_samples=4", "reconstruct.batch_size=4", "reconstruct.epochs=1")
    small += (
        "sensitivity_estimation.num_samples=4",
        "sensitivity_estimation.rank=2",
        "sensitivity_estimation.num_probes=2",
    )
    small += ("schedule.alpha=0.4", "distillation.weight=1", "max_steps=2")
    auto = ("reconstruction=auto", "sensitivity=auto")
    cfg = make_config(model_dir, tmp_path / "run", *small, *auto)
    assert run_qat(cfg) == 0
    path = write_config(cfg, tmp_path / "config.yaml")
    code, _, line = validate(monkeypatch, capsys, path, "resume_from_checkpoint=True")
    assert (code, line) == (0, "")
    more = ("resume_from_checkpoint=True", "distillation.weight=0.5")
    code, _, line = validate(monkeypatch, capsys, path, *more)
    assert code == 1 and "the checkpoint to resume from has distillation" in line


def test_metric_loggers_are_looked_up_and_not_started(model_dir, tmp_path, monkeypatch, capsys):
    path = write_config(make_config(model_dir, tmp_path / "run"), tmp_path / "config.yaml")
    logger = "metric_logger._component_=torchtune.training.metric_logging.WandBLogger"
    code, _, line = validate(monkeypatch, capsys, path, logger, "metric_logger.project=x")
    assert (code, line) == (0, "")
