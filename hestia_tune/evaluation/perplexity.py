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
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from hestia_tune.evaluation.batching import Batcher
from hestia_tune.evaluation.forward import ModelForward, check_vocabulary
from hestia_tune.evaluation.scoring import Request, plan_rows, score_rows
from hestia_tune.evaluation.sharing import gather_from_ranks, my_share, rank_and_world_size
from hestia_tune.evaluation.tokenization import TextCodec


@dataclass(frozen=True, kw_only=True)
class PerplexityResult:
    """The loss on some documents and what it is divided by.

    Args:
        nll: negative log-likelihood of all scored tokens, summed, in nats.
        tokens: scored tokens (the prefix tokens are not).
        words: pieces of the text between runs of whitespace, as lm-eval counts them.
        bytes: of the text in UTF-8.
        documents: how many had at least one token.
        window, stride: as given, in tokens.
    """

    nll: float
    tokens: int
    words: int
    bytes: int
    documents: int
    window: int
    stride: int

    @property
    def token_perplexity(self) -> float:
        return _exp(self.nll / self.tokens)

    @property
    def word_perplexity(self) -> float:
        return _exp(self.nll / self.words)

    @property
    def byte_perplexity(self) -> float:
        return _exp(self.nll / self.bytes)

    @property
    def bits_per_byte(self) -> float:
        return self.nll / self.bytes / math.log(2)

    def to_dict(self) -> dict[str, float]:
        """Fields and derived values, for JSON."""
        names = ("token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
        return asdict(self) | {name: getattr(self, name) for name in names}


def perplexity(
    model: nn.Module,
    tokenizer: Any,
    documents: Sequence[str],
    *,
    window: int,
    stride: int | None = None,
    prefix_token: int | None = None,
    batch_size: int | str = "auto",
    device: torch.device | str | None = None,
    max_tokens: int | None = None,
    progress: bool = True,
) -> PerplexityResult:
    """Perplexity of ``documents``, each by itself.

    Args:
        model: see `ModelForward`.
        tokenizer: see `TextCodec`; no special tokens but the prefix are put in.
        documents: texts, see `read_documents`.
        window: inputs per forward, at most the model's longest.
        stride: tokens by which a window moves on; None is ``window``.
        prefix_token: id that stands before each document, unscored; None is BOS, or EOS if there
            is no BOS.
        batch_size: windows per forward, or "auto" (see `Batcher`).
        device: of the tokens; None is that of the model.
        max_tokens: score only the first so many tokens; words and bytes are then those of the
            text that these tokens decode to. None is all.
        progress: show a progress bar on rank 0.

    Returns:
        The same on every rank. Windows are shared out over the ranks of a process group.

    Raises:
        ValueError: on a window, stride or limit out of range, no tokens, or a tokenizer that does
            not fit the model.
        FloatingPointError: naming the window whose logits are NaN.
    """
    stride = window if stride is None else stride
    if not 1 <= stride <= window:
        raise ValueError(
            f"stride must be at least 1 and at most the window; got {stride} with window {window}"
        )
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1; got {max_tokens}; use null for all")
    codec = TextCodec(tokenizer, prefix_token=prefix_token)
    forward = ModelForward(model, device)
    check_vocabulary(codec, forward)
    texts, tokenized = _tokenized(codec, documents, max_tokens)
    requests, names = [], []
    for number, ids in enumerate(tokenized):
        inputs = (codec.prefix_id, *ids)
        for start, first, end in windows(len(ids), window, stride):
            names.append(f"tokens {first} to {end} of document {number}")
            requests.append(
                Request(
                    index=len(requests),
                    context=inputs[start : first + 1],
                    continuation=inputs[first + 1 : end + 1],
                )
            )
    if not requests:
        raise ValueError("the documents have no tokens; there is nothing to measure")

    is_shared = not forward.is_sharded
    rows = plan_rows(requests, window, share_contexts=False)
    mine = my_share(rows, lambda row: row.length, is_shared)
    batcher = Batcher(
        batch_size, forward.device, may_retry=is_shared, most_tokens=forward.most_tokens
    )
    shows = progress and rank_and_world_size()[0] == 0

    def run() -> dict[int, float]:
        found: dict[int, float] = {}
        with tqdm(total=len(mine), desc="perplexity", disable=not shows) as bar:
            for batch in score_rows(forward, batcher, mine, names.__getitem__):
                found |= {index: value for index, value, _ in batch}
                bar.update(len(batch))
        return found

    values: dict[int, float] = {}
    for found in gather_from_ranks(run, is_shared):
        values |= found
    return PerplexityResult(
        nll=-math.fsum(values.values()),
        tokens=sum(map(len, tokenized)),
        words=sum(len(re.split(r"\s+", text)) for text in texts),
        bytes=sum(len(text.encode("utf-8")) for text in texts),
        documents=len(tokenized),
        window=window,
        stride=stride,
    )


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
    codec: TextCodec, documents: Sequence[str], max_tokens: int | None
) -> tuple[list[str], list[list[int]]]:
    """Texts and their tokens, up to the limit; documents without tokens are left out."""
    texts, tokenized = [], []
    left = math.inf if max_tokens is None else max_tokens
    for text in documents:
        ids = codec.encode(text, special=False)
        if len(ids) > left:
            ids = ids[: int(left)]
            text = codec.decode(ids)
        if ids:
            texts.append(text)
            tokenized.append(ids)
            left -= len(ids)
        if not left:
            break
    return texts, tokenized


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
