"""Test that every wrong config ends before training, with one line and exit code 1."""

import json
import os
import subprocess
import sys

import pytest
import torch
from ranks import run_forked
from tiny import NUM_QUANTIZED, make_config, make_model_dir, run, tune_run, write_config

from hestia_tune.commands.launch import main
from hestia_tune.commands.qat import run_qat
from hestia_tune.config.run_config import RunConfig
from hestia_tune.config.section import describe
from hestia_tune.sensitivity import SensitivityArtifact


def launch(monkeypatch, capsys, config: str, *overrides: str) -> tuple[int, str]:
    """Run ``hestia_qat --config CONFIG OVERRIDES``; return (exit code, its line on stderr)."""
    monkeypatch.setattr(sys, "argv", ["hestia_qat", "--config", config, *overrides])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    code = main(run_qat, "hestia_qat")
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("hestia_qat: error:")]
    return code, "\n".join(lines)


def foreign_layers(folder):
    names = [f"layers.{i}.mlp.w1" for i in range(3)]
    return SensitivityArtifact(
        traces=dict.fromkeys(names, 1.0),
        standard_errors=dict.fromkeys(names, 0.1),
        scores=dict.fromkeys(names, 0.5),
        model_fingerprint="sha256:0",
    )


CASES = {
    # override -> text that the line must contain
    "quantiser._component_=x": "unknown key quantiser; did you mean quantizer",
    "schedule.roh=0.2": "unknown key schedule.roh; did you mean rho",
    "batch_size=four": "batch_size must be a whole number; got 'four'",
    "batch_size=0": "batch_size must be at least 1; got 0",
    "compile=maybe": "compile must be true, false or one of auto; got maybe",
    "dtype=fp16": "dtype must be one of bf16, fp32, auto; got fp16",
    "quantizer.group_size=48": "group_size 48 does not divide in_features 64 of layers.0",
    "quantizer.group_size=-1": "group_size must be a positive int",
    "quantizer.group_size=rows": "group_size must be a positive int",
    "quantizer.groupsize=32": "groupsize",
    "quantizer._component_=tiny.SequenceDataset": "SequenceDataset",
    "quantizer.include=[blocks.*]": "include pattern 'blocks.*' matches no linear of the model",
    "quantizer.include=layers.*": "include must be a list of patterns",
    "schedule.rho=1.5": "schedule.rho must be in [0, 1]; got 1.5",
    "schedule.rho=half": "schedule.rho must be a number; got 'half'",
    "schedule.alpha=9": "schedule.alpha must be in [-4, 4]; got 9",
    "schedule.tau_init=-1": "schedule.tau_init must be in [0, 100]; got -1",
    "sensitivity=/nowhere/sensitivity.json": "sensitivity file /nowhere/sensitivity.json does not",
    "sensitivity=3": "sensitivity file 3 does not exist",
    "checkpointer.checkpoint_dir=/nowhere": "/nowhere",
    "checkpointer.checkpoint_files=[other.safetensors]": "other.safetensors",
    "checkpointer._component_=torchtune.training.FullModelMetaCheckpointer": "must be torchtune",
    "model.num_layers=3": "model.num_layers is 3, ",
    "model.intermediate_dim=128": "config.json has intermediate_size 96; use the file's value",
    "tokenizer.path=/nowhere": "/nowhere/tokenizer.json does not exist; check tokenizer.path",
    "tokenizer.eos_token=<nope>": "tokenizer.eos_token '<nope>' is not in",
    "dataset.num=0": "dataset could not be loaded: it has no samples",
    "dataset.num=3": "dataset has 3 samples, one step takes 4",
    "dataset._component_=tiny.no_such_dataset": "dataset could not be loaded",
    "dataset_val.num=0": "dataset_val could not be loaded",
    "output_dir=/proc/nowhere": "output_dir /proc/nowhere cannot be written",
    "resume_from_checkpoint=True": "no complete checkpoint in",
    "tensor_parallel_dim=2": "tensor_parallel_dim=2 is not supported",
    "optimizer_in_bwd=True": "optimizer_in_bwd=True is not supported",
    "fsdp_cpu_offload=True": "fsdp_cpu_offload needs device cuda",
    "lr_scheduler.decay_ratio=0.95": "warmup_ratio + decay_ratio must be at most 1",
    "optimizer.lrr=1": "lrr",
    "loss={_component_: hestia_tune.losses.CEWithChunkedOutputLoss, ignore_index: 5}": "index -100",
}


@pytest.mark.parametrize("override", CASES)
def test_one_line_and_exit_code_1(model_dir, tmp_path, monkeypatch, capsys, override):
    config = write_config(make_config(model_dir, tmp_path / "run"), tmp_path / "config.yaml")
    code, line = launch(monkeypatch, capsys, config, override)
    assert code == 1
    assert line.count("\n") == 0 and CASES[override] in line, line
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not torch.distributed.is_initialized()


def test_foreign_sensitivity_files(model_dir, tmp_path, monkeypatch, capsys):
    config = write_config(make_config(model_dir, tmp_path / "run"), tmp_path / "config.yaml")
    path = tmp_path / "sensitivity.json"
    foreign_layers(tmp_path).save(path)
    code, line = launch(monkeypatch, capsys, config, f"sensitivity={path}")
    assert code == 1 and "and the model differ in layers.0.attn.k_proj" in line

    document = json.loads(path.read_text())
    entry = document["layers"]["layers.0.mlp.w1"]
    projections = [f"attn.{p}_proj" for p in ("q", "k", "v", "output")]
    projections += [f"mlp.w{i}" for i in (1, 2, 3)]
    document["layers"] = {f"layers.{i}.{p}": entry for i in range(2) for p in projections}
    assert len(document["layers"]) == NUM_QUANTIZED
    path.write_text(json.dumps(document))
    code, line = launch(monkeypatch, capsys, config, f"sensitivity={path}")
    assert code == 1 and "computed for other weights" in line

    path.write_text(path.read_text()[:-40])
    code, line = launch(monkeypatch, capsys, config, f"sensitivity={path}")
    assert code == 1 and "is not valid" in line


def test_nan_in_the_pretrained_weights(tmp_path, monkeypatch, capsys):
    from safetensors.torch import load_file, save_file

    folder = make_model_dir(tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(state, folder / "model.safetensors")
    config = write_config(make_config(folder, tmp_path / "run"), tmp_path / "config.yaml")
    code, line = launch(monkeypatch, capsys, config)
    assert code == 1 and "must be finite; model.layers.1.mlp.up_proj.weight in" in line


def test_a_linear_of_zeros_in_the_pretrained_weights(tmp_path, monkeypatch, capsys):
    from safetensors.torch import load_file, save_file

    folder = make_model_dir(tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"].zero_()
    save_file(state, folder / "model.safetensors")
    config = write_config(make_config(folder, tmp_path / "run"), tmp_path / "config.yaml")
    code, line = launch(monkeypatch, capsys, config)
    assert code == 1 and "layers.1.mlp.w3 has only zeros in the pretrained weights" in line
    assert launch(monkeypatch, capsys, config, "quantizer.exclude=[layers.1.mlp.w3]") == (0, "")


@pytest.mark.parametrize("section", ["model", "quantizer", "output_dir", "dataset"])
def test_missing_sections(model_dir, tmp_path, monkeypatch, capsys, section):
    cfg = make_config(model_dir, "/unused")
    cfg.checkpointer.output_dir = cfg.metric_logger.log_dir = "/unused"
    del cfg[section]
    config = write_config(cfg, tmp_path / "config.yaml")
    code, line = launch(monkeypatch, capsys, config)
    assert code == 1 and f"the config lacks {section}" in line


def test_unknown_config_lists_the_packaged_ones(monkeypatch, capsys):
    code, line = launch(monkeypatch, capsys, "llama3_2_1bb")
    assert code == 1
    assert "no config named 'llama3_2_1bb'" in line and "did you mean llama3_2_1b?" in line
    assert "demo" in line and "smollm2_135m" in line


def test_from_the_command_line(model_dir, tmp_path):
    """`tune run` on two ranks prints one line from rank 0 and returns an exit code above 0."""
    config = write_config(make_config(model_dir, tmp_path / "run"), tmp_path / "config.yaml")
    done = tune_run("--config", config, "model.num_layers=3", torchrun=("--nproc_per_node", "2"))
    assert done.returncode != 0
    lines = [x for x in done.stderr.splitlines() if "hestia_qat: error:" in x]
    assert len(lines) == 1 and "has num_hidden_layers 2" in lines[0]


def test_the_notices_of_torchtune_need_log_level_debug(model_dir, tmp_path):
    few = ("max_steps=1", "dataset_val=null", "sensitivity=null", "profiler.enabled=False")
    for level in ("info", "debug"):
        config = make_config(model_dir, tmp_path / level, f"log_level={level}", *few)
        done = run_forked("--config", write_config(config, tmp_path / f"{level}.yaml"))
        assert done.returncode == 0, done.stderr
        assert ("Profiler config after instantiation" in done.stderr) == (level == "debug")


def test_commands_flush_denormal_numbers_in_all_threads():
    """Otherwise the formulas of low temperatures are several times slower on many processors."""
    code = """
import sys
from hestia_tune.commands.launch import main

def count(config):
    import torch
    products = torch.full((4_000_000,), 1e-30) * torch.full((4_000_000,), 1e-9)
    return 1 + int(products.count_nonzero()) if torch.get_num_threads() == 2 else -1

sys.argv = ["hestia_qat", "--config", "demo"]
print(main(count, "hestia_qat") - 1)
"""
    threads = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], env=threads, capture_output=True, text=True)
    assert done.stdout.split() == ["0"], done.stderr


def test_before_the_process_group_exists_each_rank_prints_its_error(monkeypatch, capsys):
    """torchrun ends all ranks as soon as one exits, so the first rank may not print in time."""
    monkeypatch.setattr(sys, "argv", ["hestia_qat", "--config", "llama3_2_1bb"])
    monkeypatch.setenv("RANK", "1")
    assert main(run_qat, "hestia_qat") == 1
    assert "hestia_qat: error: [rank 1] no config named" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.rope_base=500000", "model.rope_base is 500000, .*config.json has rope_theta 10000"),
        ("model.norm_eps=1e-6", "model.norm_eps is 1e-06, .* has rms_norm_eps 1e-05"),
        (
            "model.tie_word_embeddings=False",
            "the output head in .* is the embedding; set model.tie",
        ),
        ("model.num_heads=8", "model.num_heads is 8, .* has num_attention_heads 4"),
    ],
)
def test_a_model_section_that_contradicts_the_folder(model_dir, tmp_path, override, message):
    with pytest.raises(ValueError, match=message):
        run(make_config(model_dir, tmp_path, override))


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])  # transformers 4 and 5
def test_the_plain_llama_refuses_scaled_positions(tmp_path, key):
    folder = make_model_dir(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config[key] = {"rope_type": "llama3", "factor": 32.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="model.rope_scaling is None, .*'factor': 32.0"):
        run(make_config(folder, tmp_path))


def test_weights_of_another_shape_than_their_own_config_says(tmp_path):
    folder = make_model_dir(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(ValueError, match=r"mlp.w1.weight is \(96, 64\) instead of \(128, 64\)"):
        run(make_config(folder, tmp_path / "run", "model.intermediate_dim=128"))


def test_a_tokenizer_with_more_ids_than_the_model(tmp_path):
    folder = make_model_dir(tmp_path / "model", vocab_size=200)
    message = "the tokenizer has 258 ids, but the model has 200 embeddings"
    with pytest.raises(ValueError, match=message):
        run(make_config(folder, tmp_path / "run", "model.vocab_size=200"))


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("len(run)", TypeError),
        ("int('x')", ValueError),
        ("run.no", AttributeError),
        ("open('/nowhere')", FileNotFoundError),
    ],
)
def test_a_mistake_in_the_code_keeps_its_traceback(monkeypatch, operation, kind):
    """Only an InputError becomes one line. Any other error is a mistake in the code."""
    monkeypatch.setattr(sys, "argv", ["x", "--config", "demo"])
    with pytest.raises(kind):
        main(lambda run: eval(operation), "x")


def test_out_of_memory_names_the_remedy(monkeypatch, capsys):
    def run(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(sys, "argv", ["x", "--config", "demo"])
    assert main(run, "x") == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("x:")]
    assert line.startswith("x: error: out of memory (CUDA out of memory. Tried to allocate")
    assert "lower batch_size" in line and "enable_activation_checkpointing=True" in line


def test_help_lists_every_option(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", "--help"])
    assert main(lambda run: pytest.fail("it must not run"), "x") == 0
    text = capsys.readouterr().out
    for key, *_ in describe(RunConfig):
        assert f"\n  {key}\n" in text
    assert "\nschedule:\n  schedule.rho\n" in text
