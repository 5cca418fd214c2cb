"""The packaged configs: every one builds at its real size, and the commands find them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torchtune import config

from hestia_tune.commands.configs import config_path, packaged_configs, resolve_argv
from hestia_tune.models.build import build_on_meta
from hestia_tune.modules import quantized_linears
from hestia_tune.training.options import Run

REPOSITORY = Path(__file__).parents[1]
# name -> (blocks, parameters, what the paper or the model's shape fixes)
EXPECTED = {
    "demo": (4, None, 128),
    "smollm2_135m": (30, 134_515_008, 64),
    "llama3_2_1b": (16, 1_235_814_400, 128),
    "llama3_2_3b": (28, 3_212_749_824, 128),
    "qwen2_5_0_5b": (24, 494_032_768, 128),
    "demo_fairy2i": (4, None, None),
    "qwen2_5_0_5b_fairy2i": (24, 494_032_768, None),
    "qwen3_0_6b": (28, 596_049_920, 128),
    "qwen3_1_7b": (28, 1_720_574_976, 128),
    "smollm3_3b": (36, 3_075_098_624, 128),
    "gemma3_1b": (26, 999_885_952, 128),
}
# config.json of those that come through transformers, as far as it is not the class's default.
QWEN3 = {"model_type": "qwen3", "num_hidden_layers": 28, "num_attention_heads": 16}
QWEN3 |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
QWEN3 |= {"tie_word_embeddings": True}
GEMMA3 = {"model_type": "gemma3_text", "num_hidden_layers": 26, "num_attention_heads": 4}
GEMMA3 |= {"num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144}
FOLDERS = {
    "qwen3_0_6b": QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072},
    "qwen3_1_7b": QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144},
    "smollm3_3b": {"model_type": "smollm3", "tie_word_embeddings": True},
    "gemma3_1b": GEMMA3 | {"hidden_size": 1152, "intermediate_size": 6912},
}


def test_every_packaged_config_is_expected():
    assert set(packaged_configs()) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_config_builds_at_its_real_size(name, tmp_path):
    blocks, parameters, group_size = EXPECTED[name]
    cfg = OmegaConf.load(config_path(name))
    if name in FOLDERS:
        pytest.importorskip("transformers")
        (tmp_path / "config.json").write_text(json.dumps(FOLDERS[name]))
        cfg.model.path = str(tmp_path)
    run = Run.of(cfg)
    cfg, options = run.cfg, run.options
    quantizer = config.instantiate(cfg.quantizer)
    if group_size is None:
        assert quantizer.method.key() == "fairy2i, num_stages=2, granularity=tensor"
    else:
        assert quantizer.method.group_size == group_size
    model = build_on_meta(cfg.model, quantizer)
    layers = quantized_linears(model)
    assert len(layers) == 7 * blocks
    assert all(re.match(r"(model\.)?layers\.", name) for name in layers)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    if parameters is not None:
        assert sum(p.numel() for p in model.parameters()) == parameters
        # The paper's Appendix B; one step is 256 sequences of 1024 on 8 GPUs.
        assert (options.schedule.rho, options.schedule.alpha) == (0.2, 0.4)
        assert options.schedule.tau_init == 0.3
        assert cfg.optimizer.lr == 1.5e-3 and cfg.optimizer.weight_decay == 0.1
        assert cfg.batch_size * cfg.gradient_accumulation_steps * 8 == 256
        assert cfg.dataset.seq_len == 1024


@pytest.mark.parametrize("name", EXPECTED)
def test_config_opens_with_its_commands(name):
    comment = [line for line in config_path(name).read_text().splitlines() if line[:1] == "#"]
    assert any(f"tune run hestia_qat --config {name}" in line for line in comment)


def test_names_and_paths_are_resolved(tmp_path):
    copied = tmp_path / "mine.yaml"
    copied.write_text("a: 1")
    assert resolve_argv(["x", "--config", str(copied), "a=2"]) == [
        "x",
        "--config",
        str(copied),
        "a=2",
    ]
    demo = str(packaged_configs()["demo"])
    assert resolve_argv(["x", "--config", "demo"]) == ["x", "--config", demo]
    assert resolve_argv(["x", "--config=demo"]) == ["x", f"--config={demo}"]
    with pytest.raises(ValueError, match="packaged configs: demo, demo_fairy2i, gemma3_1b, llama"):
        resolve_argv(["x", "--config", str(tmp_path / "none.yaml")])


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(arguments, capture_output=True, text=True, cwd=cwd)


def test_listing_and_printing(tmp_path):
    listed = command(sys.executable, "-m", "hestia_tune", "configs", cwd=tmp_path)
    recipes, configs = listed.stdout.split("configs:\n")
    assert [line.split()[0] for line in configs.splitlines()] == sorted(EXPECTED)
    names = [line.split()[0] for line in recipes.splitlines()[1:]]
    assert names == sorted(path.stem for path in (REPOSITORY / "recipes").glob("*.py"))
    assert all(len(line.split()) > 2 for line in listed.stdout.splitlines() if line[:1] == " ")
    printed = command(sys.executable, "-m", "hestia_tune", "configs", "llama3_2_1b", cwd=tmp_path)
    assert printed.stdout == config_path("llama3_2_1b").read_text()
    unknown = command(sys.executable, "-m", "hestia_tune", "configs", "llama", cwd=tmp_path)
    assert unknown.returncode == 1 and "no config named 'llama'" in unknown.stderr
