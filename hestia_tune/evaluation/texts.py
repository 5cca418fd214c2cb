"""Measures a model on texts: its perplexity, and its distance from another model's predictions.

**Perplexity** is measured with sliding windows. The tokens of a document follow one prefix token
and are cut into windows of at most ``window`` inputs. The first window scores all of its tokens.
Each later window moves by ``stride``, and the last window moves by the rest. It scores the new
tokens, each after at least ``window - stride + 1`` others. ``stride = window`` is cheapest, and
lm-eval uses it. A smaller stride costs ``window / stride`` times as much. Published perplexities
depend on these choices. Perplexities per word and per byte can be compared across tokenizers.

**Distance from a reference.** A quantized model can have the perplexity of its pretrained model and
still make other predictions. `DecoderLM.divergence` compares the predictions at every token that
the perplexity scores. It costs one more forward of both models. The logits of one batch of windows
are in memory, and their probabilities exist for 128 tokens at a time. No prediction is stored.

**Prompts.** `PROMPTS` are the beginnings of texts of ten kinds. Greedy continuations of them show a
reader what a number does not.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hestia_tune.config import TextConfig, require_number
from hestia_tune.errors import InputError, one_line

# A fact, a list, a sentence, code, a question, a story, arithmetic, a letter, an explanation and a
# translation. hestia_eval evaluates every model again if they change.
PROMPTS = (
    "The capital of France is",
    "Three things to pack for a day at the beach:\n1.",
    "When the rain finally stopped, the children",
    'def is_prime(n):\n    """Return whether n is a prime number."""\n',
    "Question: Why do leaves turn yellow in autumn?\nAnswer:",
    "Once upon a time, in a small village by the sea,",
    "Tom has 12 apples and gives 5 of them away. Now he has",
    "Dear neighbours,\n\nI am writing to",
    "Photosynthesis is the process by which",
    "English: Good morning, my friend.\nSpanish:",
)

_FILES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}


def perplexity(
    lm: Any,
    documents: Sequence[str],
    window: int,
    stride: int | None = None,
    max_tokens: int | None = None,
) -> dict[str, float]:
    """Measure the perplexity of documents. This is collective if there is a process group.

    Each document is scored by itself.

    Args:
        lm: A `DecoderLM`. The prefix token is its BOS, or EOS if there is no BOS. No other special
            token is added.
        documents: The texts.
        window: The number of inputs per forward, at most the longest input of ``lm``.
        stride: The step from one window to the next, at most ``window``. None: ``window``.
        max_tokens: Score only the first ``max_tokens`` tokens. Words and bytes are then counted in
            the text that these tokens decode to. None: score all tokens.

    Returns:
        On every rank, plain values for JSON: ``nll``, the summed negative log-likelihood in nats of
        ``tokens`` (without the prefixes); their ``words`` (pieces between runs of whitespace, as
        lm-eval counts them) and ``bytes`` (in UTF-8); ``documents`` (with at least one token);
        ``window`` and ``stride``, in tokens; ``token_perplexity``, ``word_perplexity``,
        ``byte_perplexity`` and ``bits_per_byte``.

    Raises:
        InputError: If the window is longer than the model's input.
        NotFiniteError: If the logits of a text have NaN. The message quotes the text.
    """
    require_number("window", window, 1, lm.max_length)
    stride = stride or window
    texts, tokenized = tokenize(lm, documents, max_tokens)
    nll = -math.fsum(lm.rolling(tokenized, window, stride))
    tokens = sum(map(len, tokenized))
    words = sum(len(re.split(r"\s+", text)) for text in texts)
    num_bytes = sum(len(text.encode("utf-8")) for text in texts)
    # Tensors, because math.exp raises an error where a tensor becomes infinite.
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


def tokenize(
    lm: Any, documents: Sequence[str], max_tokens: int | None
) -> tuple[list[str], list[list[int]]]:
    """Return the documents that have a token, as texts and as tokens.

    Args:
        lm: A `DecoderLM`.
        documents: The texts.
        max_tokens: Number of tokens to keep in all, from the beginning. None: all tokens.
    """
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
    return texts, tokenized


def read_documents(text: TextConfig) -> list[str]:
    """Read the documents of a text file, a file with rows, or a dataset.

    A text file is one document. Each row of a parquet, JSON or CSV file or of a dataset is one.

    Args:
        text: A text of the ``eval`` section. Its ``join`` makes one document of all rows.

    Raises:
        InputError: If the file or dataset cannot be read, or has no such split or column of text.
        ConnectionError: If the hub cannot be reached.
    """
    import datasets

    path, column = Path(text.source), text.column
    is_file = path.is_absolute() or path.suffix in (".txt", ".md", *_FILES)
    if is_file and not path.exists():
        raise InputError(f"{path} does not exist; check the path")
    if path.is_file() and path.suffix not in _FILES:
        try:
            # As in training, a byte order mark is no text.
            documents = [path.read_bytes().decode("utf-8").replace("\ufeff", "")]
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8 ({error}); convert it") from None
    else:
        options: Any = {"path": text.source, "name": text.name, "split": text.split}
        if path.is_file():
            kind = _FILES[path.suffix]
            options = {"path": kind, "data_files": text.source, "split": "train"}
        try:
            rows = datasets.load_dataset(**options)
        except ConnectionError:  # an OSError, which `Evaluator` explains
            raise
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            why = one_line(error.__cause__ or error)
            raise InputError(f"{path} could not be read: {why}; check it") from error
        if column not in rows.column_names:
            raise InputError(f"{path} has no column {column!r}; it has {rows.column_names}")
        documents = rows[column][:]
    if not any(documents) or not all(isinstance(document, str) for document in documents):
        raise InputError(
            f"{path} (column {column!r}) must hold text; it is empty or holds other values"
        )
    return documents if text.join is None else [text.join.join(documents)]
