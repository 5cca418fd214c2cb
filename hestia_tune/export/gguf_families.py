"""What a GGUF file says of a model: names of tensors, hyperparameters and tokenizer, by family.

A family is in the table only if a file of it was read by llama.cpp with the logits of transformers
(``tests/export/test_gguf_client.py``). llama.cpp computes a family by code of its own, and a GGUF
file cannot change that code. It stops at a tensor that this code does not read, and ignores a
number that it does not read. So everything that a model has must have a home in the file, or the
model is refused before it is trained:

- **tensors**: the gguf package knows the weights of each architecture, and `Family` the biases;
- **config.json**: it is read as transformers reads it, with its defaults. A key is written to the
  file, or it must have a value that llama.cpp's code assumes (`Family.fixed`), or it has no effect
  on the logits (`_NEUTRAL`). Any other key must have the default value of its class.

Three things change on the way. Hugging Face rotates the two halves of a head, and llama.cpp
neighboring rows for some families, so rows of the query and key projections change their order.
GPT-NeoX keeps query, key and value of one head together, and llama.cpp keeps all queries together.
Gemma multiplies by 1 + w in a norm, and the file has 1 + w. The matrices of experts become one
tensor with three dimensions, whether the files have one tensor for each matrix or for all.

llama.cpp does not run ``tokenizer.json``. It has its own tokenizers and selects one by name. Two
kinds are known here. The structure of ``tokenizer.json`` shows the kind. Any other tokenizer is an
error, because llama.cpp does not notice a wrong name and gives other token ids.

    byte-level BPE ("gpt2")     the regular expression that splits the text has a name:
                                llama-bpe, dbrx, qwen2, smollm, gpt-2, ...
    SentencePiece BPE ("llama") pieces have U+2581 for a space and <0x00> for a byte; merges become
                                scores, and earlier merges have higher scores

The check has two parts. `_require_translatable` reads tokenizer.json: llama.cpp has no normalizer,
so a tokenizer that changes the text before it splits it is refused, and so is everything else that
has no place in the file. NFC is the exception: llama.cpp's own converter leaves it out for Qwen,
and it changes no text that keyboards and web pages produce, so it is a warning. `check_tokens` asks
the installed llama.cpp for the ids of a few texts and compares them.

``gguf.SpecialVocab`` reads merges and chat templates and writes them with the special tokens. It
finds special tokens only among the added tokens, so special tokens are looked up here. To see which
tokens are added to a text, the tokenizers library encodes a text.
"""

import contextlib
import functools
import hashlib
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from hestia_tune.errors import InputError
from hestia_tune.export import llama_cpp
from hestia_tune.files import read_json
from hestia_tune.models.folder import ModelFolder, SafetensorsFolder, import_optional

log = logging.getLogger(__name__)
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LINEARS = (*_PROJECTIONS, *_MLP)  # the linears of a block
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_FOUR_NORMS = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Names of the parts of a mixture of experts in a block.

    Attributes:
        module: The module that holds the experts.
        parts: Modules of one expert: gate, up and down. A name in the files is
            ``module.NUMBER.part.weight``.
        fused: Tensors of all experts, (experts, out_features, in_features): gate above up, and
            down. Files have either these or the parts.
        count: Key in config.json, or keys, of the number of experts.
        width: Key in config.json of an expert's width.
    """

    module: str = "mlp.experts"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    fused: tuple[str, str] = ("gate_up_proj", "down_proj")
    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    width: str = "moe_intermediate_size"


@dataclass(frozen=True)
class Family:
    """A family of models in llama.cpp.

    Attributes:
        name: llama.cpp's name of the architecture.
        block: Modules of a block, each with a weight.
        outside: Modules outside the blocks, each with a weight.
        head: The output head, which is needed if it is not tied to the embedding.
        blocks: The list of the blocks.
        biases: Modules of a block that may have a bias.
        activations: The activations that llama.cpp computes, the default first.
        scalings: The types of the rotary embedding that llama.cpp computes.
        pairs_rows: Whether llama.cpp rotates neighboring rows of a head instead of its halves.
        has_biases: Whether every module except the embedding has a bias, which llama.cpp needs. The
            norms are then layer norms.
        shifts_norms: Whether a norm multiplies by 1 + w.
        numbers: Key in config.json -> method of ``gguf.GGUFWriter`` that writes this number.
        fixed: Key in config.json -> the values that llama.cpp's code assumes.
        period: A layer attends to a window, except for every ``period``-th. 0: no layer does.
        large: The number of blocks from which llama.cpp concludes that scores are divided by the
            root of hidden_size / num_attention_heads. With other numbers, and in the families that
            have no ``query_pre_attn_scalar``, it is the root of head_dim.
        experts: The experts of a block. None: there are none.
        is_tied: Whether the head is tied to the embedding if config.json does not say it.
    """

    name: str
    block: tuple[str, ...] = (*_NORMS, *LINEARS)
    outside: tuple[str, ...] = ("model.embed_tokens", "model.norm")
    head: str = "lm_head"
    blocks: str = "model.layers"
    biases: tuple[str, ...] = ()
    activations: tuple[str, ...] = ("silu",)
    scalings: tuple[str, ...] = ("default",)
    pairs_rows: bool = False
    has_biases: bool = False
    shifts_norms: bool = False
    numbers: tuple[tuple[str, str], ...] = ()
    fixed: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    period: int = 0
    large: int = 0
    experts: Experts | None = None
    is_tied: bool = False


_SCALINGS = ("default", "linear", "llama3", "yarn")
_LLAMA = Family("llama", scalings=_SCALINGS, pairs_rows=True, biases=LINEARS)
_GELU = ("gelu_pytorch_tanh", "gelu_new")
_MOE = ("decoder_sparse_step", (1,)), ("mlp_only_layers", ([], None))
_MULTIPLIERS = (
    ("attention_multiplier", "add_attention_scale"),
    ("embedding_multiplier", "add_embedding_scale"),
    ("residual_multiplier", "add_residual_scale"),
    ("logits_scaling", "add_logit_scale"),
)
# Class in transformers -> family.
FAMILIES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": Family("qwen2", scalings=_SCALINGS, biases=_PROJECTIONS[:3]),
    "Qwen3ForCausalLM": Family("qwen3", (*_NORMS, *LINEARS, *_HEAD_NORMS), scalings=_SCALINGS),
    "SmolLM3ForCausalLM": Family("smollm3", scalings=_SCALINGS, pairs_rows=True, is_tied=True),
    "Olmo2ForCausalLM": Family("olmo2", (*_FOUR_NORMS[1::2], *LINEARS, *_HEAD_NORMS)),
    "GraniteForCausalLM": Family("granite", pairs_rows=True, biases=LINEARS, numbers=_MULTIPLIERS),
    "GemmaForCausalLM": Family("gemma", activations=_GELU, shifts_norms=True, is_tied=True),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        (*_FOUR_NORMS, *LINEARS),
        activations=_GELU,
        shifts_norms=True,
        numbers=(
            ("attn_logit_softcapping", "add_attn_logit_softcapping"),
            ("final_logit_softcapping", "add_final_logit_softcapping"),
        ),
        period=2,
        large=46,
        is_tied=True,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3",
        (*_FOUR_NORMS, *LINEARS, *_HEAD_NORMS),
        activations=_GELU,
        scalings=("default", "linear"),
        shifts_norms=True,
        fixed=(("attn_logit_softcapping", (None,)), ("final_logit_softcapping", (None,))),
        period=6,
        large=62,
        is_tied=True,
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
        activations=("gelu_new", "gelu_pytorch_tanh"),
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
        activations=("gelu", "gelu_new", "gelu_pytorch_tanh"),
        has_biases=True,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3moe",
        (*_NORMS, *_PROJECTIONS, *_HEAD_NORMS, "mlp.gate"),
        fixed=(("norm_topk_prob", (True,)), *_MOE),
        experts=Experts(),
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2moe",
        (
            *_NORMS,
            *_PROJECTIONS,
            "mlp.gate",
            "mlp.shared_expert_gate",
            *(f"mlp.shared_expert.{part}" for part in ("gate_proj", "up_proj", "down_proj")),
        ),
        biases=_PROJECTIONS[:3],
        numbers=(("shared_expert_intermediate_size", "add_expert_shared_feed_forward_length"),),
        fixed=(("norm_topk_prob", (False,)), *_MOE),
        experts=Experts(),
    ),
    "OlmoeForCausalLM": Family(
        "olmoe",
        (*_NORMS, *_PROJECTIONS, *_HEAD_NORMS, "mlp.gate"),
        fixed=(("norm_topk_prob", (False,)), ("clip_qkv", (None,))),
        experts=Experts(width="intermediate_size"),
    ),
    "MixtralForCausalLM": Family(
        "llama",
        (*_NORMS, *_PROJECTIONS, "block_sparse_moe.gate"),
        scalings=_SCALINGS,
        pairs_rows=True,
        experts=Experts(
            module="block_sparse_moe.experts", parts=("w1", "w3", "w2"), width="intermediate_size"
        ),
    ),
    "GraniteMoeForCausalLM": Family(
        "granitemoe",
        (*_NORMS, *_PROJECTIONS, "block_sparse_moe.router.layer"),
        pairs_rows=True,
        numbers=_MULTIPLIERS,
        experts=Experts(
            module="block_sparse_moe",
            fused=("input_linear.weight", "output_linear.weight"),
            width="intermediate_size",
        ),
    ),
}
# Keys of config.json that a file gets, or that the tensors or `check_architecture` answer for.
_TRANSLATED = {
    *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "head_dim"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_act"),
    *("hidden_activation", "max_position_embeddings", "original_max_position_embeddings"),
    *("rms_norm_eps", "layer_norm_eps", "rope_theta", "rope_scaling", "rope_parameters"),
    *("rope_local_base_freq", "partial_rotary_factor", "rotary_pct", "rotary_emb_base"),
    *("tie_word_embeddings", "sliding_window", "use_sliding_window", "max_window_layers"),
    *("layer_types", "sliding_window_pattern", "_sliding_window_pattern", "no_rope_layers"),
    *("no_rope_layer_interval", "query_pre_attn_scalar", "use_parallel_residual"),
    *("attention_bias", "mlp_bias", "qkv_bias", "num_experts", "num_local_experts"),
    *("num_experts_per_tok", "moe_intermediate_size"),
}
# Keys that do not change logits.
_NEUTRAL = {
    *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "problem_type", "id2label"),
    *("label2id", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"),
    *("initializer_range", "use_cache", "cache_implementation", "attention_dropout"),
    *("hidden_dropout", "resid_pdrop", "embd_pdrop", "classifier_dropout", "pretraining_tp"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "is_decoder"),
    *("output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward"),
    *("is_encoder_decoder", "name_or_path"),
}


def read_as_transformers(source: ModelFolder) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a model's config.json with the defaults of its class, and these defaults.

    Without transformers, or if it does not know the model, the first is the file as it is, and the
    second is empty.
    """
    raw = dict(source.config)
    with contextlib.suppress(Exception):  # transformers may be missing, or refuse the file
        import transformers

        kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[raw["model_type"]]
        given = {key: value for key, value in raw.items() if key != "model_type"}
        return raw | kind(**given).to_dict(), kind().to_dict()
    return raw, {}


def _window_layers(config: Mapping[str, Any], family: Family) -> list[int]:
    """Return the indices of the layers whose window is shorter than the longest sequence."""
    count, window = config["num_hidden_layers"], config.get("sliding_window")
    context = config.get("max_position_embeddings", math.inf)
    if not window or window >= context or not config.get("use_sliding_window", True):
        return []
    default = [
        "full_attention" if family.period and i % family.period == family.period - 1 else "sliding"
        for i in range(count)
    ]
    kinds = config.get("layer_types") or default
    return [i for i, kind in enumerate(kinds) if kind.startswith("sliding")]


def _rotary(config: Mapping[str, Any], rope: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a rotary embedding with all keys of transformers' ``rope_parameters``."""
    rope = {key: value for key, value in (rope or {}).items() if value is not None}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    base = {
        "rope_theta": config.get("rope_theta", config.get("rotary_emb_base", 10000.0)),
        "partial_rotary_factor": config.get("partial_rotary_factor", config.get("rotary_pct", 1.0)),
        "original_max_position_embeddings": config.get("max_position_embeddings"),
    }
    return base | rope


# What llama.cpp computes for each type of rotary embedding besides `_COMMON`.
_COMMON = {"rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
_ROTARY_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor"},
}
_YARN = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "attention_factor": None}


def _rotary_requirements(rope: Mapping[str, Any]) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Return the requirements of `check_architecture` about the parts of a rotary embedding."""
    kind = rope["rope_type"]
    known, found = _COMMON | _ROTARY_KEYS.get(kind, set()), []
    assumed = _YARN if kind == "yarn" else {}
    for key in rope.keys() - known if kind in _ROTARY_KEYS else ():
        if kind != "default":  # transformers reads no other key of the default
            found.append((f"rotary scaling {kind} with {key}", rope[key], (assumed.get(key),)))
    return found


def check_architecture(
    config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> tuple[Family, dict[str, Any]]:
    """Return the family of a config.json in llama.cpp, and the rotary embedding.

    The rotary embedding has the keys of transformers' ``rope_parameters``. If layers with a window
    have one of their own, it is that of the other layers.

    Args:
        config: The content of config.json; see `read_as_transformers`.
        defaults: The default values of its class.

    Raises:
        InputError: If llama.cpp does not have the architecture, or computes something else than
            config.json says.
    """
    architecture = next(iter(config.get("architectures") or []), None)
    family = FAMILIES.get(architecture, Family("unknown"))
    requirements = [("architecture", architecture, tuple(FAMILIES))]
    # transformers 5 writes rope_parameters, older versions rope_scaling.
    given = config.get("rope_parameters") or config.get("rope_scaling")
    local = None
    if isinstance(given, Mapping) and "full_attention" in given:
        given, local = given["full_attention"], given.get("sliding_attention")
    rope = _rotary(config, given)
    if architecture in FAMILIES:
        requirements += _requirements(config, family, rope, local)
    for key, value, known in requirements:
        if value not in known:
            raise InputError(
                f"GGUF export knows the {key} {' or '.join(map(str, known))}; got {value!r}; "
                "leave gguf out of convert.formats, and export to another format"
            )
    fixed = {key for key, _ in (*family.fixed, *family.numbers)}
    for key, default in (defaults or {}).items():
        if key not in _TRANSLATED | _NEUTRAL | fixed and config.get(key) != default:
            raise InputError(
                f"llama.cpp's {family.name} has no place for {key} {config.get(key)!r} of "
                f"config.json (the default is {default!r}); leave gguf out of convert.formats, and "
                "export to another format"
            )
    return family, rope


def _requirements(
    config: Mapping[str, Any],
    family: Family,
    rope: Mapping[str, Any],
    local: Mapping[str, Any] | None,
) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Yield what `check_architecture` checks: a name, the value, and the values that fit."""
    activation = config.get("hidden_activation") or config.get("hidden_act")
    yield "hidden_act", activation or family.activations[0], family.activations
    count, sliding = config["num_hidden_layers"], _window_layers(config, family)
    expected = [i for i in range(count) if family.period and i % family.period < family.period - 1]
    if sliding and not family.period:
        yield f"{family.name} without sliding windows; layers with a window", sliding, ([],)
    elif sliding:
        yield "layers with a sliding window", sliding, (expected,)
    if family.period:  # without a number, llama.cpp takes one of its own, or another graph
        is_positive = (config.get("sliding_window") or 0) > 0
        yield "sliding_window above 0:", is_positive, (True,)
    yield "rotary scaling", rope["rope_type"], family.scalings
    yield from _rotary_requirements(rope)
    if local is not None:
        yield "rotary scaling of layers with a window", local.get("rope_type"), ("default",)
        yield "rope_theta of layers with a window", local.get("rope_theta"), (10000.0,)
    elif family.name == "gemma3":
        theta = config.get("rope_local_base_freq", 10000.0)
        yield "rope_local_base_freq", theta, (10000.0,)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if scalar := family.large and config.get("query_pre_attn_scalar"):
        fits = config["hidden_size"] / heads if count == family.large else head_dim
        yield f"query_pre_attn_scalar of {count} blocks", scalar, (fits,)
    for key, values in family.fixed:
        if key in config:
            yield key, config[key], values
    if family.name == "olmoe":  # its norm of the keys has the width of the queries
        yield "num_key_value_heads of olmoe", config.get("num_key_value_heads") or heads, (heads,)
    if family.name == "gemma2":  # llama.cpp always caps scores and logits
        for key, _ in family.numbers:
            yield f"{key} above 0:", (config.get(key) or 0) > 0, (True,)
    if family.name == "smollm3":
        # llama.cpp leaves out the rotation in every fourth layer, even if the file says otherwise.
        every = config.get("no_rope_layer_interval", 4)
        layers = config.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(count)]
        yield "no_rope_layers", layers, ([int((i + 1) % 4 != 0) for i in range(count)],)


@dataclass(frozen=True)
class Entry:
    """A tensor of a GGUF file.

    Attributes:
        sources: The tensors of the safetensors that it is made of. Several become one tensor with
            another dimension. Empty: it is computed from config.json.
        half: Whether it is the upper (0) or lower half (1) of the rows of each expert. None: it is
            the whole.
    """

    sources: tuple[str, ...]
    half: int | None = None


class LlamaModel:
    """The model of a Hugging Face folder with llama.cpp's names and order of rows.

    Args:
        source: The folder.

    Attributes:
        architecture: llama.cpp's name of the architecture.
        config: The content of config.json, with the defaults of its class.
        entries: Name of a tensor in the GGUF file -> what it is made of.
        embedding: Name of the embedding in the safetensors.

    Raises:
        InputError: If `check_architecture` raises it, or if tensors are missing, or have no place
            in llama.cpp's model.
    """

    def __init__(self, source: ModelFolder):
        self._source = source
        self.config, defaults = read_as_transformers(source)
        family, self._rope = check_architecture(self.config, defaults)
        self.architecture, self._family = family.name, family
        query = self.config["num_attention_heads"]
        self._heads = {
            "q_proj": query,
            "k_proj": self.config.get("num_key_value_heads") or query,
        }
        self._head_dim = self.config.get("head_dim") or self.config["hidden_size"] // query
        self._rotary_dim = int(self._rope["partial_rotary_factor"] * self._head_dim)
        self.embedding = f"{family.outside[0]}.weight"
        self.entries = self._find_entries()

    def _find_entries(self) -> dict[str, Entry]:
        """Return the tensors of the file, after a check that nothing is missing or left over."""
        gguf, family, count = import_optional("gguf"), self._family, self._blocks
        arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        table = gguf.get_tensor_name_map(arch, count)
        left = dict.fromkeys(self._source.shapes)
        parts = [f"{family.blocks}.{i}.{part}" for i in range(count) for part in family.block]
        needed = [*parts, *family.outside]
        if not self.config.get("tie_word_embeddings", family.is_tied):
            needed.append(family.head)
        elif self._head_is_a_copy():
            left.pop(f"{family.head}.weight", None)
        needed = [f"{name}.weight" for name in needed]
        if family.has_biases:
            needed += [f"{name}.bias" for name in parts]
        entries, missing = {}, [name for name in needed if name not in left]
        for block in range(count if family.experts else 0):
            for name, entry in self._find_experts(f"{family.blocks}.{block}.", left).items():
                entries[f"{table.get_name(name)}.weight"] = entry
        if missing:
            raise InputError(
                f"{missing[0]} is missing in the {self.architecture} of {count} layers that "
                "config.json describes; use the config that belongs to the model"
            )
        for name in left:
            module, _, kind = name.rpartition(".")
            ours = table.get_name(name, (".weight", ".bias"))
            if kind == "bias" and not family.has_biases:
                in_block = module.removeprefix(family.blocks).partition(".")[2].partition(".")[2]
                ours = ours if in_block in family.biases else None
            if not ours or ours in entries:
                raise InputError(
                    f"{name} has no place in llama.cpp's {self.architecture} of {count} layers; "
                    "leave gguf out of convert.formats, or use the config.json that belongs to the "
                    "model"
                )
            entries[ours] = Entry((name,))
        if self._rope["rope_type"] == "llama3":
            entries[ROPE_FACTORS] = Entry(())
        return entries

    def _head_is_a_copy(self) -> bool:
        """Return whether the files have no head besides the embedding, or the embedding twice.

        transformers uses a head of its own even if config.json says that the head is tied.
        """
        head = f"{self._family.head}.weight"
        if head not in self._source.shapes or self.embedding not in self._source.shapes:
            return True
        first, second = (
            SafetensorsFolder.read(self._source, name) for name in (head, self.embedding)
        )
        return torch.equal(first, second)

    def _find_experts(self, block: str, left: dict[str, None]) -> dict[str, Entry]:
        """Return name in the gguf package's table -> the tensors of a block's experts.

        Args:
            block: The name of the block, with a dot.
            left: The names in the files. Those of the experts are removed.

        Raises:
            InputError: If a tensor is missing.
        """
        experts = self._family.experts
        assert experts is not None
        count = next(self.config[key] for key in experts.count if key in self.config)
        module = f"{block}{experts.module}"
        # The package knows these names for all families.
        names = [f"{block}mlp.experts.{part}_proj" for part in ("gate", "up", "down")]
        fused = [f"{module}.{part}" for part in experts.fused]
        found = {
            names[0]: Entry((fused[0],), 0),
            names[1]: Entry((fused[0],), 1),
            names[2]: Entry((fused[1],)),
        }
        if not set(fused) & left.keys():
            found = {
                name: Entry(tuple(f"{module}.{i}.{part}.weight" for i in range(count)))
                for name, part in zip(names, experts.parts, strict=True)
            }
        for source in dict.fromkeys(source for entry in found.values() for source in entry.sources):
            if source not in left:
                raise InputError(
                    f"{source} is missing in the {self.architecture} of {count} experts that "
                    "config.json describes; use the config that belongs to the model"
                )
            del left[source]
        return found

    @property
    def _blocks(self) -> int:
        return self.config["num_hidden_layers"]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor's name in the file, and its value in llama.cpp's row order."""
        for name, entry in self.entries.items():
            yield name, self._tensor(entry)

    def numel(self, name: str) -> int:
        """Return the number of values of a tensor of the file."""
        entry = self.entries[name]
        if not entry.sources:
            return self._head_dim // 2  # `rope_factors`
        count = sum(self._source.shapes[source].numel() for source in entry.sources)
        return count // (1 if entry.half is None else 2)

    def _tensor(self, entry: Entry) -> torch.Tensor:
        """Return the value of a tensor of the file."""
        if not entry.sources:
            return self.rope_factors()
        name, *others = entry.sources
        tensor = self._source.read(name)
        if others:  # (experts, out_features, in_features)
            return torch.stack([tensor, *map(self._source.read, others)])
        if entry.half is not None:
            return tensor.chunk(2, dim=1)[entry.half].contiguous()
        part = name.split(".")[-2]
        if part == "query_key_value":  # GPT-NeoX has query, key and value of each head together
            each = tensor.unflatten(0, (self._heads["q_proj"], 3, self._head_dim))
            return each.transpose(0, 1).reshape(tensor.shape)
        if self._family.pairs_rows and part in self._heads:
            # (heads, 2 halves, head_dim / 2, ...) -> (heads, head_dim / 2, pairs, ...)
            halves = tensor.unflatten(0, (self._heads[part], 2, -1))
            return halves.transpose(1, 2).reshape(tensor.shape)
        if self._family.shifts_norms and name.endswith("norm.weight"):
            return 1 + tensor.float()  # as transformers computes it
        return tensor

    def rope_factors(self) -> torch.Tensor:
        """Return Llama 3's divisors of the rotary frequencies, float32 (head_dim / 2,).

        A wavelength below context / high_freq_factor keeps its frequency. A wavelength above
        context / low_freq_factor has its frequency divided by ``factor``. Between the two, the
        frequency is a linear blend.
        """
        rope = self._rope
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        exponents = torch.arange(0, self._head_dim, 2, dtype=torch.float64) / self._head_dim
        wavelengths = 2 * math.pi * rope["rope_theta"] ** exponents
        turns = rope["original_max_position_embeddings"] / wavelengths
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 / ((1 - blend) / rope["factor"] + blend)).float()

    def add_to(self, writer: Any) -> None:
        """Add the hyperparameters to a ``gguf.GGUFWriter``."""
        config, family, rope = self.config, self._family, self._rope
        writer.add_block_count(self._blocks)
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(self._heads["q_proj"])
        writer.add_head_count_kv(self._heads["k_proj"])
        writer.add_key_length(self._head_dim)
        writer.add_value_length(self._head_dim)
        if family.has_biases:
            writer.add_layer_norm_eps(config["layer_norm_eps"])
        else:
            writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        if "use_parallel_residual" in config:
            writer.add_parallel_residual(config["use_parallel_residual"])
        for key, method in family.numbers:
            getattr(writer, method)(config.get(key, 1.0))
        if family.period:
            writer.add_sliding_window(config["sliding_window"])
        if experts := family.experts:
            writer.add_expert_count(next(config[key] for key in experts.count if key in config))
            writer.add_expert_used_count(config["num_experts_per_tok"])
            writer.add_expert_feed_forward_length(config[experts.width])
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(self._rotary_dim)
        writer.add_rope_freq_base(rope["rope_theta"])
        kinds = import_optional("gguf").RopeScalingType
        if rope["rope_type"] in ("linear", "yarn"):
            writer.add_rope_scaling_type(kinds[rope["rope_type"].upper()])
            writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


# From here on: the tokenizer.
_SPACE = "\u2581"  # SentencePiece's space
_REMEDY = "leave gguf out of convert.formats, and export to another format"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPLIT_WORDS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT_CASES = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}*{_LETTERS[1]}+%s|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}+{_LETTERS[1]}*%s|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Regular expression -> (llama.cpp's name; the name if words of the vocabulary need no merges).
_SPLIT_NAMES = {
    _SPLIT_WORDS % r"\p{N}{1,3}": ("dbrx", "llama-bpe"),
    _SPLIT_WORDS % r"\p{N}": ("qwen2", None),
    _SPLIT_CASES % ("", "", r"\p{N}"): (None, "tekken"),
    _SPLIT_CASES % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", r"\p{N}{1,3}"): ("gpt-4o", None),
}


def add_vocabulary(writer: Any, folder: Path, config: Mapping[str, Any]) -> None:
    """Add the tokenizer of a Hugging Face folder to a GGUF file.

    The file gets the tokens, the special tokens, the rules for BOS and EOS, and the chat template.

    Args:
        writer: The ``gguf.GGUFWriter``.
        folder: A folder with ``tokenizer.json``. The names of special tokens are in its
            ``tokenizer_config.json``.
        config: The model's config.json. It has the ids of special tokens without a name. An id
            below its ``vocab_size`` without a token becomes an unused token.

    Raises:
        InputError: If ``tokenizer.json`` is missing, if llama.cpp has no tokenizer for it, or if it
            has more tokens than the model.
    """
    gguf = import_optional("gguf")
    file, settings_file = folder / "tokenizer.json", folder / "tokenizer_config.json"
    tokenizer = read_json(file)
    settings = read_json(settings_file) if settings_file.is_file() else {}
    name = _split_name(tokenizer, file)
    is_sentencepiece = name == "default"
    tokens, types = _tokens(tokenizer, settings, config["vocab_size"], file)
    encoder = _encoder(file)
    _require_translatable(tokenizer, encoder, file, is_sentencepiece)
    if not is_sentencepiece and not tokenizer["model"].get("merges"):
        raise InputError(
            f"llama.cpp loads no BPE tokenizer without merges, and {file} has none; {_REMEDY}"
        )
    special = gguf.SpecialVocab(folder, load_merges=True, special_token_types=())
    writer.add_tokenizer_model("llama" if is_sentencepiece else "gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if is_sentencepiece:
        writer.add_token_scores(_scores(tokens, types, special.merges))
        special.merges, special.load_merges = [], False
    for kind in ("bos", "eos", "unk", "pad"):
        token = settings.get(f"{kind}_token") or ""
        index = encoder.token_to_id(token["content"] if isinstance(token, dict) else token)
        if index is None:
            index = config.get(f"{kind}_token_id")
            index = index[0] if isinstance(index, list) else index
        if index is not None:
            special.special_token_ids[kind] = index
    ends = end_ids(folder, config)
    if others := [index for index in ends if index != special.special_token_ids.get("eos")]:
        special.special_token_ids["eot"] = others[0]
    encoding = encoder.encode("a")
    added = [bool(mask) for mask in encoding.special_tokens_mask]
    has_space = encoding.tokens[added.index(False)].startswith(_SPACE)
    writer.add_add_space_prefix(is_sentencepiece and has_space)
    adds = {"bos": added[0], "eos": added[-1]}
    if not any(added):
        adds = {kind: bool(settings.get(f"add_{kind}_token")) for kind in adds}
    else:
        _require_ends(encoding, adds, special.special_token_ids, file)
    special.add_special_token = adds
    if (template := folder / "chat_template.jinja").is_file():  # it precedes the tokenizer's own
        special.chat_template = template.read_text(encoding="utf-8")
    special.add_to_gguf(writer, quiet=True)


def end_ids(folder: Path, config: Mapping[str, Any]) -> list[int]:
    """Return the ids that end a text or a reply, from generation_config.json or config.json."""
    file = folder / "generation_config.json"
    given = (read_json(file) if file.is_file() else {}).get("eos_token_id")
    given = config.get("eos_token_id") if given is None else given
    ids = given if isinstance(given, list) else [given]
    return [index for index in ids if isinstance(index, int)]


def _encoder(file: Path) -> Tokenizer:
    """Return a tokenizer that neither cuts nor fills texts, as transformers uses it."""
    encoder = Tokenizer.from_file(str(file))
    encoder.no_padding()
    encoder.no_truncation()
    return encoder


def _split_name(tokenizer: dict, file: Path) -> str:
    """Return llama.cpp's name of a tokenizer's split into words; "default" for SentencePiece."""
    model, pre_tokenizer = tokenizer["model"], tokenizer.get("pre_tokenizer")
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer]) if pre_tokenizer else []
    kinds = [model.get("type", "BPE"), *(step["type"] for step in steps)]
    if model.get("byte_fallback") and kinds[0] == "BPE":
        # Gemma splits at spaces, and its normalizer has left none.
        idle = [step for step in steps if step.get("pattern") == {"String": " "}]
        if kinds in (["BPE"], ["BPE", "Metaspace"]) or (kinds == ["BPE", "Split"] and idle):
            return "default"
    if kinds[-1] == "ByteLevel" and not steps[-1].get("add_prefix_space"):
        own_words, whole = steps[-1].get("use_regex", True), bool(model.get("ignore_merges"))
        if kinds == ["BPE", "ByteLevel"] and own_words and not whole:
            return "gpt-2"
        digits = kinds == ["BPE", "Digits", "ByteLevel"] and steps[0]["individual_digits"]
        if digits and own_words and not whole:
            return "smollm"
        if kinds == ["BPE", "Split", "ByteLevel"] and not own_words:
            pattern, first = steps[0]["pattern"].get("Regex"), steps[0]
            plain = first["behavior"] == "Isolated" and not first.get("invert")
            if plain and (name := _SPLIT_NAMES.get(pattern, (None, None))[whole]):
                return name
    raise InputError(
        "GGUF export knows the tokenizers Llama 3, Qwen2, SmolLM, GPT-2, GPT-4o, Tekken and "
        f"SentencePiece BPE; {file} ({' + '.join(kinds)}"
        f"{', ignore_merges' if model.get('ignore_merges') else ''}) is none of them; {_REMEDY}"
    )


def _steps(part: dict | None) -> Iterator[dict]:
    """Yield the steps of a normalizer, also of one in another."""
    if part is not None and part["type"] == "Sequence":
        for step in part["normalizers"]:
            yield from _steps(step)
    elif part is not None:
        yield part


def _require_translatable(
    tokenizer: dict, encoder: Tokenizer, file: Path, is_sentencepiece: bool
) -> None:
    """Raise InputError if llama.cpp would give other ids because it leaves a part out.

    Args:
        tokenizer: The content of tokenizer.json.
        encoder: The same tokenizer.
        file: Its path, for the error.
        is_sentencepiece: Whether it is written as SentencePiece BPE.
    """
    model = tokenizer["model"]
    for step in _steps(tokenizer.get("normalizer")):
        own = [
            step == {"type": "Prepend", "prepend": _SPACE},
            step == {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        ]
        if is_sentencepiece and any(own):
            continue
        if step["type"] == "NFC" and not is_sentencepiece:
            log.warning(
                f"llama.cpp leaves out the normalizer NFC of {file}; a text with accents as "
                "characters of their own (NFD) gets other tokens there"
            )
            continue
        raise InputError(
            f"llama.cpp has no normalizer; {file} has {step['type']}, which changes the text "
            f"before it is split, so a GGUF file would give other tokens; {_REMEDY}"
        )
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise InputError(
                f"llama.cpp has no {key} of a tokenizer; {file} has {model[key]!r}; {_REMEDY}"
            )
    if is_sentencepiece:
        bytes_ = [f"<0x{index:02X}>" for index in range(256)]
        if missing := [token for token in bytes_ if token not in model["vocab"]]:
            raise InputError(
                f"llama.cpp needs a token for every byte; {file} lacks {missing[0]} and "
                f"{len(missing) - 1} others; {_REMEDY}"
            )
    for token in tokenizer.get("added_tokens", []):
        content = token["content"]
        flags = [key for key in ("lstrip", "rstrip", "single_word") if token.get(key)]
        if token.get("normalized") and encoder.normalizer is not None:
            flags += ["normalized"] * (encoder.normalizer.normalize_str(content) != content)
        # Masks are in no text of a decoder.
        if flags and content not in ("<mask>", "[MASK]") and not _strips_phi(tokenizer, flags):
            raise InputError(
                f"llama.cpp has no {flags[0]} of an added token; {file} has it for {content!r}, so "
                f"a GGUF file would give other tokens beside it; set it to false in {file.name}, "
                f"or {_REMEDY}"
            )


def _strips_phi(tokenizer: dict, flags: list[str]) -> bool:
    """Return whether rstrip is that of Phi-3, which llama.cpp knows by the model's name."""
    contents = {token["content"] for token in tokenizer.get("added_tokens", [])}
    return flags == ["rstrip"] and {"<|assistant|>", "<|end|>", "<|placeholder1|>"} <= contents


def _require_ends(
    encoding: Any, adds: Mapping[str, bool], ids: Mapping[str, int], file: Path
) -> None:
    """Raise InputError if a text gets more than BOS before it and EOS behind it.

    Args:
        encoding: The encoding of a text.
        adds: Whether the file says that BOS and EOS are added.
        ids: Their ids in the file.
        file: The tokenizer.json, for the error.
    """
    mask = encoding.special_tokens_mask
    first, last = mask.index(0), mask[::-1].index(0)
    found = encoding.ids[:first], encoding.ids[len(mask) - last :]
    expected = tuple([ids.get(kind)] if adds[kind] else [] for kind in ("bos", "eos"))
    if found != expected:
        names = [token for token, is_added in zip(encoding.tokens, mask, strict=True) if is_added]
        raise InputError(
            "llama.cpp adds nothing to a text but bos_token before it and eos_token behind it; the "
            f"post_processor of {file} adds {' '.join(names)}; make it add these two, or {_REMEDY}"
        )


def _tokens(
    tokenizer: dict, settings: dict, vocab_size: int, file: Path
) -> tuple[list[str], list[int]]:
    """Return the token and the type of every id below ``vocab_size``."""
    from gguf import TokenType

    model = tokenizer["model"]
    by_id = {index: (token, TokenType.NORMAL) for token, index in model["vocab"].items()}
    added = {int(index): token for index, token in settings.get("added_tokens_decoder", {}).items()}
    added |= {token["id"]: token for token in tokenizer.get("added_tokens", [])}
    for index, token in added.items():
        kind = TokenType.CONTROL if token.get("special") else TokenType.USER_DEFINED
        by_id[index] = (token["content"], kind)
    if model.get("byte_fallback"):
        for index, (token, kind) in by_id.items():
            if token == model.get("unk_token"):
                by_id[index] = (token, TokenType.UNKNOWN)
            elif kind == TokenType.NORMAL and len(token) == 6 and token.startswith("<0x"):
                by_id[index] = (token, TokenType.BYTE)
    if max(by_id) >= vocab_size:
        raise InputError(
            f"the model has {vocab_size} token ids, but {file} has ids up to {max(by_id)}; use the "
            "tokenizer that belongs to the model"
        )
    filled = [by_id.get(i, (f"[PAD{i}]", TokenType.UNUSED)) for i in range(vocab_size)]
    return [token for token, _ in filled], [kind for _, kind in filled]


def _scores(tokens: list[str], types: list[int], merges: list[str]) -> list[float]:
    """Return minus the rank of the first merge that makes each token, or 0 if no merge makes it."""
    from gguf import TokenType

    rank = {}
    for index, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), index)
    pieces = (t for t, kind in zip(tokens, types, strict=True) if kind == TokenType.NORMAL)
    if unmade := [piece for piece in pieces if len(piece) > 1 and piece not in rank]:
        log.warning("no merge makes %s, but llama.cpp may still use it", unmade[0])
    return [-float(rank.get(token, 0)) for token in tokens]


# Texts whose ids `check_tokens` compares. A text with accents as characters of their own is not
# among them, because NFC is a warning.
_TEXTS = (
    "Hello world! It's 1234567 o'clock; we'll SEE: I'M here, YOU'RE not.",
    "  two spaces, a tab\tand trailing spaces   ",
    "def main():\n    for i in range(10):\n        print(f'{i:>3}  items')\n\n\n\treturn None\r\n",
    "Straße, naïve café, ÉCOLE, İstanbul — “quoted” £5 €3 №7 ½ ²",
    "日本語のテキスト。中文文本，标点。한국어 텍스트",
    "Привет, мир! Γειά σου. שלום עולם مرحبا نص हिन्दी पाठ ไทย",
    "ｆｕｌｌ ｗｉｄｔｈ ﬁ ﬂ ™ … ①②③ 🙂👍🏽 👨‍👩‍👧",
    "\n",
    "   ",
    " a",
    "a\u00a0b\u200bc\u2028d",
    '{"key": [1, -2.5e10, true]}  // https://example.com/path?q=1&r=2#x',
)


def check_tokens(folder: Path, config: Mapping[str, Any]) -> None:
    """Compare the ids of a few texts in the installed llama.cpp with those of tokenizer.json.

    Without xllamacpp, or if it gives no answer, nothing is compared.

    Args:
        folder: The folder of the tokenizer.
        config: The model's config.json.

    Raises:
        InputError: If ids differ.
    """
    if not llama_cpp.is_installed():
        return
    files = [folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
    files += [folder / "generation_config.json"]
    content = b"|".join(file.read_bytes() for file in files if file.is_file())
    keys = ("vocab_size", "bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id")
    ids = tuple((key, str(config.get(key))) for key in keys)
    different = _first_difference(folder, hashlib.sha256(content).hexdigest(), ids, _Config(config))
    if different is not None:
        text, ours, theirs = different
        raise InputError(
            f"the installed llama.cpp has other tokens than {folder / 'tokenizer.json'}: for "
            f"{text!r} the ids {theirs} instead of {ours}; {_REMEDY}"
        )


class _Config(dict):
    """A config.json that does not count for the cache, which has its relevant keys."""

    def __hash__(self) -> int:  # type: ignore[override]
        return 0

    def __eq__(self, other: object) -> bool:
        return True


@functools.lru_cache(maxsize=64)
def _first_difference(
    folder: Path, digest: str, ids: tuple[tuple[str, str], ...], config: _Config
) -> tuple[str, list[int], list[int]] | None:
    """Return a text, its ids, and its other ids in llama.cpp. None: there is no difference."""
    log.info("comparing token ids with llama.cpp (some seconds)")
    encoder = _encoder(folder / "tokenizer.json")
    added = encoder.get_added_tokens_decoder().values()
    texts = [(text, False) for text in _TEXTS]
    plain = [token.content for token in added if not token.special]
    texts += [(f"a {content} b{content}", False) for content in plain[:: len(plain) // 16 + 1]]
    special = [token.content for token in added if token.special]
    special = [content for content in special if content not in ("<mask>", "[MASK]")]
    texts += [(f"a {c}\nb{c} c", True) for c in special[:: len(special) // 16 + 1]]
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "tokenizer.gguf"
        _write_probe(file, folder, config)
        answers = llama_cpp.ask([{"file": str(file), "texts": texts}], 60)
    if not answers or "tokens" not in answers[0]:
        log.debug("llama.cpp gave no token ids: %s", answers)
        return None
    adds = any(encoder.encode("a").special_tokens_mask)
    for (text, _), theirs in zip(texts, answers[0]["tokens"], strict=True):
        ours = encoder.encode(text).ids
        # What tokenizer_config.json adds, this encoder does not add.
        if theirs != ours and (adds or theirs[len(theirs) - len(ours) :] != ours):
            return text, ours, theirs
    return None


def _write_probe(file: Path, folder: Path, config: Mapping[str, Any]) -> None:
    """Write a GGUF file with a tokenizer and the smallest model that llama.cpp loads."""
    import gguf

    width, writer = 32, gguf.GGUFWriter(file, "llama")
    writer.add_name(folder.name)
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(width)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(config["vocab_size"])
    add_vocabulary(writer, folder, config)
    writer.add_tensor("token_embd.weight", np.zeros((config["vocab_size"], width), np.float16))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for part in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{part}.weight", np.ones(width, np.float32))
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{part}.weight", np.zeros((width, width), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
