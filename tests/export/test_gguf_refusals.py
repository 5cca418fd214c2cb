"""Tests what a GGUF file cannot say: it is refused from names, shapes and config.json alone.

The tests make folders without training, and read no weight. `check_gguf` is what `validate` and
`hestia_qat` call before they train.
"""

import json
from pathlib import Path

import families
import pytest
from families import GEMMA
from gguf_models import edit_json, random_model
from safetensors.torch import load_file, save_file

from hestia_tune.errors import InputError
from hestia_tune.export import gguf_families
from hestia_tune.export.gguf import check_gguf
from hestia_tune.export.gguf_families import FAMILIES
from hestia_tune.models.folder import ModelFolder

transformers = pytest.importorskip("transformers")

NARROW = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_key_value_heads": 4,
}
EXPERTS = families.EXPERTS | {"head_dim": 16}


@pytest.fixture(autouse=True)
def no_llama_cpp(monkeypatch):
    """Decide by rules alone, as without xllamacpp."""
    monkeypatch.setattr(gguf_families.llama_cpp, "is_installed", lambda: False)


def make(folder: Path, kind: str, **differences: object) -> Path:
    """Write a random model of transformers with the demo's tokenizer."""
    random_model(folder, kind, NARROW | differences)
    return folder


def check(folder: Path) -> None:
    check_gguf(ModelFolder(folder, {}))


@pytest.mark.parametrize(
    ("kind", "differences", "message"),
    [
        ("Qwen3Config", {"attention_bias": True}, r"self_attn.\w_proj.bias has no place"),
        ("Olmo2Config", {"attention_bias": True}, r"self_attn.\w_proj.bias has no place"),
        ("SmolLM3Config", {"attention_bias": True}, r"self_attn.\w_proj.bias has no place"),
        ("SmolLM3Config", {"mlp_bias": True}, r"mlp.\w+_proj.bias has no place"),
        ("Qwen3MoeConfig", EXPERTS | {"norm_topk_prob": True, "attention_bias": True}, "_proj.bi"),
        ("Gemma3TextConfig", GEMMA | {"attention_bias": True}, r"self_attn.\w_proj.bias has no"),
        # Windows that the architecture ignores, or that other layers have.
        ("MistralConfig", {"sliding_window": 64}, "llama without sliding windows"),
        (
            "Qwen2Config",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            r"qwen2 without sliding windows; .*got \[1\]",
        ),
        ("Phi3Config", {"sliding_window": 64}, "phi3 without sliding windows"),
        (
            "Gemma3TextConfig",
            GEMMA | {"layer_types": ["full_attention", "sliding_attention"]},
            r"layers with a sliding window \[0, 1\]; got \[1\]",
        ),
        (
            "Gemma2Config",
            GEMMA | {"layer_types": ["sliding_attention"] * 2},
            r"\[0\]; got \[0, 1\]",
        ),
        # Caps, scales and rotations.
        (
            "Gemma2Config",
            GEMMA | {"attn_logit_softcapping": None},
            "attn_logit_softcapping above 0",
        ),
        ("Gemma3TextConfig", GEMMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (
            "Gemma2Config",
            GEMMA | {"query_pre_attn_scalar": 20},
            "query_pre_attn_scalar of 2 blocks",
        ),
        (
            "Gemma3TextConfig",
            GEMMA | {"use_bidirectional_attention": True},
            "no place for use_bidirectional_attention True .*default is False",
        ),
        ("PhiConfig", {"qk_layernorm": True}, "qk_layernorm|q_layernorm"),
        ("OlmoeConfig", {"clip_qkv": 1.0, "num_experts": 4}, "knows the clip_qkv None; got 1.0"),
        (
            "OlmoeConfig",
            {"num_experts": 4, "num_key_value_heads": 2},
            "num_key_value_heads of olmo",
        ),
        ("Qwen3MoeConfig", EXPERTS, "knows the norm_topk_prob True; got False"),
        ("Qwen2MoeConfig", EXPERTS | {"norm_topk_prob": True}, "norm_topk_prob False; got True"),
        (
            "Qwen3MoeConfig",
            EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [0]},
            "mlp_only_layers",
        ),
    ],
)
def test_what_llama_cpp_would_not_compute_is_refused(tmp_path, kind, differences, message):
    with pytest.raises(InputError, match=message):
        check(make(tmp_path, kind, **differences))


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rotary scaling .* got 'dynamic'"),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
            "rotary scaling .* got 'longrope'",
        ),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 16}, "yarn with beta_fast 32; got 16"),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5}, "attention_factor None"),
        ({"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}, "rotary scaling yarn with mscale"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": False}, "yarn with truncate True"),
        ({"rope_type": "linear", "factor": 2.0}, None),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 32}, None),
        ({"type": "yarn", "factor": 2.0}, None),
        (LLAMA3 | {"rope_type": "llama3", "original_max_position_embeddings": 64}, None),
    ],
)
@pytest.mark.parametrize("kind", ["LlamaConfig", "Qwen3Config"])
def test_rotary_scalings(tmp_path, kind, rope, message):
    folder = make(tmp_path, kind)
    edit_json(folder / "config.json", rope_scaling=rope, rope_parameters=None, rope_theta=10000.0)
    if message is None:
        check(folder)
    else:
        with pytest.raises(InputError, match=message):
            check(folder)


@pytest.mark.parametrize("changes", [{"rope_theta": 5e5}, {"rope_type": "linear", "factor": 8.0}])
def test_layers_with_a_window_have_the_rotation_of_llama_cpp(tmp_path, changes):
    local = {"rope_type": "default", "rope_theta": 10000.0}
    both = {"sliding_attention": local | changes, "full_attention": local | {"rope_theta": 1e6}}
    with pytest.raises(InputError, match="layers with a window"):
        check(make(tmp_path, "Gemma3TextConfig", **GEMMA, rope_parameters=both))


def test_keys_without_an_effect_and_of_other_programs_are_no_reason(tmp_path):
    folder = make(tmp_path, "LlamaConfig", attention_dropout=0.5, use_cache=False)
    edit_json(folder / "config.json", unsloth_version="2026.1", quantization_note={"a": 1})
    check(folder)


def test_a_key_that_a_newer_transformers_adds_is_refused(tmp_path):
    """The class knows it, and its value is not the default. So it may change the logits."""
    folder = make(tmp_path, "LlamaConfig")
    edit_json(folder / "config.json", pretraining_tp=2)  # known, and without an effect
    check(folder)
    config = json.loads((folder / "config.json").read_text())
    from hestia_tune.export.gguf_families import check_architecture

    check_architecture(config | {"new_cap": 1.0}, {"new_cap": 1.0})
    with pytest.raises(InputError, match="llama has no place for new_cap 2.0"):
        check_architecture(config | {"new_cap": 2.0}, {"new_cap": 1.0})


def test_a_head_of_its_own_needs_a_place(tmp_path):
    """llama.cpp's Gemma and Gemma 2 have no output matrix beside the embedding."""
    with pytest.raises(InputError, match="lm_head.weight has no place in llama.cpp's gemma2"):
        check(make(tmp_path, "Gemma2Config", **GEMMA, tie_word_embeddings=False))


@pytest.mark.parametrize("kind", ["Qwen3MoeConfig", "MixtralConfig", "GraniteMoeConfig"])
def test_a_missing_expert_is_named(tmp_path, kind):
    options = {"norm_topk_prob": True} if kind == "Qwen3MoeConfig" else {"num_local_experts": 4}
    folder = make(tmp_path, kind, **EXPERTS | options)
    check(folder)
    state = load_file(folder / "model.safetensors")
    name = next(name for name in state if "experts" in name or "input_linear" in name)
    del state[name]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(InputError, match=f"{name} is missing|has no place"):
        check(folder)


def test_every_family_is_one_of_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    assert {family.name for family in FAMILIES.values()} <= {*gguf.MODEL_ARCH_NAMES.values()}
