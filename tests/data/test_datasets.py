"""Datasets in memory: only the tail of a text is lost, and errors are clear."""

import json

import numpy as np
import pytest
import torch

from hestia_tune.data import (
    SequenceDataset,
    demo_dataset,
    streaming_text_dataset,
    text_dataset,
    write_token_shards,
)
from hestia_tune.data.sequences import demo_documents


class Letters:
    """A tokenizer with one id per byte."""

    eos_id = 0

    def encode(self, text, add_bos, add_eos):
        assert not add_bos and not add_eos
        return list(text.encode())


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write_jsonl(path, texts, column="text"):
    path.write_text("".join(json.dumps({column: text, "n": 1}) + "\n" for text in texts))
    return str(path)


def test_document_masks_keep_documents_apart(tmp_path):
    arguments = {"source": "json", "data_files": write_jsonl(tmp_path / "a.jsonl", ["ab", "cdefg"])}
    (sample,) = text_dataset(Letters(), **arguments, seq_len=6, document_masks=True)
    assert sample["tokens"].tolist() == sample["labels"].tolist() == [97, 98, 0, 99, 100, 101]
    assert sample["input_pos"].tolist() == [0, 1, 2, 0, 1, 2]
    assert sample["seq_lens"].tolist() == [3, 3]


@pytest.mark.parametrize("seq_len", [1, 2, 5, 7, 100])
def test_sequences_hold_every_token_in_order(tmp_path, seq_len):
    file = write_jsonl(tmp_path / "a.jsonl", ["ab", "", "cdefg", "h"])
    joined = [97, 98, 0, 99, 100, 101, 102, 103, 0, 104, 0]
    dataset = text_dataset(Letters(), source="json", data_files=file, seq_len=seq_len)
    for sequences in (dataset.sequences, SequenceDataset(joined, seq_len).sequences):
        assert sequences.dtype == torch.int64 and sequences.shape == (11 // seq_len, seq_len)
        assert sequences.flatten().tolist() == joined[: 11 - 11 % seq_len]


class WithBos(Letters):
    """A tokenizer with BOS, which its flags add or leave out, as those of torchtune do."""

    bos_id = 1


class Prefixed(WithBos):
    """A tokenizer that begins every text with BOS, whatever the flags are."""

    def encode(self, text, add_bos, add_eos):
        return [1, *super().encode(text, add_bos, add_eos)]


@pytest.mark.parametrize("tokenizer", [WithBos(), Prefixed()], ids=["flags", "always"])
@pytest.mark.parametrize("kind", ["memory", "stream", "set"])
@pytest.mark.parametrize("document_masks", [False, True])
@pytest.mark.parametrize("seq_len", [2, 4, 5])
def test_sequences_begin_with_bos_if_texts_do(tmp_path, tokenizer, kind, document_masks, seq_len):
    file = write_jsonl(tmp_path / "a.jsonl", ["ab", "cdefghi", "j"])
    joined = [1, 97, 98, 0, 1, 99, 100, 101, 102, 103, 104, 105, 0, 1, 106, 0]
    starts = range(0, len(joined) - seq_len + 1, seq_len)
    expected = [[1, *joined[start + 1 : start + seq_len]] for start in starts]
    options = {"source": "json", "data_files": file, "shuffle_buffer": 0, "epochs": 1}
    if kind == "set":
        write_token_shards(tokenizer, tmp_path / "set", **options)
        written = np.fromfile(tmp_path / "set" / "tokens.bin", "<u4")
        assert written.tolist() == joined  # the documents alone, for any seq_len
        options |= {"source": "token_shards", "data_files": str(tmp_path / "set")}
    options |= {"seq_len": seq_len, "document_masks": document_masks}
    dataset = (text_dataset if kind == "memory" else streaming_text_dataset)(tokenizer, **options)
    samples = list(dataset) if kind == "stream" else [dataset[i] for i in range(len(dataset))]
    for key in ("tokens", "labels"):
        assert [torch.as_tensor(sample[key]).tolist() for sample in samples] == expected
    if document_masks:  # positions begin at 0 behind every EOS
        ends = [row.count(0) + (row[-1] != 0) for row in expected]
        assert [len(sample["seq_lens"]) for sample in samples] == ends
        assert all(
            (sample["input_pos"] == 0).sum() == n for sample, n in zip(samples, ends, strict=True)
        )


def normal(paragraph: str) -> str:
    """Return a paragraph without line breaks and indentation."""
    return " ".join(paragraph.split())


def test_demo_splits_share_no_paragraph():
    train, validation = demo_documents("train"), demo_documents("validation")
    paragraphs = {p for document in train for p in map(normal, document.split("\n\n"))}
    held_out = {p for document in validation for p in map(normal, document.split("\n\n"))}
    held_out = {p for p in held_out if len(p) >= 80}
    assert len(held_out) > 50 and not held_out & paragraphs
    share = sum(map(len, validation)) / sum(map(len, train + validation))
    assert 0.05 < share < 0.2
    with pytest.raises(ValueError, match="split"):
        demo_documents("test")


def test_the_demo_dataset_gives_torchtune_samples():
    dataset = demo_dataset(Letters(), seq_len=64, split="validation")
    item = dataset[3]
    assert item["tokens"] == item["labels"] == dataset.sequences[3].tolist()
    assert len(item["tokens"]) == 64


def test_a_text_dataset_reads_the_named_column(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", ["abc", "defg"], column="content")
    dataset = text_dataset(Letters(), source="json", data_files=file, column="content", seq_len=3)
    assert dataset.sequences.tolist() == [[97, 98, 99], [0, 100, 101], [102, 103, 0]]


def test_max_tokens_stops_reading(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", ["abcd"] * 100)
    few = text_dataset(Letters(), source="json", data_files=file, seq_len=5, max_tokens=10)
    assert len(few) == 2
    assert len(text_dataset(Letters(), source="json", data_files=file, seq_len=5)) == 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": "body"}, "'body' holds NoneType, not text; columns: text, n"),
        ({"column": "body", "max_tokens": 5}, "'body' .* columns: text, n"),
        ({"sequence_length": 8}, "unknown key dataset.sequence_length"),
        ({"data_files": "/nowhere/x.jsonl"}, "/nowhere/x.jsonl does not exist; check the path"),
        ({"epochs": None}, "must end; give epochs or max_tokens"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, message):
    file = write_jsonl(tmp_path / "a.jsonl", ["abc", "defg"])
    with pytest.raises((ValueError, OSError), match=message):
        text_dataset(Letters(), **{"source": "json", "data_files": file, "seq_len": 3} | options)
