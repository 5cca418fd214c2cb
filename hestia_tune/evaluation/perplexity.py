"""Perplexity of documents by sliding windows.

A document's tokens follow one prefix token and are cut into windows of at most ``window`` inputs.
The first window scores all of its tokens; each later one moves on by ``stride`` (the last by what
is left) and scores the tokens that are new, each after at least ``window - stride + 1`` others.
``stride = window`` is cheapest and what lm-eval does; a smaller one costs ``window / stride`` times
as much. Published perplexities depend on these choices; per word and per byte they compare across
tokenizers.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hestia_tune.config import TextConfig, require_number
from hestia_tune.errors import InputError

_FILES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}


def perplexity(
    lm: Any,
    documents: Sequence[str],
    window: int,
    stride: int | None = None,
    max_tokens: int | None = None,
) -> dict[str, float]:
    """Perplexity of ``documents``, each by itself. Collective if there is a process group.

    Args:
        lm: a `DecoderLM`; the prefix is its BOS, or EOS if there is none, and no other special
            token is put in.
        window: inputs per forward, at most those of ``lm``.
        stride: at most ``window``, which None is.
        max_tokens: score only the first so many tokens; words and bytes are then those of the
            text that these tokens decode to.

    Returns:
        On every rank, JSON-ready: ``nll``, the summed negative log-likelihood in nats of
        ``tokens`` (without the prefixes); their ``words`` (pieces between runs of whitespace, as
        lm-eval counts them) and ``bytes`` (in UTF-8); ``documents`` (with at least one token);
        ``window`` and ``stride``, in tokens; ``token_perplexity``, ``word_perplexity``,
        ``byte_perplexity`` and ``bits_per_byte``.

    Raises:
        InputError: on a window that is too long.
        NotFiniteError: naming a text with NaN in its logits.
    """
    require_number("window", window, 1, lm.max_length)
    stride = stride or window
    texts, tokenized, left = [], [], math.inf if max_tokens is None else max_tokens
    for text in documents:
        ids = lm.tok_encode(text, add_special_tokens=False)
        if len(ids) > left:
            ids = ids[: int(left)]
            text = lm.tok_decode(ids)
        if ids:
            texts.append(text)
            tokenized.append(ids)
            left -= len(ids)
        if not left:
            break
    nll = -math.fsum(lm.rolling(tokenized, window, stride))
    tokens = sum(map(len, tokenized))
    words = sum(len(re.split(r"\s+", text)) for text in texts)
    num_bytes = sum(len(text.encode("utf-8")) for text in texts)
    # In tensors, since a large one is infinite, not an error.
    means = torch.tensor([nll / tokens, nll / words, nll / num_bytes], dtype=torch.float64)
    per_token, per_word, per_byte = means.exp().tolist()
    return {
        "nll": nll,
        "tokens": tokens,
        "words": words,
        "bytes": num_bytes,
        "documents": len(texts),
        "window": window,
        "stride": stride,
        "token_perplexity": per_token,
        "word_perplexity": per_word,
        "byte_perplexity": per_byte,
        "bits_per_byte": nll / num_bytes / math.log(2),
    }


def read_documents(text: TextConfig) -> list[str]:
    """A text file as one document; the rows of a parquet, JSON or CSV file, or of a dataset.

    Raises:
        InputError: if the file does not exist; or if the dataset is on a hub that cannot be
            reached.
        InputError: if there is no such column or split, or what is read is no text.
    """
    import datasets

    path, column = Path(text.source), text.column
    is_file = path.is_absolute() or path.suffix in (".txt", ".md", *_FILES)
    if is_file and not path.exists():
        raise InputError(f"{path} does not exist; check the path")
    if path.is_file() and path.suffix not in _FILES:
        try:
            found = [path.read_bytes().decode("utf-8")]
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8 ({error}); convert it") from None
    else:
        options: Any = {"path": text.source, "name": text.name, "split": text.split}
        if path.is_file():
            kind = _FILES[path.suffix]
            options = {"path": kind, "data_files": text.source, "split": "train"}
        rows = datasets.load_dataset(**options)
        if column not in rows.column_names:
            raise InputError(f"{path} has no column {column!r}; it has {rows.column_names}")
        found = rows[column][:]
    if not any(found) or not all(isinstance(one, str) for one in found):
        raise InputError(f"{path} (column {column!r}) holds no text, or what is not text; check it")
    return found if text.join is None else [text.join.join(found)]
