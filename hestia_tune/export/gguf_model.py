"""A Hugging Face model as llama.cpp names and orders it.

What differs: the names of tensors and hyperparameters, which the gguf package knows; for Llama,
Mistral and SmolLM3 the order of the rows of the query and key projections (Hugging Face rotates the
two halves of a head, llama.cpp there neighbouring pairs; Qwen2 and 3 keep the halves); Llama 3's
long-context rotary factors, which become a tensor. With tied embeddings llama.cpp takes those for
the output matrix.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hestia_tune.errors import InputError
from hestia_tune.models.folder import ModelFolder, import_optional

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
}
# Whose rotary embedding turns neighbouring rows of a head.
_PAIRED = ("llama", "smollm3")
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LINEARS = (*_PROJECTIONS, *_MLP)  # of a block
_LAYER = ("input_layernorm", *_PROJECTIONS, "post_attention_layernorm", *_MLP)
_HEAD_NORMS = {"qwen3": ("self_attn.q_norm", "self_attn.k_norm")}
ROPE_FACTORS = "rope_freqs.weight"


def check_architecture(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(llama.cpp's name of the architecture, its rotary embedding by transformers' names) of a
    config.json.

    Raises:
        InputError: naming what llama.cpp does not have, or what is not translated here.
    """
    architecture = next(iter(config.get("architectures") or []), None)
    # rope_parameters is transformers 5's.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    is_sliding = config.get("use_sliding_window", config.get("sliding_window") is not None)
    facts = [
        ("architecture", architecture, tuple(_ARCHITECTURES)),
        ("hidden_act", config.get("hidden_act", "silu"), ("silu",)),
        ("use_sliding_window", bool(is_sliding), (False,)),
        ("rotary scaling", rope_type, ("default", "linear", "llama3")),
    ]
    if architecture == "SmolLM3ForCausalLM":
        # llama.cpp leaves the rotation out in every fourth layer, whatever the file says.
        every, count = config.get("no_rope_layer_interval", 4), config["num_hidden_layers"]
        rotated = [int((layer + 1) % every != 0) for layer in range(count)]
        expected = [int((layer + 1) % 4 != 0) for layer in range(count)]
        facts.append(("no_rope_layers", config.get("no_rope_layers") or rotated, (expected,)))
    for key, value, known in facts:
        if value not in known:
            raise InputError(
                f"GGUF export knows the {key} {' or '.join(map(str, known))}; got {value!r}; "
                "export to another format"
            )
    base = {"rope_theta": config.get("rope_theta", 10000.0)}
    return _ARCHITECTURES[str(architecture)], base | rope | {"rope_type": rope_type}


class LlamaModel:
    """What the model of a Hugging Face folder is for llama.cpp.

    Attributes:
        architecture: as llama.cpp names it.
        names: name in the safetensors -> name in the GGUF file, of every tensor in it.

    Raises:
        InputError: on an architecture, an activation or a rotary scaling that llama.cpp does not
            have, or that is not translated here; on tensors that are missing or unknown.
    """

    def __init__(self, source: ModelFolder):
        self._source, config = source, source.config
        self.architecture, self._rope = check_architecture(config)
        query = config["num_attention_heads"]
        self._heads = {"q_proj": query, "k_proj": config.get("num_key_value_heads") or query}
        self._head_dim = config.get("head_dim") or config["hidden_size"] // query
        gguf, count = import_optional("gguf"), config["num_hidden_layers"]
        table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[self.architecture.upper()], count)
        names = {n: table.get_name(n, (".weight", ".bias")) or "" for n in source.shapes}
        parts = (*_LAYER, *_HEAD_NORMS.get(self.architecture, ()))
        needed = [f"model.layers.{layer}.{part}" for layer in range(count) for part in parts]
        needed += ["model.embed_tokens", "model.norm"]
        if config.get("tie_word_embeddings", self.architecture == "smollm3"):
            names.pop("lm_head.weight", None)  # a copy
        else:
            needed.append("lm_head")
        wrong = [f"{name} is missing" for name in needed if f"{name}.weight" not in names]
        wrong += [f"{name} is unknown" for name, ours in names.items() if not ours]
        if wrong:
            raise InputError(
                f"{wrong[0]} in the {self.architecture} of {count} layers that config.json "
                "describes; take the config that belongs to the model"
            )
        if self._rope["rope_type"] == "llama3":
            names[ROPE_FACTORS] = ROPE_FACTORS
        self.names = names

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Name in the safetensors, tensor with its rows in llama.cpp's order) of every tensor."""
        for name in self.names:
            if name == ROPE_FACTORS:
                yield name, self.rope_factors()
                continue
            tensor, part = self._source.read(name), name.split(".")[-2]
            if self.architecture in _PAIRED and part in self._heads:
                # (heads, 2 halves, head_dim / 2, ...) -> (heads, head_dim / 2, pairs, ...)
                halves = tensor.unflatten(0, (self._heads[part], 2, -1))
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
            yield name, tensor

    def rope_factors(self) -> torch.Tensor:
        """float32 (head_dim / 2,): what llama.cpp divides the rotary frequencies by (Llama 3).

        A wavelength below context / high_freq_factor keeps its frequency, one above context /
        low_freq_factor is slowed by ``factor``, with a linear blend of frequencies in between.
        """
        rope = self._rope
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        exponents = torch.arange(0, self._head_dim, 2, dtype=torch.float64) / self._head_dim
        wavelengths = 2 * math.pi * rope["rope_theta"] ** exponents
        turns = rope["original_max_position_embeddings"] / wavelengths
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 / ((1 - blend) / rope["factor"] + blend)).float()

    def add_to(self, writer: Any) -> None:
        """Adds the hyperparameters to a ``gguf.GGUFWriter``."""
        config = self._source.config
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(self._heads["q_proj"])
        writer.add_head_count_kv(self._heads["k_proj"])
        writer.add_key_length(self._head_dim)
        writer.add_value_length(self._head_dim)
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(self._head_dim)
        writer.add_rope_freq_base(self._rope["rope_theta"])
        if self._rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(import_optional("gguf").RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(self._rope["factor"])
