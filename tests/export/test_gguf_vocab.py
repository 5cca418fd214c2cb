"""Tests tokenizers in GGUF metadata: their family, their name and their special tokens."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_models import DEMO, edit_json, pre_tokenizer

from hestia_tune.errors import InputError
from hestia_tune.export.gguf_tokenizer import add_vocabulary

FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
CONFIG = {"vocab_size": 1024, "bos_token_id": 7, "eos_token_id": [8, 9]}


@pytest.fixture
def folder(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    return tmp_path


def read_vocabulary(folder: Path, config: dict) -> dict[str, Any]:
    """Return the metadata that `add_vocabulary` writes, without the prefix of their keys."""
    writer = gguf.GGUFWriter(None, "llama")
    add_vocabulary(writer, folder, config)
    (data,) = writer.kv_data
    return {
        key.removeprefix("tokenizer.").removeprefix("ggml."): v.value for key, v in data.items()
    }


def special_ids(vocabulary: dict[str, Any]) -> dict[str, int]:
    return {key[:-9]: value for key, value in vocabulary.items() if key.endswith("_token_id")}


def template(*parts: str) -> dict:
    """Return a post-processor that makes a sequence of special tokens and the text ("A")."""
    single = [
        {"Sequence": {"id": "A", "type_id": 0}}
        if part == "A"
        else {"SpecialToken": {"id": part, "type_id": 0}}
        for part in parts
    ]
    known = {part: {"id": part, "ids": [0], "tokens": [part]} for part in parts if part != "A"}
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": known}


@pytest.mark.parametrize(
    ("digits", "name"),
    [(r"\p{N}", "qwen2"), (r"\p{N}{1,3}", "dbrx"), ("individual", "smollm")],
)
def test_names_of_pre_tokenizers(folder, digits, name):
    edit_json(folder / "tokenizer.json", pre_tokenizer=pre_tokenizer(digits))
    vocabulary = read_vocabulary(folder, CONFIG)
    assert (vocabulary["model"], vocabulary["pre"]) == ("gpt2", name)
    assert "scores" not in vocabulary and len(vocabulary["merges"]) == 767
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    edit_json(folder / "tokenizer.json", model=model | {"ignore_merges": True})
    if name == "dbrx":  # Llama 3 is the same with words that need no merges
        assert read_vocabulary(folder, CONFIG)["pre"] == "llama-bpe"
    else:
        with pytest.raises(InputError, match="ByteLevel, ignore_merges"):
            read_vocabulary(folder, CONFIG)


@pytest.mark.parametrize(
    "unknown",
    [
        pre_tokenizer(r"\p{N}{1,2}"),
        {"type": "Whitespace"},
        {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        None,
    ],
)
def test_unknown_pre_tokenizers_are_refused(folder, unknown):
    edit_json(folder / "tokenizer.json", pre_tokenizer=unknown)
    with pytest.raises(ValueError, match="tokenizer.json .* is none of them"):
        read_vocabulary(folder, CONFIG)


def test_unigram_is_refused(folder):
    edit_json(folder / "tokenizer.json", model={"type": "Unigram", "vocab": []})
    with pytest.raises(ValueError, match="Unigram .* is none of them"):
        read_vocabulary(folder, CONFIG)


@pytest.mark.parametrize(
    ("processor", "flags", "expected"),
    [
        (template("<|endoftext|>", "A"), {}, (True, False)),
        (template("A", "<|endoftext|>"), {"add_bos_token": True}, (False, True)),
        ({"type": "Sequence", "processors": [template("x", "A", "x")]}, {}, (True, True)),
        (None, {"add_bos_token": True}, (True, False)),
        (None, {}, (False, False)),
        (pre_tokenizer("individual")["pretokenizers"][1], {}, (False, False)),
    ],
)
def test_tokens_that_are_added_to_a_text(folder, processor, flags, expected):
    edit_json(folder / "tokenizer.json", post_processor=processor)
    edit_json(folder / "tokenizer_config.json", **flags)
    vocabulary = read_vocabulary(folder, CONFIG)
    assert (vocabulary["add_bos_token"], vocabulary["add_eos_token"]) == expected


def test_special_ids_come_from_the_tokenizer_then_from_the_config(folder):
    # 8 of config.json is not eos_token, so it ends replies.
    found = {"bos": 0, "eos": 0, "padding": 0, "eot": 8}
    assert special_ids(read_vocabulary(folder, CONFIG)) == found
    edit_json(folder / "tokenizer_config.json", eos_token={"content": "!"}, pad_token=None)
    assert special_ids(read_vocabulary(folder, CONFIG)) == {"bos": 0, "eos": 1, "eot": 8}
    (folder / "tokenizer_config.json").unlink()
    assert special_ids(read_vocabulary(folder, CONFIG)) == {"bos": 7, "eos": 8, "eot": 9}
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 8]}')
    assert special_ids(read_vocabulary(folder, CONFIG)) == {"bos": 7, "eos": 8, "eot": 9}
    (folder / "generation_config.json").write_text('{"eos_token_id": 8}')
    assert special_ids(read_vocabulary(folder, CONFIG)) == {"bos": 7, "eos": 8}


def test_added_tokens_beyond_the_vocabulary(folder):
    added = [
        {"id": 1024, "content": "<|turn|>", "special": True},
        {"id": 1026, "content": "<tool>", "special": False},
    ]
    added = [FLAGS | token for token in added]
    edit_json(folder / "tokenizer.json", added_tokens=added)
    vocabulary = read_vocabulary(folder, CONFIG | {"vocab_size": 1028})
    assert vocabulary["tokens"][1024:] == ["<|turn|>", "[PAD1025]", "<tool>", "[PAD1027]"]
    assert vocabulary["token_type"][1024:] == [3, 5, 4, 5]
    with pytest.raises(ValueError, match="1024 token ids, .* ids up to 1026"):
        read_vocabulary(folder, CONFIG)


def test_chat_templates(folder):
    assert "chat_template" not in read_vocabulary(folder, CONFIG)
    several = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    edit_json(folder / "tokenizer_config.json", chat_template=several)
    vocabulary = read_vocabulary(folder, CONFIG)
    assert (vocabulary["chat_template"], vocabulary["chat_template.tool"]) == ("d", "t")
    edit_json(folder / "tokenizer_config.json", chat_template="c")
    assert read_vocabulary(folder, CONFIG)["chat_template"] == "c"
    (folder / "chat_template.jinja").write_text("j")
    assert read_vocabulary(folder, CONFIG)["chat_template"] == "j"


@pytest.mark.parametrize("space", ["Prepend", "Metaspace", "none"])
def test_sentencepiece(folder, space, caplog):
    pieces = ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "▁ab", "aa", "▁a"]
    pieces += [f"<0x{index:02X}>" for index in range(256)]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"] |= {
        "vocab": {piece: index for index, piece in enumerate(pieces)},
        "merges": [["a", "b"], ["▁", "ab"], ["▁a", "b"], ["▁", "a"]],
        "byte_fallback": True,
        "unk_token": "<unk>",
    }
    tokenizer["added_tokens"] = [
        FLAGS | {"id": index, "content": pieces[index], "special": True} for index in range(3)
    ]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = [{"type": "Prepend", "prepend": "▁"}] if space == "Prepend" else []
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [*prepend, replace]}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}
    tokenizer["pre_tokenizer"] = metaspace if space == "Metaspace" else None
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    vocabulary = read_vocabulary(folder, {"vocab_size": 266})
    assert (vocabulary["model"], vocabulary["tokens"]) == ("llama", pieces)
    assert vocabulary["token_type"] == [2, 3, 3, *[1] * 7, *[6] * 256]
    assert vocabulary["scores"] == [0, 0, 0, 0, 0, 0, 0, -1, 0, -3, *[0] * 256]
    assert vocabulary["add_space_prefix"] == (space != "none")
    assert "merges" not in vocabulary
    assert "no merge makes aa" in caplog.text
