"""A Hugging Face tokenizer as GGUF metadata.

llama.cpp does not run ``tokenizer.json``: it has tokenizers of its own, selected by name. Two
families are known here, told apart by the structure of ``tokenizer.json``; anything else is an
error rather than a guess, because a wrong name gives other token ids without a complaint.

    byte-level BPE ("gpt2")     the regular expression that cuts the text has a name:
                                llama-bpe, qwen2, smollm, gpt-2
    SentencePiece BPE ("llama") pieces with U+2581 for a space and bytes as <0x00>; its merges
                                become scores, the earlier the higher

Merges and chat templates are read, and with the special tokens written, by ``gguf.SpecialVocab``,
which overlooks special tokens that are no added tokens: those are looked up here. What is added to
a text is seen on a text that the tokenizers library encodes.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer

from hestia_tune.errors import InputError
from hestia_tune.files import read_json

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
