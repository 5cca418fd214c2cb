"""Says which families of models llama.cpp has, and how it names and computes them.

A family is in the table only if a file of it was read by llama.cpp with the logits of transformers
(``tests/export/test_gguf_client.py``).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hestia_tune.errors import InputError

_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LINEARS = (*_PROJECTIONS, *_MLP)  # the linears of a block
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True)
class Family:
    """Describe a family of models in llama.cpp.

    Attributes:
        name: llama.cpp's name of the architecture.
        block: Modules of a block, each with a weight.
        outside: Modules outside the blocks, each with a weight.
        head: The output head, which is needed if it is not tied to the embedding.
        blocks: The list of the blocks.
        activations: The activations that llama.cpp computes, the default first.
        scalings: The types of the rotary embedding that llama.cpp computes.
        pairs_rows: Whether llama.cpp rotates neighbouring rows of a head instead of its halves.
        has_biases: Whether every module except the embedding has a bias, which llama.cpp needs. The
            norms are then layer norms.
        multipliers: Key in config.json -> method of ``gguf.GGUFWriter`` that writes this number.
        is_tied: Whether the head is tied to the embedding if config.json does not say it.
    """

    name: str
    block: tuple[str, ...] = (*_NORMS, *LINEARS)
    outside: tuple[str, ...] = ("model.embed_tokens", "model.norm")
    head: str = "lm_head"
    blocks: str = "model.layers"
    activations: tuple[str, ...] = ("silu",)
    scalings: tuple[str, ...] = ("default",)
    pairs_rows: bool = False
    has_biases: bool = False
    multipliers: tuple[tuple[str, str], ...] = ()
    is_tied: bool = False


_SCALINGS = ("default", "linear", "llama3")
_LLAMA = Family("llama", scalings=_SCALINGS, pairs_rows=True)
# Class in transformers -> family.
FAMILIES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": Family("qwen2", scalings=_SCALINGS),
    "Qwen3ForCausalLM": Family("qwen3", (*_NORMS, *LINEARS, *_HEAD_NORMS), scalings=_SCALINGS),
    "SmolLM3ForCausalLM": Family("smollm3", scalings=_SCALINGS, pairs_rows=True, is_tied=True),
    "Olmo2ForCausalLM": Family(
        "olmo2",
        ("post_attention_layernorm", "post_feedforward_layernorm", *LINEARS, *_HEAD_NORMS),
    ),
    "GraniteForCausalLM": Family(
        "granite",
        pairs_rows=True,
        multipliers=(
            ("attention_multiplier", "add_attention_scale"),
            ("embedding_multiplier", "add_embedding_scale"),
            ("residual_multiplier", "add_residual_scale"),
            ("logits_scaling", "add_logit_scale"),
        ),
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        (
            *_NORMS,
            "self_attn.qkv_proj",
            "self_attn.o_proj",
            "mlp.gate_up_proj",
            "mlp.down_proj",
        ),
    ),
    "PhiForCausalLM": Family(
        "phi2",
        ("input_layernorm", *_PROJECTIONS[:3], "self_attn.dense", "mlp.fc1", "mlp.fc2"),
        ("model.embed_tokens", "model.final_layernorm"),
        activations=("gelu_new",),
        has_biases=True,
    ),
    "GPTNeoXForCausalLM": Family(
        "gptneox",
        (
            *_NORMS,
            "attention.query_key_value",
            "attention.dense",
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
        ),
        ("gpt_neox.embed_in", "gpt_neox.final_layer_norm"),
        head="embed_out",
        blocks="gpt_neox.layers",
        activations=("gelu",),
        has_biases=True,
    ),
}


def check_architecture(config: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
    """Return the family of a config.json in llama.cpp, and the rotary embedding.

    The rotary embedding has the keys of transformers' ``rope_parameters``.

    Args:
        config: The content of config.json.

    Raises:
        InputError: If llama.cpp does not have the architecture, the activation, the window or the
            rotary scaling, or if it is not translated here.
    """
    architecture = next(iter(config.get("architectures") or []), None)
    family = FAMILIES.get(architecture, Family("unknown"))
    # transformers 5 writes rope_parameters, older versions rope_scaling.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    window, context = config.get("sliding_window"), config.get("max_position_embeddings", math.inf)
    is_sliding = config.get("use_sliding_window", window is not None and window < context)
    requirements = [
        ("architecture", architecture, tuple(FAMILIES)),
        ("hidden_act", config.get("hidden_act", family.activations[0]), family.activations),
        ("use_sliding_window", bool(is_sliding), (False,)),
        ("rotary scaling", rope_type, family.scalings),
    ]
    if architecture == "SmolLM3ForCausalLM":
        # llama.cpp leaves out the rotation in every fourth layer, even if the file says otherwise.
        every, count = config.get("no_rope_layer_interval", 4), config["num_hidden_layers"]
        rotated = [int((layer + 1) % every != 0) for layer in range(count)]
        expected = [int((layer + 1) % 4 != 0) for layer in range(count)]
        layers = config.get("no_rope_layers") or rotated
        requirements.append(("no_rope_layers", layers, (expected,)))
    for key, value, known in requirements:
        if value not in known:
            raise InputError(
                f"GGUF export knows the {key} {' or '.join(map(str, known))}; got {value!r}; "
                "export to another format"
            )
    base = {
        "rope_theta": config.get("rope_theta", config.get("rotary_emb_base", 10000.0)),
        "partial_rotary_factor": config.get("partial_rotary_factor", config.get("rotary_pct", 1.0)),
    }
    return family, base | rope | {"rope_type": rope_type}
