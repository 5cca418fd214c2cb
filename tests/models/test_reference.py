"""Tests that a model of torchtune equals transformers' model of the folder, or is refused."""

import json
import time

import pytest
import torch
from families import LLAMA3_ROPE, family_config, make_family
from hard_folders import edit_json
from safetensors.torch import load_file, save_file
from tiny import SHAPE, make_config, make_model_dir, run

from hestia_tune.commands.inspect import run_validate
from hestia_tune.config.run_config import RunConfig
from hestia_tune.errors import InputError
from hestia_tune.models import reference
from hestia_tune.models.decoder import model_on_meta
from hestia_tune.models.folder import SafetensorsFolder
from hestia_tune.models.loading import check_model_section, load_model, plain_on_meta
from hestia_tune.models.sources import folder_tensors, pretrained_folder
from hestia_tune.torchtune.models import check_architecture

transformers = pytest.importorskip("transformers")

LLAMA = {"_component_": "torchtune.models.llama3.llama3", "norm_eps": 1e-6} | SHAPE
LLAMA31 = {"_component_": "torchtune.models.llama3_1.llama3_1"} | SHAPE
MISTRAL = {"_component_": "torchtune.models.mistral.mistral", "norm_eps": 1e-6} | SHAPE
QWEN2 = {"_component_": "torchtune.models.qwen2.qwen2", "norm_eps": 1e-6} | SHAPE
OURS = {"_component_": "hestia_tune.models.llama", "norm_eps": 1e-6, "tie_word_embeddings": False}
ROUTES = {
    "llama": (LLAMA, "LLAMA3", "Llama"),
    "ours": (OURS | SHAPE, "LLAMA3", "Llama"),
    "mistral": (MISTRAL, "MISTRAL", "Mistral"),
    "qwen2": (QWEN2, "QWEN2", "Qwen2"),
}


def make_route(folder, route, **changes):
    """Write a folder that a builder of torchtune fits, with other values in its config.json."""
    section, kind, family = ROUTES[route]
    base = {"llama": 500_000.0, "qwen2": 1e6}.get(route, 10_000.0)
    rope = {"rope_theta": base, "rope_type": "default"}
    options = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_parameters": rope}
    make_family(folder, family, **options)
    edit_json(folder / "config.json", **changes)
    cfg = make_config(folder, folder.parent / "out", f"checkpointer.model_type={kind}")
    cfg.model = section
    return cfg


def gate(cfg):
    """Run the comparison of logits alone, without the check of config.json."""
    config = RunConfig.parse(cfg)
    plain = plain_on_meta(config.model)
    source = SafetensorsFolder(pretrained_folder(config))
    state = dict(folder_tensors(config.model_type, source))
    reference.check_logits(plain, state, source)


def rope(**values):
    return {"rope_parameters": {"rope_theta": 10_000.0} | values}


SAME = {
    "llama": [{}, {"sliding_window": 8}, {"head_dim": 16}, {"attention_dropout": 0.1}],
    "ours": [{}, {"rope_scaling": None}],
    "mistral": [{}, {"sliding_window": None}, {"sliding_window": 64}],
    "qwen2": [
        {},
        {"use_sliding_window": False, "sliding_window": 8},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
    ],
}
# Route, values in config.json, what the check of config.json says.
OTHER = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
    ("llama", {"hidden_act": "relu"}, "hidden_act relu"),
    ("llama", {"rms_norm_eps": 1e-1}, "rms_norm_eps 0.1"),
    ("llama", rope(rope_type="default"), "rope_theta 10000.0"),
    ("llama", rope(**LLAMA3_ROPE | {"rope_theta": 500_000.0}), "rope_scaling .*llama3"),
    ("ours", rope(rope_type="linear", factor=4.0), "rope_scaling .*linear"),
    ("ours", rope(rope_type="yarn", factor=4.0), "rope_scaling .*yarn"),
    (
        "ours",
        rope(
            rope_type="longrope",
            factor=4.0,
            short_factor=[1.5] * 8,
            long_factor=[4.0] * 8,
            original_max_position_embeddings=16,
        ),
        "rope_scaling .*longrope",
    ),
    ("ours", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act gelu_pytorch_tanh"),
    ("mistral", {"sliding_window": 8}, "a sliding window of 8 tokens"),
    ("mistral", {"hidden_act": "gelu"}, "hidden_act gelu"),
    (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        "a sliding window of 8 tokens",
    ),
    ("qwen2", {"hidden_act": "gelu"}, "hidden_act gelu"),
]


@pytest.mark.parametrize("route", ROUTES)
def test_equal_models_pass_both_checks(tmp_path, route):
    for number, changes in enumerate(SAME[route]):
        cfg = make_route(tmp_path / f"{number}", route, **changes)
        check_model_section(RunConfig.parse(cfg))
        gate(cfg)


@pytest.mark.parametrize(("route", "changes", "message"), OTHER)
def test_other_models_fail_each_check_by_itself(tmp_path, route, changes, message):
    cfg = make_route(tmp_path / "model", route, **changes)
    with pytest.raises(InputError, match=message) as error:
        check_model_section(RunConfig.parse(cfg))
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match=r"difference is [0-9.e-]+ instead of.*hestia_tune init"):
        gate(cfg)


def test_a_llama_31_has_the_scaling_of_its_config(tmp_path):
    right = {
        "rope_theta": 500_000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    cfg = make_route(tmp_path / "model", "llama", rms_norm_eps=1e-5, rope_parameters=right)
    cfg.model = LLAMA31
    check_model_section(RunConfig.parse(cfg))
    gate(cfg)
    for key, value in {"factor": 32.0, "original_max_position_embeddings": 16}.items():
        edit_json(tmp_path / "model" / "config.json", rope_parameters=right | {key: value})
        with pytest.raises(InputError, match=r"rope_scaling .* has .*8\.0"):
            check_model_section(RunConfig.parse(cfg))
        with pytest.raises(InputError, match="difference is"):
            gate(cfg)


@pytest.mark.parametrize("window", [8, 96])
def test_a_window_is_seen_behind_it(tmp_path, window):
    """A window longer than the usual text of 64 tokens makes a longer text."""
    cfg = make_route(tmp_path / "model", "mistral", sliding_window=window)
    cfg.model.max_seq_len = 256
    with pytest.raises(InputError, match="difference is"):
        gate(cfg)
    cfg.model.max_seq_len = window  # no text of this model is longer
    gate(cfg)


def test_dynamic_scaling_counts_behind_the_original_context(tmp_path):
    dynamic = rope(rope_type="dynamic", factor=4.0, original_max_position_embeddings=96)
    for longest in (64, 256):
        folder = tmp_path / f"{longest}"
        cfg = make_route(folder, "ours", max_position_embeddings=96, **dynamic)
        cfg.model.max_seq_len = longest
        config = RunConfig.parse(cfg)
        section = dict(config.model)
        model = plain_on_meta(section)
        check = check_architecture
        stored = json.loads((folder / "config.json").read_text())
        if longest == 64:
            check(model, stored, folder)
            gate(cfg)
        else:
            with pytest.raises(InputError, match="dynamic"):
                check(model, stored, folder)
            with pytest.raises(InputError, match="difference is"):
                gate(cfg)


def test_attention_biases_that_config_json_lacks(tmp_path):
    """transformers ignores them, so the model with them is another one."""
    cfg = make_route(tmp_path / "model", "llama")
    file = tmp_path / "model" / "model.safetensors"
    state = load_file(file)
    state["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)
    save_file(state, file, {"format": "pt"})
    with pytest.raises(InputError, match="q_proj.bias is .64,. instead of absent"):
        run(cfg)


def skip_the_rule(monkeypatch):
    monkeypatch.setattr("hestia_tune.torchtune.models.check_architecture", lambda *_: None)


def test_every_command_has_the_gate(tmp_path, monkeypatch, end_process_group):
    """Without the check of config.json, the logits refuse a run, a validation, an evaluation."""
    skip_the_rule(monkeypatch)
    cfg = make_route(tmp_path / "model", "llama", hidden_act="gelu")
    message = "torchtune builds must give the same logits as transformers does on"
    with pytest.raises(InputError, match=message):
        run(cfg)
    assert not list((tmp_path / "out").glob("*"))
    with pytest.raises(InputError, match=message):
        run_validate(cfg)
    with pytest.raises(InputError, match=message):
        load_model("pretrained", RunConfig.parse(cfg), device="cpu", dtype=torch.float32)
    teacher = make_route(tmp_path / "other", "llama")
    teacher.distillation = {"weight": 1.0, "teacher": str(tmp_path / "model")}
    with pytest.raises(InputError, match=message):
        run(teacher)


def test_the_rule_needs_no_transformers(tmp_path, monkeypatch, caplog):
    """Without transformers the check of config.json decides, and the log says so."""

    def missing(*_, **__):
        raise InputError("this needs pip install 'hestia-tune[transformers]' (no transformers)")

    monkeypatch.setattr(reference, "read_config", missing)
    cfg = make_route(tmp_path / "model", "llama", hidden_act="gelu")
    with pytest.raises(InputError, match="hidden_act gelu"):
        check_model_section(RunConfig.parse(cfg))
    edit_json(tmp_path / "model" / "config.json", hidden_act="silu")
    gate(cfg)
    assert "not compared with those of transformers: this needs pip install" in caplog.text


def test_a_teacher_of_transformers_has_its_own_config(tmp_path):
    """Another rope_theta in the teacher's config.json belongs to the teacher."""
    for name, base in {"student": 1e4, "teacher": 1e6}.items():
        make_family(tmp_path / name, "Llama", rope_parameters={"rope_theta": base})
    cfg = family_config(tmp_path / "student", tmp_path / "out", "max_steps=1")
    cfg.distillation = {"weight": 1.0, "teacher": str(tmp_path / "teacher")}
    found = []

    def look(recipe):
        teacher = recipe._teacher
        found.append(teacher.config.rope_parameters["rope_theta"])

    run(cfg, look)
    assert found == [1e6]
    make_family(tmp_path / "teacher", "Llama", num_hidden_layers=3, hidden_size=96)
    cfg.output_dir = str(tmp_path / "larger")
    run(cfg, lambda recipe: found.append(len(recipe._teacher.layers)))
    assert found[1:] == [3]
    make_family(tmp_path / "teacher", "Llama", vocab_size=300)
    cfg.output_dir = str(tmp_path / "again")
    with pytest.raises(InputError, match="vocabulary of 300 tokens, but the model has 264"):
        run(cfg)


def kept(folder):
    return sorted(reference._one_of_each_kind(SafetensorsFolder(folder)))


def test_large_models_run_one_block_of_each_kind(tmp_path, monkeypatch):
    layers = {"num_hidden_layers": 8}
    kinds = ["sliding_attention"] * 5 + ["full_attention"] * 3
    assert kept(make_family(tmp_path / "llama", "Llama", **layers)) == [0, 7]
    gemma = make_family(tmp_path / "gemma", "Gemma 3", layer_types=kinds, **layers)
    assert kept(gemma) == [0, 5, 7]
    smol = make_family(tmp_path / "smol", "SmolLM3", **layers)
    assert kept(smol) == [0, 3, 7]
    monkeypatch.setattr(reference, "_WORK_OF_ALL", 0)
    ran = []
    for folder in (tmp_path / "llama", gemma, smol):
        model, source = model_on_meta(folder), SafetensorsFolder(folder)
        state = dict(folder_tensors("HUGGING_FACE", source))
        original = reference._Text.expected

        def spy(text, *args, original=original):
            ran.append((len(text.kept), text.tokens.shape[1]))
            return original(text, *args)

        monkeypatch.setattr(reference._Text, "expected", spy)
        reference.check_logits(model, state, source)
        monkeypatch.setattr(reference._Text, "expected", original)
        wrong = {
            n: v * (1.1 if ".7.mlp.up" in n or ".7.mlp.gate" in n else 1) for n, v in state.items()
        }
        with pytest.raises(InputError, match="difference is"):
            reference.check_logits(model, wrong, source)
    assert ran == [(2, 64), (3, 64), (3, 64)]


def test_blocks_that_are_left_out_are_not_read(tmp_path, monkeypatch):
    folder = make_family(tmp_path / "model", "Llama", num_hidden_layers=6)
    model, source = model_on_meta(folder), SafetensorsFolder(folder)
    state = dict(folder_tensors("HUGGING_FACE", source))
    monkeypatch.setattr(reference, "_WORK_OF_ALL", 0)
    read, dense = [], SafetensorsFolder.dense
    monkeypatch.setattr(
        SafetensorsFolder, "dense", lambda self, name: read.append(name) or dense(self, name)
    )
    reference.check_logits(model, state, source)
    assert {name.split(".")[2] for name in read if ".layers." in name} == {"0", "5"}


def test_a_large_model_is_compared_in_seconds(tmp_path):
    """12 blocks of 9M parameters and 512 tokens of window stay within the budget of operations."""
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 12}
    folder = make_family(
        tmp_path / "model", "Gemma 3", sliding_window=512, max_position_embeddings=1024, **sizes
    )
    model, source = model_on_meta(folder), SafetensorsFolder(folder)
    state = dict(folder_tensors("HUGGING_FACE", source))
    text = reference._Text.of(model, source)
    assert text.tokens.shape[1] == 512 + 32
    start = time.perf_counter()
    reference.check_logits(model, state, source)
    assert time.perf_counter() - start < 30


def test_stories_and_demo_shapes_pass(tmp_path):
    """The usual folder of the tests, through torchtune, with a tied head."""
    folder = make_model_dir(tmp_path / "model")
    cfg = make_config(folder, tmp_path / "out")
    check_model_section(RunConfig.parse(cfg))
    gate(cfg)
