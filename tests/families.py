"""Writes random small models of the families that transformers builds, as folders."""

import json
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from tiny import make_config, make_model_dir

SHAPE = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Windows and rotary embeddings that matter behind 24 or 64 tokens.
KINDS = ["sliding_attention", "full_attention"]
WINDOW = {"sliding_window": 24, "max_position_embeddings": 256}
SOME_WINDOWS = {"use_sliding_window": True, "max_window_layers": 1} | WINDOW
NESTED_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 777.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
}


def with_rope(rope_type: str, **rope: Any) -> dict[str, Any]:
    """Return the values of config.json for a rotary embedding, with the usual ones of its type."""
    original = {"original_max_position_embeddings": 64}
    usual = {
        "yarn": original,
        "longrope": original
        | {"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]},
    }.get(rope_type, {})
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0} | usual | rope
    return {"rope_parameters": rope, "max_position_embeddings": 256}


# Name -> (config class of transformers, the values that differ from SHAPE).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {}),
    "Llama 3 (scaled rotary)": (
        "LlamaConfig",
        {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    ),
    "Qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "Qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "Mistral": ("MistralConfig", {"sliding_window": None}),
    "Gemma 2": ("Gemma2Config", GEMMA),
    "Gemma 3": ("Gemma3TextConfig", GEMMA),
    "Phi": ("PhiConfig", {}),
    "Phi-3": ("Phi3Config", {}),
    "OLMo2": ("Olmo2Config", {}),
    "Granite": ("GraniteConfig", {"residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "GPT-NeoX": ("GPTNeoXConfig", {"num_key_value_heads": 4}),
    "SmolLM3": ("SmolLM3Config", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "Qwen3-MoE": ("Qwen3MoeConfig", {"head_dim": 16, "norm_topk_prob": True} | EXPERTS),
}
# These families have unusual heads or linears and are not in the table of families.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    # The head calls a part of the module that transformers names as the backbone.
    "OPT": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0}),
    # The class of the linears has its own forward.
    "Falcon": ("FalconConfig", {}),
}
# Models of blocks without attention.
STATE_SPACES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mamba": ("MambaConfig", {"state_size": 16}),
    "Mamba2": ("Mamba2Config", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1}),
}
# Mixtures of experts besides those in FAMILIES.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    # The files have the experts of a block in one tensor, with another name than the model.
    "Granite-MoE": ("GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    # The files have other names of blocks than the model.
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
# More families for the table of formats.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma": ("GemmaConfig", {"head_dim": 16}),
    "StableLM": ("StableLmConfig", {}),
    "Bloom": ("BloomConfig", {}),
    "MPT": ("MptConfig", {}),
    "GPT-J": ("GPTJConfig", {"rotary_dim": 8}),
    "GPT-2": ("GPT2Config", {}),
    "OLMoE": ("OlmoeConfig", EXPERTS | {"num_key_value_heads": 4}),
}


def make_family(folder: Path, family: str, seed: int = 0, **changes: Any) -> Path:
    """Write a random model of a family, with every kind of weight far from its initial value."""
    import transformers

    make_model_dir(folder)  # this writes the tokenizer
    name, differences = (FAMILIES | OTHERS | STATE_SPACES | MIXTURES | MORE)[family]
    config = getattr(transformers, name)(**SHAPE | differences | changes)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        # Norms stay near their values, and all other weights have a visible effect.
        centre = parameter.detach().mean() if parameter.dim() == 1 else 0.0
        torch.nn.init.normal_(parameter, float(centre), 0.1)
    model.save_pretrained(folder)
    file = folder / "config.json"  # add the key that older files have
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content))
    return folder


def family_config(model_dir: Path, output_dir: Path, *overrides: str) -> DictConfig:
    """Return `tiny.make_config` with a model that transformers builds."""
    cfg = make_config(model_dir, output_dir)
    for key in ("tokenizer", "checkpointer"):
        del cfg[key]
    cfg.model = {"_component_": "hestia_tune.models.hugging_face", "path": str(model_dir)}
    return OmegaConf.merge(cfg, OmegaConf.from_dotlist(list(overrides)))
