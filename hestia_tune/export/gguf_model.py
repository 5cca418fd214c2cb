"""A Hugging Face model and its tokenizer as llama.cpp names and orders them.

**Model.** The gguf package knows the names of tensors and hyperparameters. Two things differ
besides. First, Hugging Face rotates the two halves of a head, and llama.cpp rotates neighbouring
pairs for Llama, Mistral and SmolLM3, so the rows of the query and key projections change their
order (Qwen2 and Qwen3 keep the halves). Second, Llama 3's long-context rotary factors become a
tensor. With tied embeddings llama.cpp takes the embedding as the output matrix.

**Tokenizer.** llama.cpp does not run ``tokenizer.json``: it has tokenizers of its own, selected
by name. Two families are known here, recognised by the structure of ``tokenizer.json``. Anything
else is an error, because a wrong name gives other token ids without a complaint.

    byte-level BPE ("gpt2")     the regular expression that cuts the text has a name:
                                llama-bpe, qwen2, smollm, gpt-2
    SentencePiece BPE ("llama") pieces with U+2581 for a space and bytes as <0x00>; its merges
                                become scores, the earlier the higher

``gguf.SpecialVocab`` reads merges and chat templates and writes them with the special tokens. It
overlooks special tokens that are not added tokens, which are looked up here. What is added to a
text is read off a text that the tokenizers library encodes.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import Tokenizer

from hestia_tune.errors import InputError
from hestia_tune.files import read_json
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


log = logging.getLogger(__name__)

_SPLIT_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT_NAMES = {_SPLIT_WORDS % r"\p{N}{1,3}": "llama-bpe", _SPLIT_WORDS % r"\p{N}": "qwen2"}


def add_vocabulary(writer: Any, folder: Path, config: Mapping[str, Any]) -> None:
    """Adds the tokenizer of a Hugging Face folder to a ``gguf.GGUFWriter``: tokens, special tokens,
    what is added to a text, and the chat template.

    Args:
        folder: with ``tokenizer.json``; ``tokenizer_config.json`` names the special tokens.
        config: the model's, has the ids of special tokens that are not named. Ids up to its
            ``vocab_size`` without a token are filled up as unused.

    Raises:
        InputError: without ``tokenizer.json``; or if llama.cpp has no tokenizer for it, or it has
            more tokens than the model.
    """
    file, settings_file = folder / "tokenizer.json", folder / "tokenizer_config.json"
    tokenizer = read_json(file)
    settings = read_json(settings_file) if settings_file.is_file() else {}
    name = _split_name(tokenizer, file)
    is_sentencepiece = name == "default"
    tokens, types = _tokens(tokenizer, settings, config["vocab_size"], file)
    special = gguf.SpecialVocab(folder, load_merges=True, special_token_types=())
    writer.add_tokenizer_model("llama" if is_sentencepiece else "gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if is_sentencepiece:
        writer.add_token_scores(_scores(tokens, types, special.merges))
        special.merges, special.load_merges = [], False
    encoder = Tokenizer.from_file(str(file))
    encoder.no_padding()
    seen = encoder.encode("a")
    added = [bool(mask) for mask in seen.special_tokens_mask]
    has_space = seen.tokens[added.index(False)].startswith("\u2581")
    writer.add_add_space_prefix(is_sentencepiece and has_space)
    ends = {"bos": added[0], "eos": added[-1]}
    if not any(added):
        ends = {kind: bool(settings.get(f"add_{kind}_token")) for kind in ends}
    special.add_special_token = ends
    for kind in ("bos", "eos", "unk", "pad"):
        token, index = settings.get(f"{kind}_token") or "", config.get(f"{kind}_token_id")
        found = encoder.token_to_id(token["content"] if isinstance(token, dict) else token)
        index = index[0] if isinstance(index, list) else index
        if found is not None or index is not None:
            special.special_token_ids[kind] = index if found is None else found
    if (template := folder / "chat_template.jinja").is_file():  # before the tokenizer's own
        special.chat_template = template.read_text(encoding="utf-8")
    special.add_to_gguf(writer, quiet=True)


def _split_name(tokenizer: dict, file: Path) -> str:
    """llama.cpp's name of how text is cut; that of SentencePiece is "default"."""
    model, cut = tokenizer["model"], tokenizer.get("pre_tokenizer")
    steps = cut.get("pretokenizers", [cut]) if cut else []
    kinds = [model.get("type", "BPE"), *(step["type"] for step in steps)]
    if model.get("byte_fallback") and kinds in (["BPE"], ["BPE", "Metaspace"]):
        return "default"
    if kinds[-1] == "ByteLevel" and not steps[-1].get("add_prefix_space"):
        own_words = steps[-1].get("use_regex", True)
        if kinds == ["BPE", "ByteLevel"] and own_words:
            return "gpt-2"
        if kinds == ["BPE", "Digits", "ByteLevel"] and own_words and steps[0]["individual_digits"]:
            return "smollm"
        if kinds == ["BPE", "Split", "ByteLevel"] and not own_words:
            pattern = steps[0]["pattern"].get("Regex")
            if steps[0]["behavior"] == "Isolated" and pattern in _SPLIT_NAMES:
                return _SPLIT_NAMES[pattern]
    raise InputError(
        f"llama.cpp selects its tokenizer by name, and {file} ({' + '.join(kinds)}) is none of "
        "those known here (Llama 3, Qwen2, SmolLM, GPT-2, SentencePiece BPE); export to another "
        "format"
    )


def _tokens(
    tokenizer: dict, settings: dict, vocab_size: int, file: Path
) -> tuple[list[str], list[int]]:
    """Token and type of every id below ``vocab_size``."""
    model = tokenizer["model"]
    by_id = {index: (token, gguf.TokenType.NORMAL) for token, index in model["vocab"].items()}
    added = {int(index): token for index, token in settings.get("added_tokens_decoder", {}).items()}
    added |= {token["id"]: token for token in tokenizer.get("added_tokens", [])}
    for index, token in added.items():
        kind = gguf.TokenType.CONTROL if token.get("special") else gguf.TokenType.USER_DEFINED
        by_id[index] = (token["content"], kind)
    if model.get("byte_fallback"):
        for index, (token, kind) in by_id.items():
            if token == model.get("unk_token"):
                by_id[index] = (token, gguf.TokenType.UNKNOWN)
            elif kind == gguf.TokenType.NORMAL and len(token) == 6 and token.startswith("<0x"):
                by_id[index] = (token, gguf.TokenType.BYTE)
    if max(by_id) >= vocab_size:
        raise InputError(
            f"the model has {vocab_size} token ids, {file} has one up to {max(by_id)}; take the "
            "tokenizer that belongs to the model"
        )
    filled = [by_id.get(i, (f"[PAD{i}]", gguf.TokenType.UNUSED)) for i in range(vocab_size)]
    return [token for token, _ in filled], [kind for _, kind in filled]


def _scores(tokens: list[str], types: list[int], merges: list[str]) -> list[float]:
    """Minus the rank of the first merge that makes the token; 0 for those that no merge makes."""
    rank = {}
    for index, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), index)
    pieces = (t for t, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.NORMAL)
    if unmade := [piece for piece in pieces if len(piece) > 1 and piece not in rank]:
        log.warning("no merge makes %s, which llama.cpp may still use", unmade[0])
    return [-float(rank.get(token, 0)) for token in tokens]
