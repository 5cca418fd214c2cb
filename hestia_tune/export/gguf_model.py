"""A Hugging Face Llama or Qwen2 as llama.cpp names and orders it.

What differs: the names of tensors and hyperparameters; for Llama the order of the rows of the
query and key projections (Hugging Face rotates the two halves of a head, llama.cpp's Llama
neighbouring pairs; Qwen2 keeps the halves); Llama 3's long-context rotary factors, which
become a tensor. With tied embeddings there is no output matrix: llama.cpp takes the embedding.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class LlamaModel:
    """What a config means for llama.cpp; ``config`` is the parsed ``config.json``.

    Raises:
        ValueError: on an architecture, an activation or a rotary scaling that llama.cpp's Llama
            and Qwen2 do not have, or that is not translated here.
    """

    config: Mapping[str, Any]

    def __post_init__(self):
        names = self.config.get("architectures") or []
        if len(names) != 1 or names[0] not in _ARCHITECTURES:
            raise ValueError(
                f"GGUF export knows the architectures {', '.join(_ARCHITECTURES)}; got {names}; "
                "export to another format"
            )
        activation = self.config.get("hidden_act", "silu")
        if activation != "silu":
            raise ValueError(f'llama.cpp computes hidden_act "silu"; got {activation!r}')
        if self.config.get("use_sliding_window"):
            raise ValueError("llama.cpp's Qwen2 has no sliding window; got use_sliding_window true")
        self.rope_type()

    @property
    def architecture(self) -> str:
        return _ARCHITECTURES[self.config["architectures"][0]]

    @property
    def tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings"))

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads, key heads."""
        query = self.config["num_attention_heads"]
        return query, self.config.get("num_key_value_heads") or query

    @property
    def head_dim(self) -> int:
        return self.config.get("head_dim") or self.config["hidden_size"] // self.heads[0]

    def _rope(self) -> dict[str, Any]:
        """The rotary settings: ``rope_parameters`` of transformers 5, or the older keys."""
        own = {"rope_theta": self.config.get("rope_theta", 10000.0)}
        scaling = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        return own | scaling

    def rope_type(self) -> str:
        """ "default", "linear" or "llama3"."""
        rope = self._rope()
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in ("default", "linear", "llama3"):
            raise ValueError(
                f'GGUF export translates the rotary scalings "linear" and "llama3"; got {kind!r}; '
                "export to another format"
            )
        return kind

    def rope_factors(self) -> torch.Tensor | None:
        """float32 (head_dim / 2,): what llama.cpp divides the rotary frequencies by (Llama 3).

        A wavelength below context / high_freq_factor keeps its frequency, one above context /
        low_freq_factor is slowed by ``factor``, with a linear blend of frequencies in between.
        """
        if self.rope_type() != "llama3":
            return None
        rope = self._rope()
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
        layers = range(self.config["num_hidden_layers"])
        weights = {k: v for k, v in _TOP.items() if not (self.tied and k == "lm_head.weight")}
        biases = {}
        for layer in layers:
            for theirs, ours in _IN_LAYER.items():
                weights[f"model.layers.{layer}.{theirs}.weight"] = f"blk.{layer}.{ours}.weight"
                if "norm" not in ours:
                    biases[f"model.layers.{layer}.{theirs}.bias"] = f"blk.{layer}.{ours}.bias"
        known = weights | biases
        # Not weights: buffers of old checkpoints, and a copy of tied embeddings.
        unknown = [n for n in present if n not in known and "rotary_emb" not in n]
        if self.tied:
            unknown = [n for n in unknown if n != "lm_head.weight"]
        missing = [n for n in weights if n not in present]
        if unknown or missing:
            raise ValueError(
                f"the tensors do not match config.json ({self.architecture}, {len(layers)} "
                f"layers); missing: {missing[:4]}, unknown: {unknown[:4]}"
            )
        return {name: known[name] for name in known if name in present}

    def row_order(self, name: str) -> torch.Tensor | None:
        """Rows of a Hugging Face tensor in llama.cpp's order; None if it stays as it is."""
        kind = name.rsplit(".", 2)[-2]
        if self.architecture != "llama" or kind not in ("q_proj", "k_proj"):
            return None
        heads = self.heads[kind == "k_proj"]
        rows = torch.arange(heads * self.head_dim)
        return rows.view(heads, 2, self.head_dim // 2).transpose(1, 2).reshape(-1)

    def add_to(self, writer: Any) -> None:
        """Adds the hyperparameters to a ``gguf.GGUFWriter``."""
        config, rope = self.config, self._rope()
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
        if self.rope_type() == "linear":
            import gguf

            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
