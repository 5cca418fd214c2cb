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

from hestia_tune.config.run_config import (
    RunConfig,
    config_path,
    load_config,
    overridden,
    packaged_configs,
    text_of,
)
from hestia_tune.errors import InputError
from hestia_tune.models.loading import build_on_meta, check_model_options, modules_by_name
from hestia_tune.qat.linear import quantized_linears

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
# Configs that are no run by themselves: others build on them, or are overlaid by them.
PARTS = ("2bit", "base", "distil", "evening")
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
    assert set(packaged_configs()) == {*EXPECTED, *PARTS}


@pytest.mark.parametrize(
    ("name", "overlay"),
    [(name, "") for name in EXPECTED]
    + [
        (name, overlay)
        for name in ("demo", "llama3_2_1b", "qwen3_0_6b", "smollm3_3b")
        for overlay in ("+distil", "+evening")
    ]
    + [(name, o) for name in ("demo", "llama3_2_1b") for o in ("+2bit", "+evening+2bit")],
)
def test_config_builds_at_its_real_size(name, overlay, tmp_path, monkeypatch):
    blocks, parameters, group_size = EXPECTED[name]
    cfg = load_config(name + overlay)
    if name in FOLDERS:
        pytest.importorskip("transformers")
        (tmp_path / "config.json").write_text(json.dumps(FOLDERS[name]))
        cfg.model.path = str(tmp_path)
    options = RunConfig.parse(cfg)
    quantizer = config.instantiate(OmegaConf.create(options.quantizer))
    model = build_on_meta(options.model, quantizer)
    layers = quantized_linears(model)
    assert len(layers) == 7 * blocks
    assert all(re.match(r"(model\.)?layers\.", name) for name in layers)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    check_model_options(options, model)
    is_demo = parameters is None
    is_evening, is_two_bit = "+evening" in overlay, "+2bit" in overlay
    has_teacher = is_demo or is_evening or overlay == "+distil"
    assert options.distillation.weight == has_teacher
    if is_evening:
        assert modules_by_name(model)[options.frozen_modules[0]] is model.tok_embeddings
        assert options.reconstruction == "auto" and options.sensitivity is None
        schedule = options.schedule
        assert {schedule.tau_init, schedule.rho, schedule.alpha} == {0}
        assert options.reconstruct.kl_blocks >= (0 if is_demo else 8)
        assert options.max_steps == 300
    else:  # the paper's Appendix B; the pressure of the demo, a short run, rises in less time
        assert options.frozen_modules is None and options.reconstruction is None
        rho = 0.1 if name == "demo" else 0.2
        assert (options.schedule.rho, options.schedule.alpha) == (rho, 0.4)
        assert options.schedule.tau_init == 0.3 and options.sensitivity == "auto"
    if group_size is None:
        assert quantizer.method.key() == "fairy2i, num_stages=2, granularity=tensor"
    else:
        learned = ", scale=learned, start=least_squares" if is_evening else ""
        kind = "two_bit" if is_two_bit else "ternary"
        assert quantizer.method.key() == f"{kind}, group_size={group_size}{learned}"
    if not is_demo:
        scales = sum(p.numel() for layer in layers.values() for p in layer.method_parameters())
        assert sum(p.numel() for p in model.parameters()) - scales == parameters
        assert options.optimizer["lr"] == (1e-3 if is_evening else 1.5e-3)
        assert options.optimizer["weight_decay"] == (0.0 if is_evening else 0.1)
        # One step is 256 sequences of 1024 tokens, on 1, 8 and 16 GPUs or on two CPUs.
        assert options.global_batch_size == 256
        assert options.batch_size * options.gradient_accumulation_steps == 256
        for ranks in (2, 8) if name == "smollm2_135m" else (2, 8, 16):
            monkeypatch.setenv("WORLD_SIZE", str(ranks))
            options = RunConfig.parse(cfg)
            assert options.batch_size * options.gradient_accumulation_steps * ranks == 256
        assert options.dataset["seq_len"] == 1024


@pytest.mark.parametrize("name", EXPECTED)
def test_config_opens_with_its_commands(name):
    comment = [line for line in config_path(name).read_text().splitlines() if line[:1] == "#"]
    assert any(f"tune run hestia_qat --config {name}" in line for line in comment)


def test_unknown_names_are_errors_that_list_the_configs():
    for name in ("none.yaml", "demo+none", "none+distil"):
        with pytest.raises(InputError, match="packaged configs: 2bit, base, demo, demo_fairy2i, "):
            load_config(name)


def test_a_path_may_have_a_plus(tmp_path):
    (tmp_path / "mine+1.yaml").write_text("a: 1")
    assert load_config(str(tmp_path / "mine+1.yaml")) == {"a": 1}


def test_overrides_set_and_delete_options():
    base = {"a": 1, "b": {"_component_": "x", "c": 2}, "d": {"e": [1]}, "f": "${a}"}
    config = OmegaConf.create(base)
    overrides = ["a=1e-3", "b=y", "b.g=[1,2]", "d.h.i=null", "~d.e", "j=${a}"]
    found = overridden(config, overrides)
    expected = {"a": 0.001, "b": {"_component_": "y", "c": 2, "g": [1, 2]}}
    assert found == expected | {"d": {"h": {"i": None}}, "f": 0.001, "j": 0.001}
    assert config == base | {"f": 1}
    assert overridden(config, ["b=null"]).b is None
    assert "b" not in overridden(config, ["~b"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("a", "an override must be KEY=VALUE or ~KEY; got 'a'"),
        ("=1", "an override must be KEY=VALUE or ~KEY"),
        ("~a=1", "an override must be KEY=VALUE or ~KEY"),
        ("~bc", "~bc: the config has no such key"),
        ("~section.keyy", "~section.keyy: the config has no such key; did you mean key?"),
        ("a=[1", "a=\\[1: .*; check the override"),
    ],
)
def test_wrong_overrides_are_errors_that_name_the_override(override, message):
    with pytest.raises(InputError, match=message):
        overridden(OmegaConf.create({"a": 1, "section": {"key": 1}}), [override])


def test_a_config_may_have_a_base(tmp_path):
    base, mine = tmp_path / "base.yaml", tmp_path / "mine.yaml"
    base.write_text("base: demo\noptimizer: {lr: 1.0}\nseed: 5")
    mine.write_text(f"base: {base}\nseed: 6\ndataset_val: null")
    whole = load_config(str(mine))
    expected = OmegaConf.load(config_path("demo"))
    expected.optimizer.lr, expected.seed, expected.dataset_val = 1.0, 6, None
    assert whole == expected
    with pytest.raises(InputError, match="no config named 'nothing'"):
        base.write_text("base: nothing")
        load_config(str(mine))


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [1", "mine.yaml cannot be read as YAML: "), ("- 1", "must be a mapping of options")],
)
def test_files_that_hold_no_config(tmp_path, text, message):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        load_config(str(tmp_path / "mine.yaml"))


def test_one_config_is_laid_over_another(tmp_path):
    folder = tmp_path / "+"
    folder.mkdir()
    first, over = folder / "first.yaml", folder / "over.yaml"
    over.write_text("quantizer: {group_size: null, scale: learned}\nnew: {key: [1]}\nmodel: null")
    first.write_text(f"new: null\n{config_path('demo').read_text()}")
    merged = load_config(f"{first}+{over}")
    expected = OmegaConf.load(config_path("demo"))
    del expected["model"]
    expected.quantizer = {"_component_": "hestia_tune.HestiaQATQuantizer", "scale": "learned"}
    assert merged == OmegaConf.merge(expected, {"new": {"key": [1]}})


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(arguments, capture_output=True, text=True, cwd=cwd)


@pytest.mark.parametrize("name", [*EXPECTED, "demo+evening", "demo+distil"])
def test_a_printed_config_differs_only_in_its_output_and_replaces_no_run(name, tmp_path):
    copy = tmp_path / "copy.yaml"
    copy.write_text(text_of(name))
    printed, original = load_config(str(copy)), load_config(name)
    assert printed.output_dir == f"{original.output_dir}_copy"
    assert not printed.get("overwrite_output")
    for keys in (printed, original):
        keys.pop("output_dir"), keys.pop("overwrite_output", None)
    assert printed == original
    if "+" not in name:  # comments are kept
        lines, copy_lines = config_path(name).read_text().splitlines(), text_of(name).splitlines()
        own = ("output_dir", "overwrite_output")
        copied, kept = ([x for x in y if not x.startswith(own)] for y in (copy_lines, lines))
        assert copied == kept


@pytest.mark.slow
def test_listing_and_printing(tmp_path):
    listed = command(sys.executable, "-m", "hestia_tune", "configs", cwd=tmp_path)
    recipes, configs = listed.stdout.split("configs:\n")
    configs, overlays = configs.split("overlays, for --config CONFIG+OVERLAY:\n")
    assert [line.split()[0] for line in configs.splitlines()] == sorted(EXPECTED)
    assert [line.split()[0] for line in overlays.splitlines()] == ["2bit", "distil", "evening"]
    names = [line.split()[0] for line in recipes.splitlines()[1:]]
    assert names == sorted(path.stem for path in (REPOSITORY / "recipes").glob("*.py"))
    assert all(len(line.split()) > 2 for line in listed.stdout.splitlines() if line[:1] == " ")
    printed = command(sys.executable, "-m", "hestia_tune", "configs", "llama3_2_1b", cwd=tmp_path)
    assert printed.stdout == text_of("llama3_2_1b")
    unknown = command(sys.executable, "-m", "hestia_tune", "configs", "llama", cwd=tmp_path)
    assert unknown.returncode == 1 and "no config named 'llama'" in unknown.stderr
