"""Token ids to training samples: documents joined by EOS and cut into sequences of one length.

torchtune's own text completion dataset truncates every document at the model's length, which loses
most of a book. Here a long document goes on in the next sequence, and only the tail of the whole
text is dropped. The cost: a sequence may begin in the midst of a document.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch.utils.data import Dataset

PROBE = ["A probe: déjà vu,\n\n  2 + 2 = 4.", "x", ""]


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


def chunk_tokens(
    documents: Iterable[str],
    encode: Callable[[str], list[int]],
    eos_id: int,
    seq_len: int,
    max_tokens: int | None = None,
) -> tuple[torch.Tensor, int]:
    """Joins the tokens of all documents, EOS after each, and cuts them into sequences.

    Documents are taken one at a time, so an iterable may make them as it goes. All tokens are held
    in memory, 8 bytes each.

    Args:
        documents: texts.
        encode: the token ids of one text, without special tokens.
        eos_id: id put after each document.
        seq_len: tokens per sequence.
        max_tokens: takes no more documents once there are so many tokens, EOS not counted.

    Returns:
        The sequences, int64 (num_sequences, seq_len), in the order of the text; and how many
        tokens at its end did not fill a sequence and were dropped.

    Raises:
        ValueError: if ``seq_len`` is not positive.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len must be at least 1; got {seq_len}; use 128 or more")
    stream = array("q")
    for number, document in enumerate(documents):
        if max_tokens is not None and len(stream) - number >= max_tokens:
            break
        stream.extend(encode(document))
        stream.append(eos_id)
    num_sequences, dropped = divmod(len(stream), seq_len)
    if num_sequences == 0:
        return torch.empty(0, seq_len, dtype=torch.int64), dropped
    tokens = torch.frombuffer(stream, dtype=torch.int64)
    return tokens[: num_sequences * seq_len].view(num_sequences, seq_len), dropped


def sequence_dataset(
    tokenizer: Any,
    documents: Iterable[str],
    *,
    seq_len: int,
    source: str,
    max_tokens: int | None = None,
) -> SequenceDataset:
    """The documents as a dataset in memory.

    Raises:
        ValueError: if they do not fill one sequence; ``source`` names them.
    """

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_bos=False, add_eos=False)

    sequences, _ = chunk_tokens(documents, encode, tokenizer.eos_id, seq_len, max_tokens)
    if len(sequences) == 0:
        raise ValueError(
            f"dataset {source} is empty: its text does not fill one sequence of {seq_len} tokens; "
            "give it more text or a smaller seq_len"
        )
    return SequenceDataset(sequences)


def batch_encoder(tokenizer: Any) -> Callable[[Sequence[str]], list[list[int]]]:
    """Encodes many texts, without special tokens, as ``tokenizer.encode`` encodes each.

    Args:
        tokenizer: a torchtune tokenizer. If it wraps a ``tokenizers.Tokenizer`` (as its attribute
            ``tokenizer``) whose batches equal its single texts, batches are encoded at once, which
            saves the passage between Python and the tokenizer's own code.
    """

    def one_by_one(texts: Sequence[str]) -> list[list[int]]:
        return [tokenizer.encode(text, add_bos=False, add_eos=False) for text in texts]

    # It leaves out character offsets.
    encode = getattr(getattr(tokenizer, "tokenizer", None), "encode_batch_fast", None)
    if encode is None:
        return one_by_one

    def at_once(texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in encode(list(texts))]

    return at_once if at_once(PROBE) == one_by_one(PROBE) else one_by_one


def training_sample(tokens: list[int], eos_id: int, document_masks: bool) -> dict[str, Any]:
    """A torchtune sample, labels equal to tokens (the recipe shifts them).

    Args:
        tokens: one sequence.
        eos_id: the last token of a document.
        document_masks: makes it a sample of ``torchtune.data.padded_collate_packed``: int64 tensors
            ``tokens``, ``labels``, ``input_pos`` (seq_len,) and ``seq_lens`` (documents,).
            Positions start at 0 with each document, and with each sequence: a document's second
            part does not see its first.
    """
    if not document_masks:
        return {"tokens": tokens, "labels": list(tokens)}
    ends = [index + 1 for index, token in enumerate(tokens) if token == eos_id]
    if not ends or ends[-1] < len(tokens):
        ends.append(len(tokens))
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return {
        "tokens": torch.tensor(tokens),
        "labels": torch.tensor(tokens),
        "input_pos": torch.tensor([*chain.from_iterable(map(range, lengths))]),
        "seq_lens": torch.tensor(lengths),
    }
