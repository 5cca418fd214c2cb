"""Translates tokenizer.json to the metadata of a GGUF file, or refuses it.

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

import functools
import hashlib
import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from hestia_tune.errors import InputError
from hestia_tune.export import llama_cpp
from hestia_tune.files import read_json
from hestia_tune.models.folder import import_optional

log = logging.getLogger(__name__)
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
    log.info("comparing token ids with llama.cpp (some seconds)")
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
