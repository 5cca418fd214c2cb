"""Tests tokenizers in GGUF metadata: their family, their name and their special tokens."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_models import DEMO, edit_json, pre_tokenizer

from hestia_tune.errors import InputError
from hestia_tune.export import gguf_families
from hestia_tune.export.gguf_families import add_vocabulary, check_tokens

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


def sentencepiece(folder: Path) -> dict:
    """Return a tokenizer.json of SentencePiece BPE with tokens for all bytes."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "▁ab"]
    pieces += [f"<0x{index:02X}>" for index in range(256)]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"] |= {
        "vocab": {piece: index for index, piece in enumerate(pieces)},
        "merges": [["a", "b"], ["▁", "ab"]],
        "byte_fallback": True,
        "unk_token": "<unk>",
    }
    tokenizer["added_tokens"] = [
        FLAGS | {"id": index, "content": pieces[index], "special": True} for index in range(3)
    ]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    return tokenizer | {"normalizer": replace, "pre_tokenizer": None}


NORMALIZERS = [
    {"type": "Lowercase"},
    {"type": "NFKC"},
    {"type": "NFD"},
    {"type": "Strip", "strip_left": True, "strip_right": True},
    {"type": "StripAccents"},
    {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "},
    {"type": "Replace", "pattern": {"String": "x"}, "content": "y"},
    {"type": "Prepend", "prepend": "_"},
]


@pytest.mark.parametrize("is_sentencepiece", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("normalizer", NORMALIZERS, ids=lambda each: each["type"])
def test_normalizers_are_refused(folder, normalizer, nested, is_sentencepiece):
    content = sentencepiece(folder) if is_sentencepiece else {}
    steps = [{"type": "Sequence", "normalizers": [normalizer]}]
    steps = [content["normalizer"], *steps] if is_sentencepiece else steps
    given = {"type": "Sequence", "normalizers": steps} if nested else normalizer
    edit_json(folder / "tokenizer.json", **content | {"normalizer": given})
    with pytest.raises(InputError, match=f"llama.cpp has no normalizer; .* {normalizer['type']}"):
        read_vocabulary(folder, {"vocab_size": 1024})


def test_nfc_is_a_warning_for_byte_level_bpe_alone(folder, caplog):
    """llama.cpp's own converter writes Qwen's files without it."""
    read_vocabulary(folder, CONFIG)
    assert "NFC" not in caplog.text
    edit_json(folder / "tokenizer.json", normalizer={"type": "NFC"})
    assert read_vocabulary(folder, CONFIG)["model"] == "gpt2"
    assert "leaves out the normalizer NFC" in caplog.text
    nfc = [sentencepiece(folder)["normalizer"], {"type": "NFC"}]
    normalizer = {"type": "Sequence", "normalizers": nfc}
    edit_json(folder / "tokenizer.json", **sentencepiece(folder) | {"normalizer": normalizer})
    with pytest.raises(InputError, match="has NFC"):
        read_vocabulary(folder, {"vocab_size": 264})


def test_an_empty_normalizer_is_none(folder):
    edit_json(folder / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": []})
    assert read_vocabulary(folder, CONFIG)["model"] == "gpt2"


@pytest.mark.parametrize(
    ("key", "value"),
    [("dropout", 0.1), ("continuing_subword_prefix", "##"), ("end_of_word_suffix", "</w>")],
)
def test_parts_of_the_model_that_llama_cpp_lacks(folder, key, value):
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokenizer = json.loads((folder / "tokenizer.json").read_text()) | {"model": model}
    if key == "dropout":
        tokenizer["model"][key] = value
    else:  # the library refuses merges that do not have it
        tokenizer["model"] |= {key: value, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InputError, match=f"no {key} of a tokenizer"):
        read_vocabulary(folder, CONFIG)


def test_sentencepiece_needs_a_token_for_every_byte(folder):
    content = sentencepiece(folder)
    del content["model"]["vocab"]["<0x41>"]
    edit_json(folder / "tokenizer.json", **content)
    with pytest.raises(InputError, match="lacks <0x41> and 0 others"):
        read_vocabulary(folder, {"vocab_size": 264})


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized"])
def test_flags_of_added_tokens(folder, flag):
    content = sentencepiece(folder)
    content["added_tokens"][1] |= {flag: True}
    edit_json(folder / "tokenizer.json", **content)
    if flag == "normalized":  # <s> stays as it is
        read_vocabulary(folder, {"vocab_size": 264})
        content["added_tokens"].append(
            FLAGS | {"id": 264, "content": "a b", "special": False, flag: True}
        )
        edit_json(folder / "tokenizer.json", **content)
    with pytest.raises(InputError, match=f"no {flag} of an added token; .*set it to false"):
        read_vocabulary(folder, {"vocab_size": 265})


def test_a_mask_may_strip(folder):
    content = sentencepiece(folder)
    content["added_tokens"].append(
        FLAGS | {"id": 264, "content": "<mask>", "special": True, "lstrip": True}
    )
    edit_json(folder / "tokenizer.json", **content)
    assert read_vocabulary(folder, {"vocab_size": 265})["tokens"][264] == "<mask>"


@pytest.mark.parametrize("parts", [("x", "x", "A"), ("y", "A"), ("A", "y"), ("A", "x", "x")])
def test_a_post_processor_that_adds_other_tokens(folder, parts):
    """Here bos_token and eos_token have the id 0, the id of x."""
    processor = template(*parts)
    for name, token in processor["special_tokens"].items():
        token["ids"] = [0 if name == "x" else 5]
    edit_json(folder / "tokenizer.json", post_processor=processor)
    with pytest.raises(InputError, match="adds nothing to a text but bos_token"):
        read_vocabulary(folder, CONFIG)


def test_truncation_and_padding_change_nothing(folder):
    before = read_vocabulary(folder, CONFIG)
    padding = {"strategy": {"Fixed": 8}, "direction": "Left", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    truncation = {"max_length": 1, "strategy": "LongestFirst", "direction": "Left", "stride": 0}
    edit_json(folder / "tokenizer.json", padding=padding, truncation=truncation)
    assert read_vocabulary(folder, CONFIG) == before


def test_gemma_splits_at_spaces_that_its_normalizer_has_left_none_of(folder):
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}
    edit_json(
        folder / "tokenizer.json", **sentencepiece(folder) | {"pre_tokenizer": split | INVERT}
    )
    assert read_vocabulary(folder, {"vocab_size": 264})["pre"] == "default"
    split["pattern"] = {"String": "a"}
    edit_json(folder / "tokenizer.json", pre_tokenizer=split | INVERT)
    with pytest.raises(InputError, match=r"\(BPE \+ Split\) is none of them"):
        read_vocabulary(folder, {"vocab_size": 264})


INVERT = {"invert": False}


@pytest.mark.slow
def test_the_installed_llama_cpp_has_the_same_tokens(folder, monkeypatch):
    """What the rules let pass is compared; a rule that is wrong is found."""
    pytest.importorskip("xllamacpp")
    check_tokens(folder, CONFIG)
    content = json.loads((folder / "tokenizer.json").read_text())
    edit_json(folder / "tokenizer.json", normalizer={"type": "Lowercase"})
    monkeypatch.setattr(gguf_families, "_require_translatable", lambda *_: None)
    with pytest.raises(InputError, match="has other tokens than .*tokenizer.json: for .Hello wor"):
        check_tokens(folder, CONFIG)
    edit_json(folder / "tokenizer.json", normalizer=None, pre_tokenizer=pre_tokenizer(r"\p{N}"))
    monkeypatch.setattr(gguf_families, "_split_name", lambda *_: "gpt-2")
    with pytest.raises(InputError, match="has other tokens"):
        check_tokens(folder, CONFIG)
    assert content["normalizer"] is None


def test_without_an_answer_nothing_is_refused(folder, monkeypatch):
    monkeypatch.setattr(gguf_families.llama_cpp, "ask", lambda *_: [])
    check_tokens(folder, CONFIG | {"pad_token_id": 3})


def test_a_tokenizer_without_merges_is_refused(folder):
    """llama.cpp would load no file with it."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    edit_json(folder / "tokenizer.json", model=model | {"merges": []})
    with pytest.raises(InputError, match="no BPE tokenizer without merges"):
        read_vocabulary(folder, CONFIG)
