"""Tokens to training samples: documents joined by EOS and cut into sequences of one length.

torchtune's own text completion dataset truncates every document at the model's length, which loses
most of a book. Here a long document goes on in the next sequence, and only the tail of the whole
text is dropped. The cost: a sequence may begin in the midst of a document.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler


class SequenceDataset(Dataset):
    """Tokens in memory, 8 bytes each, as torchtune samples.

    Args:
        tokens: ids, in order; the last that fill no sequence of ``seq_len`` are dropped.
        eos_id, document_masks: see `training_sample`.

    Attributes:
        sequences: int64 (num_sequences, seq_len).
    """

    def __init__(
        self, tokens: Iterable[int], seq_len: int, eos_id: int = -1, document_masks: bool = False
    ):
        flat = np.fromiter(tokens, np.int64)
        number = len(flat) // seq_len
        self.sequences = torch.from_numpy(flat[: number * seq_len].reshape(number, seq_len))
        self._form = eos_id, document_masks

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return training_sample(self.sequences[index].tolist(), *self._form)


def encode_each(tokenizer: Any, texts: Iterable[str]) -> Iterator[list[int]]:
    """The token ids of each text, without special tokens."""
    return (tokenizer.encode(text, add_bos=False, add_eos=False) for text in texts)


def training_sample(tokens: list[int], eos_id: int, document_masks: bool) -> dict[str, Any]:
    """A torchtune sample, labels equal to tokens; shifted by the recipe, they predict all but one.

    Args:
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


@dataclass(eq=False)
class PositionSampler(Sampler[int]):
    """Indices of this rank from a position on, in an order that depends on no number of ranks.

    Rank r of R takes positions r, r + R, r + 2R, ...: so R ranks take the same samples in one step
    as one rank with R times the batch. Position p is in pass p // num_samples over the data.
    torch's sampler can begin only at its start; the place that torchdata's remembers is a rank's.

    Args:
        num_samples: of the dataset.
        length: positions of all ranks in an epoch, those left out that are too few for each rank
            to have one; None has no end.
        rank, world_size: of this process.
        seed, shuffle: each pass is permuted by ``seed + epoch + pass``, if at all.
        start: positions that all ranks together have taken already.
    """

    num_samples: int
    length: int | None
    rank: int
    world_size: int
    seed: int
    shuffle: bool = False
    start: int = 0
    epoch: int = 0

    def __iter__(self) -> Iterator[int]:
        end = sys.maxsize if self.length is None else self.length - self.length % self.world_size
        order, permuted = range(self.num_samples), None
        for position in range(self.start + self.rank, end, self.world_size):
            turn, index = divmod(position, self.num_samples)
            if self.shuffle and permuted != turn:
                generator = torch.Generator().manual_seed(self.seed + self.epoch + turn)
                order, permuted = torch.randperm(self.num_samples, generator=generator), turn
            yield int(order[index])
