"""Documents to token ids, and token ids to sequences of one length.

EOS follows every document, a long document goes on in the next sequence, and only what does not
fill the last sequence is left over. Texts are encoded some dozens at a time where the tokenizer
can, which saves the passage between Python and the tokenizer's own code.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch

# One call of the tokenizer gets at most this much; a longer document is a call of its own.
ENCODE_DOCUMENTS = 64
ENCODE_CHARACTERS = 1 << 17

_PROBE = ["A probe: déjà vu,\n\n  2 + 2 = 4.", "x", ""]

# The ids of a document without EOS; a key that the caller finds its place by; tokens to leave out.
Document = tuple[Sequence[int], Any, int]
# tokens; lengths of the pieces of documents in them; key of the document that the sequence ends
# in; how many of that document's tokens (EOS included) have been given out.
Packed = tuple[list[int], list[int], Any, int]


def batch_encoder(tokenizer: Any) -> Callable[[Sequence[str]], list[list[int]]]:
    """Encodes many texts, without special tokens, as ``tokenizer.encode`` encodes each.

    Args:
        tokenizer: a torchtune tokenizer. If it wraps a ``tokenizers.Tokenizer`` (as its attribute
            ``tokenizer``) whose batches equal its single texts, batches are encoded at once.
    """

    def one_by_one(texts: Sequence[str]) -> list[list[int]]:
        return [tokenizer.encode(text, add_bos=False, add_eos=False) for text in texts]

    inner = getattr(tokenizer, "tokenizer", None)
    # The fast one leaves out character offsets.
    encode = getattr(inner, "encode_batch_fast", None) or getattr(inner, "encode_batch", None)
    if encode is None:
        return one_by_one

    def at_once(texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in encode(list(texts))]

    return at_once if at_once(_PROBE) == one_by_one(_PROBE) else one_by_one


def tokenizer_probe(tokenizer: Any) -> list[int]:
    """Ids of a short text, by which another tokenizer is told apart."""
    return list(tokenizer.encode(_PROBE[0], add_bos=False, add_eos=False))


def encoded(
    documents: Iterable[tuple[Any, Any]], encode: Callable[[Sequence[str]], list[list[int]]]
) -> Iterator[tuple[Sequence[int], Any]]:
    """(text, key) to (ids, key), in order; what is no text (ids already) passes through."""
    waiting: list[tuple[str, Any]] = []
    characters = 0
    for document, key in documents:
        if not isinstance(document, str):
            yield from _encode(waiting, encode)
            waiting, characters = [], 0
            yield document, key
            continue
        waiting.append((document, key))
        characters += len(document)
        if len(waiting) >= ENCODE_DOCUMENTS or characters >= ENCODE_CHARACTERS:
            yield from _encode(waiting, encode)
            waiting, characters = [], 0
    yield from _encode(waiting, encode)


def _encode(waiting: list[tuple[str, Any]], encode: Callable) -> Iterator[tuple[list[int], Any]]:
    if waiting:
        texts, keys = zip(*waiting, strict=True)
        yield from zip(encode(texts), keys, strict=True)


def pack(documents: Iterable[Document], seq_len: int, eos_id: int) -> Generator[Packed, None, int]:
    """Cuts documents, EOS after each, into sequences of ``seq_len`` tokens.

    Returns:
        The number of tokens at the end that fill no sequence.
    """
    tokens: list[int] = []
    lengths: list[int] = []
    for ids, key, start in documents:
        total = len(ids) + 1
        while start < total:
            end = min(start + seq_len - len(tokens), total)
            piece = ids[start : min(end, len(ids))]
            tokens.extend(piece if isinstance(piece, list) else piece.tolist())
            if end == total:
                tokens.append(eos_id)
            lengths.append(end - start)
            start = end
            if len(tokens) == seq_len:
                yield tokens, lengths, key, start
                tokens, lengths = [], []
    return len(tokens)


def sample(tokens: list[int], lengths: list[int], document_masks: bool) -> dict[str, Any]:
    """A torchtune sample, labels equal to tokens (the recipe shifts them).

    Args:
        document_masks: makes it a sample of ``torchtune.data.padded_collate_packed``: int64 tensors
            ``tokens``, ``labels``, ``input_pos`` (seq_len,) and ``seq_lens`` (documents,).
            Positions start at 0 with each document, and with each sequence: a document's second
            part does not see its first.
    """
    if not document_masks:
        return {"tokens": tokens, "labels": list(tokens)}
    ids = torch.tensor(tokens)
    positions = list(chain.from_iterable(range(length) for length in lengths))
    return {
        "tokens": ids,
        "labels": ids.clone(),
        "input_pos": torch.tensor(positions),
        "seq_lens": torch.tensor(lengths),
    }
