"""Translates a Hugging Face model and its tokenizer to llama.cpp's names and orders.

**Model.** The gguf package knows the names of tensors and hyperparameters. Two more things differ.
First, the order of rows. Hugging Face rotates the two halves of a head. llama.cpp rotates
neighbouring pairs for Llama, Mistral, SmolLM3 and Granite, so the rows of their query and key
projections change their order. For the other families it rotates halves. GPT-NeoX keeps query, key
and value of one head together, and llama.cpp keeps the queries of all heads together. Second, the
rotary factors for Llama 3's long context become a tensor. With tied embeddings, llama.cpp uses the
embedding as output matrix. `hestia_tune.export.gguf_families` has the table of families.

**Tokenizer.** llama.cpp does not run ``tokenizer.json``. It has its own tokenizers and selects one
by name. Two families are known here. The structure of ``tokenizer.json`` shows the family. Any
other tokenizer is an error, because llama.cpp does not notice a wrong name and gives other token
ids.

    byte-level BPE ("gpt2")     the regular expression that splits the text has a name:
                                llama-bpe, dbrx, qwen2, smollm, gpt-2
    SentencePiece BPE ("llama") pieces have U+2581 for a space and <0x00> for a byte; merges become
                                scores, and earlier merges have higher scores

``gguf.SpecialVocab`` reads merges and chat templates and writes them with the special tokens. It
finds special tokens only among the added tokens, so special tokens are looked up here. To see which
tokens are added to a text, the tokenizers library encodes a text.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from hestia_tune.errors import InputError
from hestia_tune.export.gguf_families import check_architecture
from hestia_tune.files import read_json
from hestia_tune.models.folder import ModelFolder, import_optional

log = logging.getLogger(__name__)
ROPE_FACTORS = "rope_freqs.weight"


class LlamaModel:
    """Read the model of a Hugging Face folder with llama.cpp's names and order of rows.

    Args:
        source: The folder.

    Attributes:
        architecture: llama.cpp's name of the architecture.
        names: Name in the safetensors -> name in the GGUF file, for every tensor in the GGUF file.

    Raises:
        InputError: If `check_architecture` raises it, or if tensors are missing or unknown.
    """

    def __init__(self, source: ModelFolder):
        self._source, config = source, source.config
        family, self._rope = check_architecture(config)
        self.architecture, self._family = family.name, family
        query = config["num_attention_heads"]
        self._heads = {"q_proj": query, "k_proj": config.get("num_key_value_heads") or query}
        self._head_dim = config.get("head_dim") or config["hidden_size"] // query
        self._rotary_dim = int(self._rope["partial_rotary_factor"] * self._head_dim)
        gguf, count = import_optional("gguf"), config["num_hidden_layers"]
        table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[self.architecture.upper()], count)
        names = {n: table.get_name(n, (".weight", ".bias")) or "" for n in source.shapes}
        parts = [f"{family.blocks}.{i}.{part}" for i in range(count) for part in family.block]
        needed = [*parts, *family.outside]
        if config.get("tie_word_embeddings", family.is_tied):
            names.pop(f"{family.head}.weight", None)  # a copy of the embedding
        else:
            needed.append(family.head)
        kinds = ("weight", "bias") if family.has_biases else ("weight",)
        parts = set(parts)
        problems = [
            f"{name}.{kind} is missing"
            for name in needed
            for kind in (kinds if name in parts else ("weight",))
            if f"{name}.{kind}" not in names
        ]
        problems += [f"{name} is unknown" for name, ours in names.items() if not ours]
        if problems:
            raise InputError(
                f"{problems[0]} in the {self.architecture} of {count} layers that config.json "
                "describes; use the config that belongs to the model"
            )
        if self._rope["rope_type"] == "llama3":
            names[ROPE_FACTORS] = ROPE_FACTORS
        self.names = names

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor's name in the safetensors, and its value in llama.cpp's row order."""
        for name in self.names:
            if name == ROPE_FACTORS:
                yield name, self.rope_factors()
                continue
            tensor, part = self._source.read(name), name.split(".")[-2]
            if part == "query_key_value":  # GPT-NeoX has query, key and value of each head together
                each = tensor.unflatten(0, (self._heads["q_proj"], 3, self._head_dim))
                tensor = each.transpose(0, 1).reshape(tensor.shape)
            elif self._family.pairs_rows and part in self._heads:
                # (heads, 2 halves, head_dim / 2, ...) -> (heads, head_dim / 2, pairs, ...)
                halves = tensor.unflatten(0, (self._heads[part], 2, -1))
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
            yield name, tensor

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
        config = self._source.config
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(self._heads["q_proj"])
        writer.add_head_count_kv(self._heads["k_proj"])
        writer.add_key_length(self._head_dim)
        writer.add_value_length(self._head_dim)
        if self._family.has_biases:
            writer.add_layer_norm_eps(config["layer_norm_eps"])
        else:
            writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        if "use_parallel_residual" in config:
            writer.add_parallel_residual(config["use_parallel_residual"])
        for key, method in self._family.multipliers:
            getattr(writer, method)(config.get(key, 1.0))
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(self._rotary_dim)
        writer.add_rope_freq_base(self._rope["rope_theta"])
        if self._rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(import_optional("gguf").RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(self._rope["factor"])


_SPLIT_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT_NAMES = {_SPLIT_WORDS % r"\p{N}{1,3}": "dbrx", _SPLIT_WORDS % r"\p{N}": "qwen2"}


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
    encoding = encoder.encode("a")
    added = [bool(mask) for mask in encoding.special_tokens_mask]
    has_space = encoding.tokens[added.index(False)].startswith("\u2581")
    writer.add_add_space_prefix(is_sentencepiece and has_space)
    ends = {"bos": added[0], "eos": added[-1]}
    if not any(added):
        ends = {kind: bool(settings.get(f"add_{kind}_token")) for kind in ends}
    special.add_special_token = ends
    for kind in ("bos", "eos", "unk", "pad"):
        token = settings.get(f"{kind}_token") or ""
        index = encoder.token_to_id(token["content"] if isinstance(token, dict) else token)
        if index is None:
            index = config.get(f"{kind}_token_id")
            index = index[0] if isinstance(index, list) else index
        if index is not None:
            special.special_token_ids[kind] = index
    if (template := folder / "chat_template.jinja").is_file():  # it precedes the tokenizer's own
        special.chat_template = template.read_text(encoding="utf-8")
    special.add_to_gguf(writer, quiet=True)


def _split_name(tokenizer: dict, file: Path) -> str:
    """Return llama.cpp's name of a tokenizer's split into words; "default" for SentencePiece."""
    model, pre_tokenizer = tokenizer["model"], tokenizer.get("pre_tokenizer")
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer]) if pre_tokenizer else []
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
                name = _SPLIT_NAMES[pattern]
                # "llama-bpe" splits like "dbrx", but takes a word of the vocabulary without merges.
                return "llama-bpe" if name == "dbrx" and model.get("ignore_merges") else name
    raise InputError(
        "GGUF export knows the tokenizers Llama 3, Qwen2, SmolLM, GPT-2 and SentencePiece BPE; "
        f"{file} ({' + '.join(kinds)}) is none of them; export to another format"
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
