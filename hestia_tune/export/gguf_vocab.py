"""A Hugging Face tokenizer as GGUF metadata.

llama.cpp does not run ``tokenizer.json``: it has tokenizers of its own, selected by name. Two
families are known here, told apart by the structure of ``tokenizer.json``; anything else is an
error rather than a guess, because a wrong name gives other token ids without a complaint.

    byte-level BPE ("gpt2")     the regular expression that cuts the text has a name:
                                llama-bpe, qwen2, smollm, gpt-2
    SentencePiece BPE ("llama") pieces with U+2581 for a space and bytes as <0x00>; its merges
                                become scores, the earlier the higher

Merges and chat templates are read, and with the special tokens written, by ``gguf.SpecialVocab``.
Which special tokens there are is decided here: it overlooks those that are no added tokens, and
takes the flags of ``tokenizer_config.json`` over what ``tokenizer.json`` does to a text.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hestia_tune.export.gguf_blocks import import_gguf

log = logging.getLogger(__name__)

_SPLIT_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT_NAMES = {_SPLIT_WORDS % r"\p{N}{1,3}": "llama-bpe", _SPLIT_WORDS % r"\p{N}": "qwen2"}


def add_vocabulary(writer: Any, folder: Path, config: Mapping[str, Any]) -> None:
    """Adds the tokenizer of a Hugging Face folder to a ``gguf.GGUFWriter``.

    Args:
        writer: gets family, rule of cutting text, tokens with their types (and scores or merges),
            special tokens, what is added to a text, and the chat template.
        folder: with ``tokenizer.json``; ``tokenizer_config.json`` names the special tokens, and
            ``config`` gives the ids of those that it leaves out.
        config: the model's; ids up to its ``vocab_size`` without a token are filled up as unused.

    Raises:
        FileNotFoundError: without ``tokenizer.json``.
        ValueError: if llama.cpp has no tokenizer for it, or it has more tokens than the model.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"a GGUF file carries its tokenizer, and {file} does not exist; copy the tokenizer of "
            "the pretrained model into the folder"
        )
    tokenizer, settings = _read_json(file), _read_json(folder / "tokenizer_config.json")
    if (kind := tokenizer["model"].get("type", "BPE")) != "BPE":
        raise ValueError(
            f"GGUF export knows BPE tokenizers; {file} is of type {kind!r}; export to another "
            "format"
        )
    is_sentencepiece = _is_sentencepiece(tokenizer)
    tokens, types = _tokens(tokenizer, settings, config["vocab_size"], file)
    special = import_gguf().SpecialVocab(folder, load_merges=True, special_token_types=())
    writer.add_tokenizer_model("llama" if is_sentencepiece else "gpt2")
    writer.add_tokenizer_pre("default" if is_sentencepiece else _split_name(tokenizer, file))
    writer.add_token_list(tokens)
    if is_sentencepiece:
        writer.add_token_scores(_scores(tokens, types, special.merges))
        special.merges, special.load_merges = [], False
    writer.add_token_types(types)
    special.special_token_ids = _special_ids(settings, config, tokens)
    special.add_special_token = _added_to_a_text(tokenizer, settings)
    if (template := folder / "chat_template.jinja").is_file():  # before the tokenizer's own
        special.chat_template = template.read_text(encoding="utf-8")
    special.add_to_gguf(writer, quiet=True)
    writer.add_add_space_prefix(is_sentencepiece and _adds_space_prefix(tokenizer))


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _tokens(
    tokenizer: dict, settings: dict, vocab_size: int, file: Path
) -> tuple[list[str], list[int]]:
    """Token and type of every id below ``vocab_size``."""
    kinds, model = import_gguf().TokenType, tokenizer["model"]
    by_id = {index: (token, kinds.NORMAL) for token, index in model["vocab"].items()}
    added = {int(index): token for index, token in settings.get("added_tokens_decoder", {}).items()}
    added |= {token["id"]: token for token in tokenizer.get("added_tokens", [])}
    for index, token in added.items():
        kind = kinds.CONTROL if token.get("special") else kinds.USER_DEFINED
        by_id[index] = (token["content"], kind)
    if _is_sentencepiece(tokenizer):
        for index, (token, kind) in by_id.items():
            if token == model.get("unk_token"):
                by_id[index] = (token, kinds.UNKNOWN)
            elif kind == kinds.NORMAL and len(token) == 6 and token.startswith("<0x"):
                by_id[index] = (token, kinds.BYTE)
    if max(by_id) >= vocab_size:
        raise ValueError(
            f"the model has {vocab_size} token ids, {file} has one up to {max(by_id)}; take the "
            "tokenizer that belongs to the model"
        )
    if missing := vocab_size - len(by_id):
        log.info("%d ids of the model have no token; GGUF lists them as unused", missing)
    filled = [by_id.get(index, (f"[PAD{index}]", kinds.UNUSED)) for index in range(vocab_size)]
    return [token for token, _ in filled], [kind for _, kind in filled]


def _steps(part: dict | None, kind: str, children: str) -> list[dict]:
    """The parts of a sequence, or of one part alone; ``kind`` is the type that holds others."""
    if part is None:
        return []
    return part[children] if part["type"] == kind else [part]


def _pre_steps(tokenizer: dict) -> list[dict]:
    return _steps(tokenizer.get("pre_tokenizer"), "Sequence", "pretokenizers")


def _is_sentencepiece(tokenizer: dict) -> bool:
    kinds = [step["type"] for step in _pre_steps(tokenizer)]
    return bool(tokenizer["model"].get("byte_fallback")) and kinds in ([], ["Metaspace"])


def _adds_space_prefix(tokenizer: dict) -> bool:
    normalizers = _steps(tokenizer.get("normalizer"), "Sequence", "normalizers")
    return any(step["type"] == "Prepend" for step in normalizers) or any(
        step.get("prepend_scheme", "always") != "never" for step in _pre_steps(tokenizer)
    )


def _scores(tokens: list[str], types: list[int], merges: list[str]) -> list[float]:
    """Minus the rank of the first merge that makes the token; 0 for those that no merge makes."""
    made = [merge.replace(" ", "", 1) for merge in merges]
    rank = {token: index for index, token in reversed([*enumerate(made)])}
    normal = import_gguf().TokenType.NORMAL
    pieces = [t for t, kind in zip(tokens, types, strict=True) if kind == normal and len(t) > 1]
    if unreachable := [piece for piece in pieces if piece not in rank]:
        log.warning(
            "%d pieces are the result of no merge (%s, ...); llama.cpp may still use them",
            len(unreachable),
            unreachable[0],
        )
    return [-float(rank.get(token, 0)) for token in tokens]


def _split_name(tokenizer: dict, file: Path) -> str:
    steps = _pre_steps(tokenizer)
    kinds = [step["type"] for step in steps]
    if kinds and kinds[-1] == "ByteLevel" and not steps[-1].get("add_prefix_space"):
        own_words = steps[-1].get("use_regex", True)
        if kinds == ["ByteLevel"] and own_words:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and own_words and steps[0]["individual_digits"]:
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and not own_words:
            pattern = steps[0]["pattern"].get("Regex")
            if steps[0]["behavior"] == "Isolated" and pattern in _SPLIT_NAMES:
                return _SPLIT_NAMES[pattern]
    raise ValueError(
        f"llama.cpp selects its rule of cutting text by name, and the pre_tokenizer of {file} "
        f"({' + '.join(kinds) or 'none'}) is none of those known here (Llama 3, Qwen2, SmolLM, "
        "GPT-2, SentencePiece BPE); export to another format"
    )


def _added_to_a_text(tokenizer: dict, settings: dict) -> dict[str, bool]:
    """Whether the tokenizer puts a special token before a text ("bos"), and one after it."""
    for step in _steps(tokenizer.get("post_processor"), "Sequence", "processors"):
        if step["type"] == "TemplateProcessing":
            special = ["SpecialToken" in part for part in step["single"]]
            return {"bos": special[0], "eos": special[-1]}
    return {kind: bool(settings.get(f"add_{kind}_token")) for kind in ("bos", "eos")}


def _special_ids(settings: dict, config: Mapping[str, Any], tokens: list[str]) -> dict[str, int]:
    """Kind of a special token -> its id, for those that exist."""
    ids, special = {token: index for index, token in enumerate(tokens)}, {}
    for kind in ("bos", "eos", "unk", "pad"):
        token, token_id = settings.get(f"{kind}_token"), config.get(f"{kind}_token_id")
        token = token["content"] if isinstance(token, dict) else token
        token_id = token_id[0] if isinstance(token_id, list) else token_id
        if (token_id := ids.get(token, token_id)) is not None:
            special[kind] = int(token_id)
    return special
