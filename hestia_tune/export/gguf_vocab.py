"""A Hugging Face tokenizer as GGUF metadata.

llama.cpp does not run ``tokenizer.json``: it has tokenizers of its own, selected by name. Two
families are known here, told apart by the structure of ``tokenizer.json``; anything else is an
error rather than a guess, because a wrong name gives other token ids without a complaint.

    byte-level BPE ("gpt2")     the regular expression that cuts the text has a name:
                                llama-bpe, qwen2, smollm, gpt-2
    SentencePiece BPE ("llama") pieces with U+2581 for a space and bytes as <0x00>; its merges
                                become scores, the earlier the higher
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

# Token types of GGUF.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_SPLIT_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT_NAMES = {_SPLIT_WORDS % r"\p{N}{1,3}": "llama-bpe", _SPLIT_WORDS % r"\p{N}": "qwen2"}
_SPECIAL = ("bos", "eos", "unk", "pad")


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What GGUF says about a tokenizer.

    Attributes:
        model: "gpt2" or "llama", GGUF's names of the two families.
        pre: name of the rule that cuts text into words.
        tokens, types, scores: one per id; scores are empty for "gpt2".
        merges: "left right", for "gpt2".
        special: "bos", "eos", "unk", "pad" to the id, those that exist.
        add_bos, add_eos, add_space_prefix: what the tokenizer adds to a text by itself.
        chat_template: Jinja source or None.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    special: dict[str, int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    chat_template: str | None

    def add_to(self, writer: Any) -> None:
        """Adds the metadata to a ``gguf.GGUFWriter``."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        if self.scores:
            writer.add_token_scores(self.scores)
        writer.add_token_types(self.types)
        if self.merges:
            writer.add_token_merges(self.merges)
        for name, token_id in self.special.items():
            getattr(writer, f"add_{name}_token_id")(token_id)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        writer.add_add_space_prefix(self.add_space_prefix)
        if self.chat_template:
            writer.add_chat_template(self.chat_template)


def read_vocabulary(folder: Path, config: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary of a Hugging Face folder.

    Args:
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
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    settings = _read_json(folder / "tokenizer_config.json")
    model = tokenizer["model"]
    if model.get("type", "BPE") != "BPE":
        raise ValueError(
            f"GGUF export knows BPE tokenizers; {file} is of type {model.get('type')!r}; "
            "export to another format"
        )
    tokens, types = _tokens(tokenizer, settings, config["vocab_size"], file)
    ids = {token: index for index, token in enumerate(tokens)}
    add_bos, add_eos = _template_additions(tokenizer, settings)
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    common = {
        "special": _special_ids(settings, config, ids),
        "add_bos": add_bos,
        "add_eos": add_eos,
        "chat_template": _chat_template(folder, settings),
    }
    if _is_sentencepiece(tokenizer):
        for index, token in enumerate(tokens):
            if types[index] == NORMAL and len(token) == 6 and token.startswith("<0x"):
                types[index] = BYTE
        if model.get("unk_token") in ids:
            types[ids[model["unk_token"]]] = UNKNOWN
        return Vocabulary(
            model="llama",
            pre="default",
            tokens=tokens,
            types=types,
            scores=_scores(tokens, types, merges),
            add_space_prefix=_adds_space_prefix(tokenizer),
            **common,
        )
    return Vocabulary(
        model="gpt2",
        pre=_pre_tokenizer_name(tokenizer, file),
        tokens=tokens,
        types=types,
        merges=[" ".join(merge) for merge in merges],
        add_space_prefix=False,
        **common,
    )


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _tokens(
    tokenizer: dict, settings: dict, vocab_size: int, file: Path
) -> tuple[list[str], list[int]]:
    """Token and type of every id below ``vocab_size``."""
    by_id = {index: (token, NORMAL) for token, index in tokenizer["model"]["vocab"].items()}
    added = {token["id"]: token for token in tokenizer.get("added_tokens", [])}
    for index, token in settings.get("added_tokens_decoder", {}).items():
        added.setdefault(int(index), token)
    for index, token in added.items():
        by_id[index] = (token["content"], CONTROL if token.get("special") else USER_DEFINED)
    if max(by_id) >= vocab_size:
        raise ValueError(
            f"the model has {vocab_size} token ids, {file} has one up to {max(by_id)}; take the "
            "tokenizer that belongs to the model"
        )
    missing = vocab_size - len(by_id)
    if missing:
        log.info("%d ids of the model have no token; GGUF lists them as unused", missing)
    filled = [by_id.get(index, (f"[PAD{index}]", UNUSED)) for index in range(vocab_size)]
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
    if any(step["type"] == "Prepend" for step in normalizers):
        return True
    return any(step.get("prepend_scheme", "always") != "never" for step in _pre_steps(tokenizer))


def _scores(tokens: list[str], types: list[int], merges: list[tuple[str, ...]]) -> list[float]:
    """Minus the rank of the first merge that makes the token; 0 for those that no merge makes."""
    rank: dict[str, int] = {}
    for index, merge in enumerate(merges):
        rank.setdefault("".join(merge), index)
    unreachable = [
        t
        for t, k in zip(tokens, types, strict=True)
        if k == NORMAL and len(t) > 1 and t not in rank
    ]
    if unreachable:
        log.warning(
            "%d pieces are the result of no merge (%s, ...); llama.cpp may still use them",
            len(unreachable),
            unreachable[0],
        )
    return [-float(rank.get(token, 0)) for token in tokens]


def _pre_tokenizer_name(tokenizer: dict, file: Path) -> str:
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


def _template_additions(tokenizer: dict, settings: dict) -> tuple[bool, bool]:
    """Whether the tokenizer puts a special token before a text, and one after it."""
    for step in _steps(tokenizer.get("post_processor"), "Sequence", "processors"):
        if step["type"] == "TemplateProcessing":
            special = ["SpecialToken" in part for part in step["single"]]
            return special[0], special[-1]
    return bool(settings.get("add_bos_token")), bool(settings.get("add_eos_token"))


def _special_ids(settings: dict, config: Mapping[str, Any], ids: dict[str, int]) -> dict[str, int]:
    special = {}
    for name in _SPECIAL:
        token = settings.get(f"{name}_token")
        token = token["content"] if isinstance(token, dict) else token
        token_id = ids.get(token)
        if token_id is None:
            token_id = config.get(f"{name}_token_id")
            token_id = token_id[0] if isinstance(token_id, list) else token_id
        if token_id is not None:
            special[name] = int(token_id)
    return special


def _chat_template(folder: Path, settings: dict) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default")
    return template
