"""Tokens to training samples: documents joined by EOS and cut into sequences of one length.

torchtune's own text completion dataset truncates every document at the model's length, which loses
most of a book. Here a long document goes on in the next sequence, and only the tail of the whole
text is dropped. The cost: a sequence may begin in the midst of a document.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class SequenceDataset(Dataset):
    """Tokens in memory, 8 bytes each, as torchtune samples, labels equal to tokens.

    Args:
        tokens: ids, in order; the last that fill no sequence are dropped.
        seq_len: tokens per sequence.

    Attributes:
        sequences: int64 (num_sequences, seq_len).
    """

    def __init__(self, tokens: Iterable[int], seq_len: int):
        flat = np.fromiter(tokens, np.int64)
        number = len(flat) // seq_len
        self.sequences = torch.from_numpy(flat[: number * seq_len].reshape(number, seq_len))

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return training_sample(self.sequences[index].tolist(), -1, False)


def encode_each(tokenizer: Any, texts: Iterable[str]) -> Iterator[list[int]]:
    """The token ids of each text, without special tokens."""
    return (tokenizer.encode(text, add_bos=False, add_eos=False) for text in texts)


def training_sample(tokens: list[int], eos_id: int, document_masks: bool) -> dict[str, Any]:
    """A torchtune sample, labels equal to tokens; shifted by the recipe, they predict all but one.

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
    ends = [end for end, token in enumerate(tokens, 1) if token == eos_id or end == len(tokens)]
    lengths = [end - start for start, end in pairwise([0, *ends])]
    return {
        "tokens": torch.tensor(tokens),
        "labels": torch.tensor(tokens),
        "input_pos": torch.tensor([*chain.from_iterable(map(range, lengths))]),
        "seq_lens": torch.tensor(lengths),
    }
