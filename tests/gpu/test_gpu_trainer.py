"""Test Hugging Face's Trainer on two CUDA devices, real or simulated, as the documentation says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers")
from test_transformers import make_qwen3, python_of  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
DATA = """
import torch
rows = (torch.arange(16) * torch.arange(1, 17)[:, None]) % 128
dataset = [{"input_ids": row, "labels": row} for row in rows]
"""
TESTS = Path(__file__).parents[1]


def run(folder: Path, *command: str, **changes: str) -> dict:
    """Run the documentation's script, and return the losses and the bits of the hard model."""
    folder.mkdir()
    shape = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64}
    make_qwen3(**shape).save_pretrained(folder / "Qwen/Qwen3-0.6B")
    code = DATA + python_of("library.md", "Trainer")
    options = {"max_steps": "3", "logging_steps": "1", "save_steps": "3", "report_to": "[]"}
    options = ", ".join(f"{key}={value}" for key, value in (options | changes).items())
    (folder / "train.py").write_text(code.replace("max_steps=1000", options))
    paths = (str(TESTS), str(TESTS / "simulated_cuda"), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = (sys.executable, *command, "train.py")
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    run = folder / "runs" / "qwen3"
    log = json.loads((run / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    hard = load_file(run / "hard_model" / "model.safetensors")
    return {row["step"]: row["loss"] for row in log if "loss" in row}, hard


@pytest.mark.parametrize("changes", [{}, {"fsdp_offload_params": "true"}], ids=["", "offloaded"])
def test_accelerate_launch_trains_as_one_process(tmp_path, changes):
    expected, one = run(tmp_path / "one", use_cpu="True", per_device_train_batch_size="4")
    page = (TESTS.parent / "docs" / "library.md").read_text("utf-8")
    settings = page.partition("### On several GPUs")[2]
    settings = settings.partition("```yaml\n")[2].partition("```")[0]
    settings = settings.replace("num_processes: 8", "num_processes: 2")
    settings += "".join(f"  {key}: {value}\n" for key, value in changes.items())
    (tmp_path / "fsdp2.yaml").write_text(settings)
    (launch,) = re.findall("^accelerate launch --config_file fsdp2.yaml train.py$", page, re.M)
    words = launch.replace("accelerate launch", "-m accelerate.commands.launch").split()[:-1]
    words[words.index("fsdp2.yaml")] = str(tmp_path / "fsdp2.yaml")
    found, two = run(tmp_path / "two", *words, per_device_train_batch_size="2")
    assert found == pytest.approx(expected, rel=1e-2)
    assert (tmp_path / "two/runs/qwen3/checkpoint-3/pytorch_model_fsdp.bin").is_file()
    assert two.keys() == one.keys()
    for name, value in two.items():
        if name.endswith("_proj.weight"):
            assert all(len(group.abs().unique()) <= 2 for group in value.view(-1, 128))
