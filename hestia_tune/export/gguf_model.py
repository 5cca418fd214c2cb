"""A Hugging Face Llama or Qwen2 as llama.cpp names and orders it.

What differs: the names of tensors and hyperparameters, which the gguf package knows; for Llama the
order of the rows of the query and key projections (Hugging Face rotates the two halves of a head,
llama.cpp's Llama neighbouring pairs; Qwen2 keeps the halves); Llama 3's long-context rotary
factors, which become a tensor. With tied embeddings there is no output matrix: llama.cpp takes the
embedding.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from hestia_tune.export.gguf_blocks import import_gguf

_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_LAYER = ("input_layernorm", *_PROJECTIONS, "post_attention_layernorm", *_MLP)
ROPE_FACTORS = "rope_freqs.weight"


class LlamaModel:
    """What a config means for llama.cpp.

    Args:
        config: the parsed ``config.json``.

    Attributes:
        architecture: "llama" or "qwen2".
        heads: query heads, key heads.
        head_dim: size of each.
        rope: the rotary settings, of ``rope_parameters`` (transformers 5) or the older keys.

    Raises:
        ValueError: on an architecture, an activation or a rotary scaling that llama.cpp's Llama
            and Qwen2 do not have, or that is not translated here.
    """

    def __init__(self, config: Mapping[str, Any]):
        names = config.get("architectures") or []
        if len(names) != 1 or names[0] not in _ARCHITECTURES:
            raise ValueError(
                f"GGUF export knows the architectures {', '.join(_ARCHITECTURES)}; got {names}; "
                "export to another format"
            )
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise ValueError(f'llama.cpp computes hidden_act "silu"; got {activation!r}')
        if config.get("use_sliding_window"):
            raise ValueError("llama.cpp's Qwen2 has no sliding window; got use_sliding_window true")
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind not in ("default", "linear", "llama3"):
            raise ValueError(
                f'GGUF export translates the rotary scalings "linear" and "llama3"; got {kind!r}; '
                "export to another format"
            )
        self.config, self.architecture = config, _ARCHITECTURES[names[0]]
        self.rope = {"rope_theta": config.get("rope_theta", 10000.0)} | scaling
        self.rope["rope_type"] = kind
        query = config["num_attention_heads"]
        self.heads = query, config.get("num_key_value_heads") or query
        self.head_dim = config.get("head_dim") or config["hidden_size"] // query

    def rope_factors(self) -> torch.Tensor | None:
        """float32 (head_dim / 2,): what llama.cpp divides the rotary frequencies by (Llama 3).

        A wavelength below context / high_freq_factor keeps its frequency, one above context /
        low_freq_factor is slowed by ``factor``, with a linear blend of frequencies in between.
        """
        rope = self.rope
        if rope["rope_type"] != "llama3":
            return None
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        wavelengths = 2 * math.pi * rope["rope_theta"] ** exponents
        turns = rope["original_max_position_embeddings"] / wavelengths
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 / ((1 - blend) / rope["factor"] + blend)).float()

    def tensor_names(self, present: Mapping[str, torch.Size]) -> dict[str, str]:
        """Hugging Face name to GGUF name of every tensor that belongs into the file.

        Raises:
            ValueError: on tensors that the architecture lacks, or that are missing.
        """
        gguf, count = import_gguf(), self.config["num_hidden_layers"]
        tied = bool(self.config.get("tie_word_embeddings"))
        weights = ["model.embed_tokens.weight", "model.norm.weight"]
        weights += [] if tied else ["lm_head.weight"]
        layers = [f"model.layers.{layer}.{part}" for layer in range(count) for part in _LAYER]
        weights += [f"{part}.weight" for part in layers]
        known = weights + [f"{part}.bias" for part in layers if not part.endswith("norm")]
        # Not weights: buffers of old checkpoints, and a copy of tied embeddings.
        skipped = {"lm_head.weight"} if tied else set()
        unknown = [n for n in present if n not in {*known, *skipped} and "rotary_emb" not in n]
        missing = [n for n in weights if n not in present]
        if unknown or missing:
            raise ValueError(
                f"the tensors do not match config.json ({self.architecture}, {count} layers); "
                f"missing: {missing[:4]}, unknown: {unknown[:4]}"
            )
        table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[self.architecture.upper()], count)
        return {n: table.get_name(n, (".weight", ".bias")) for n in known if n in present}

    def row_order(self, name: str) -> torch.Tensor | slice:
        """Rows of a Hugging Face tensor in llama.cpp's order: an index."""
        kind = name.rsplit(".", 2)[-2]
        if self.architecture != "llama" or kind not in ("q_proj", "k_proj"):
            return slice(None)
        heads = self.heads[kind == "k_proj"]
        rows = torch.arange(heads * self.head_dim)
        # (heads, 2 halves, head_dim / 2) -> (heads, head_dim / 2, pairs)
        return rows.view(heads, 2, self.head_dim // 2).transpose(1, 2).reshape(-1)

    def add_to(self, writer: Any) -> None:
        """Adds the hyperparameters to a ``gguf.GGUFWriter``."""
        config, rope = self.config, self.rope
        query_heads, key_heads = self.heads
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(query_heads)
        writer.add_head_count_kv(key_heads)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(self.head_dim)
        writer.add_rope_freq_base(rope["rope_theta"])
        if rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(import_gguf().RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
