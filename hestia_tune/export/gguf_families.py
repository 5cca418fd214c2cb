"""The families of models that llama.cpp computes as transformers does, and how it stores them.

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
neighbouring rows for some families, so rows of the query and key projections change their order.
GPT-NeoX keeps query, key and value of one head together, and llama.cpp keeps all queries together.
Gemma multiplies by 1 + w in a norm, and the file has 1 + w. The matrices of experts become one
tensor with three dimensions, whether the files have one tensor for each matrix or for all.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hestia_tune.errors import InputError
from hestia_tune.models.folder import ModelFolder, SafetensorsFolder, import_optional

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
        pairs_rows: Whether llama.cpp rotates neighbouring rows of a head instead of its halves.
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
