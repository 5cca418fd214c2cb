"""Map-style text datasets: documents joined by EOS and cut into sequences of one length.

torchtune's own text completion dataset truncates every document at the model's length, which loses
most of a book. Here a long document goes on in the next sequence, and only the tail of the whole
text is dropped. Everything is tokenized at the start and held in memory (8 bytes a token), which
suits runs of up to some 100M tokens.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from hestia_tune.config import one_line
from hestia_tune.data.documents import (
    chunk_tokens,
    demo_documents,
    stdlib_docstrings,
    without_quotes,
)


class SequenceDataset(Dataset):
    """Rows of a (num_sequences, seq_len) LongTensor as torchtune samples, labels equal to tokens.

    The recipe shifts labels by one, so every token but the first of a sequence is predicted.
    """

    def __init__(self, sequences: torch.Tensor):
        self.sequences = sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        tokens = self.sequences[index].tolist()
        return {"tokens": tokens, "labels": list(tokens)}


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text, add_bos=False, add_eos=False)


def _require_sequences(sequences: torch.Tensor, seq_len: int, source: str) -> SequenceDataset:
    if len(sequences) == 0:
        raise ValueError(
            f"dataset {source} is empty: its text does not fill one sequence of {seq_len} tokens; "
            "give it more text or a smaller seq_len"
        )
    return SequenceDataset(sequences)


def demo_dataset(
    tokenizer: Any, *, seq_len: int, split: str = "train", docstrings: bool = False
) -> SequenceDataset:
    """The prose of Python's own help topics, which every Python carries.

    Args:
        tokenizer: a torchtune tokenizer (``encode``, ``eos_id``).
        seq_len: tokens per sequence.
        split: "train" or "validation"; no help topic is in both.
        docstrings: adds the docstrings of the standard library, without what they share with the
            validation topics; about five times as much text as the topics have.
    """
    documents = demo_documents(split)
    if docstrings:
        documents += without_quotes(stdlib_docstrings(), demo_documents("validation"))
    sequences, _ = chunk_tokens(documents, _encoder(tokenizer), tokenizer.eos_id, seq_len)
    return _require_sequences(sequences, seq_len, f"demo ({split})")


def text_dataset(
    tokenizer: Any,
    *,
    source: str,
    seq_len: int,
    column: str = "text",
    max_tokens: int | None = None,
    **load_dataset_kwargs: Any,
) -> SequenceDataset:
    """Any text that Hugging Face ``datasets`` can load, as sequences of ``seq_len`` tokens.

    Args:
        tokenizer: a torchtune tokenizer (``encode``, ``eos_id``).
        source: first argument of ``datasets.load_dataset``: a hub name, or "parquet", "json",
            "text" with ``data_files``.
        seq_len: tokens per sequence.
        column: the column that holds the text.
        max_tokens: read documents (in streaming mode) until there are this many tokens; None
            reads all.
        load_dataset_kwargs: passed on (``data_files``, ``name``, ``split``; "train" by default).

    Raises:
        ValueError: if nothing can be loaded, the column does not exist, or the text is too short.
    """
    import datasets

    load_dataset_kwargs = {"split": "train", "streaming": max_tokens is not None} | (
        load_dataset_kwargs
    )
    name = load_dataset_kwargs.get("data_files", source)
    try:
        rows = datasets.load_dataset(source, **load_dataset_kwargs)
        columns = rows.column_names or list(next(iter(rows)))
    except Exception as error:  # the loaders of `datasets` raise errors of many unrelated types
        raise ValueError(f"dataset {name} could not be loaded: {one_line(error)}") from error
    if column not in columns:
        raise ValueError(f"dataset {name} has no column {column!r}; it has {', '.join(columns)}")
    documents: Iterable[str] = (row[column] for row in rows.select_columns([column]))
    encode = _encoder(tokenizer)
    if max_tokens is not None:
        documents, encode = _limited(documents, encode, max_tokens)
    sequences, _ = chunk_tokens(documents, encode, tokenizer.eos_id, seq_len)
    return _require_sequences(sequences, seq_len, str(name))


def _limited(documents: Iterable[str], encode: Callable[[str], list[int]], max_tokens: int):
    """Documents that end once ``encode`` has made ``max_tokens`` tokens of them."""
    made = 0

    def counting(text: str) -> list[int]:
        nonlocal made
        ids = encode(text)
        made += len(ids)
        return ids

    def limited() -> Iterator[str]:
        for document in documents:
            if made >= max_tokens:
                return
            yield document

    return limited(), counting
