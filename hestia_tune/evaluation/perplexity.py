"""Perplexity of documents by sliding windows.

A document's tokens follow one prefix token and are cut into windows of at most ``window`` inputs.
The first window scores all of its tokens; each later one moves on by ``stride`` (the last by what
is left) and scores the tokens that are new. So every token is scored once, and every token beyond
the first window sees at least ``window - stride + 1`` tokens before it. ``stride = window`` is
cheapest and what lm-eval does; a smaller stride gives more context, at ``window / stride`` times
the cost. Documents never see each other.

Published perplexities depend on these choices and on the tokenizer. Per word and per byte they
compare across tokenizers.
"""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hestia_tune.config import nearest, require_number
from hestia_tune.evaluation.harness import hub_errors
from hestia_tune.sections import TextConfig

if TYPE_CHECKING:
    from hestia_tune.evaluation.lm import DecoderLM


def perplexity(
    lm: "DecoderLM",
    documents: Sequence[str],
    *,
    window: int,
    stride: int | None = None,
    prefix_token: int | None = None,
    max_tokens: int | None = None,
) -> dict[str, float]:
    """Perplexity of ``documents``, each by itself. Collective if there is a process group.

    Args:
        lm: the model and its tokenizer; no special tokens but the prefix are put in.
        documents: texts, see `read_documents`.
        window: inputs per forward, at most those of ``lm``.
        stride: tokens by which a window moves on; None is ``window``.
        prefix_token: id that stands before each document, unscored; None is BOS, or EOS if there
            is no BOS.
        max_tokens: score only the first so many tokens; words and bytes are then those of the
            text that these tokens decode to. None is all.

    Returns:
        On every rank, JSON-ready: ``nll``, the negative log-likelihood of all scored tokens,
        summed, in nats; what it is divided by: ``tokens`` (scored; the prefix tokens are not),
        ``words`` (pieces between runs of whitespace, as lm-eval counts them), ``bytes`` (in
        UTF-8), ``documents`` (with at least one token); ``window`` and ``stride``, in tokens;
        ``token_perplexity``, ``word_perplexity``, ``byte_perplexity`` and ``bits_per_byte``.

    Raises:
        ValueError: on a window, stride or limit out of range, or no tokens.
        FloatingPointError: naming the window whose logits are NaN.
    """
    require_number("window", window, 1, lm.max_length)
    stride = window if stride is None else stride
    require_number("stride", stride, 1, window)
    if max_tokens is not None:
        require_number("max_tokens", max_tokens, 1, math.inf, "use null for all")
    prefix = lm.prefix_token_id if prefix_token is None else prefix_token
    texts, tokenized = _tokenized(lm, documents, max_tokens)
    if not tokenized:
        raise ValueError("the documents have no tokens; there is nothing to measure")
    scored = []
    for number, ids in enumerate(tokenized):
        inputs = [prefix, *ids]
        for start, first, end in windows(len(ids), window, stride):
            name = f"tokens {first} to {end} of document {number}"
            scored.append(((name,), inputs[start : first + 1], inputs[first + 1 : end + 1]))
    nll = -math.fsum(lm.score(scored))
    tokens = sum(map(len, tokenized))
    words = sum(len(re.split(r"\s+", text)) for text in texts)
    num_bytes = sum(len(text.encode("utf-8")) for text in texts)
    return {
        "nll": nll,
        "tokens": tokens,
        "words": words,
        "bytes": num_bytes,
        "documents": len(tokenized),
        "window": window,
        "stride": stride,
        "token_perplexity": _exp(nll / tokens),
        "word_perplexity": _exp(nll / words),
        "byte_perplexity": _exp(nll / num_bytes),
        "bits_per_byte": nll / num_bytes / math.log(2),
    }


def windows(num_tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Cuts the tokens of a document into windows.

    Positions count the tokens that are scored; the input that predicts token i is position i of
    the prefix token followed by the tokens.

    Yields:
        (start, first, end): inputs ``start`` to ``end`` (exclusive) predict tokens ``start`` to
        ``end``, of which those from ``first`` on are scored.
    """
    end = 0
    while end < num_tokens:
        first = end
        end = min(end + (stride if end else window), num_tokens)
        yield max(end - window, 0), first, end


def _tokenized(
    lm: "DecoderLM", documents: Sequence[str], max_tokens: int | None
) -> tuple[list[str], list[list[int]]]:
    """Texts and their tokens, up to the limit; documents without tokens are left out."""
    texts, tokenized = [], []
    left = math.inf if max_tokens is None else max_tokens
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


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def read_documents(text: TextConfig) -> list[str]:
    """The documents of a source: a text file (one document), parquet (one per row), a dataset.

    Raises:
        FileNotFoundError: if the file does not exist.
        ConnectionError: if the dataset is on a hub that cannot be reached.
        ValueError: if a column or split is missing (those that exist are named), a text is not
            UTF-8 or not text, or there is no text at all.
    """
    path = Path(text.source)
    if path.suffix in (".json", ".jsonl", ".csv", ".gz", ".zst") and path.is_file():
        raise ValueError(
            f"{path} would be scored with its markup; use a text file, parquet, or a folder that "
            "datasets reads"
        )
    if path.is_file() and path.suffix != ".parquet":
        try:
            found: list[Any] = [path.read_bytes().decode("utf-8")]
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is not UTF-8 (byte {error.start}: {error.reason}); convert it, e.g. with "
                "iconv -t utf-8"
            ) from None
    else:
        is_path = path.is_absolute() or path.suffix in (".txt", ".md", ".parquet", ".jsonl")
        if is_path and not path.exists():
            raise FileNotFoundError(f"{path} does not exist; check the path")
        found = _column(text)
    found = found[: text.limit]
    for row, one in enumerate(found):
        if not isinstance(one, str):
            raise ValueError(
                f"row {row} of column {text.column!r} of {path} is {one!r}, not text; drop such "
                "rows or name another column"
            )
    if not any(found):
        raise ValueError(f"{path} holds no text; there is nothing to measure")
    return found if text.join is None else [text.join.join(found)]


def _column(text: TextConfig) -> list[Any]:
    """The column of a parquet file or a dataset."""
    import datasets

    what = {"path": text.source, "name": text.name, "split": text.split}
    if Path(text.source).is_file():
        what = {"path": "parquet", "data_files": text.source, "split": "train"}
    with hub_errors(f"dataset {text.source}"):
        try:
            rows = datasets.load_dataset(**what)
        except (ValueError, datasets.exceptions.DatasetGenerationError) as error:
            raise ValueError(
                f"dataset {text.source} (name {text.name!r}, split {text.split!r}) cannot be read: "
                f"{error.__cause__ or error}; check the file, name and split"
            ) from error
    if text.column not in rows.column_names:
        raise ValueError(
            f"{text.source} has no column {text.column!r}{nearest(text.column, rows.column_names)}"
            f"; columns: {', '.join(rows.column_names)}"
        )
    return rows[text.column][:]
