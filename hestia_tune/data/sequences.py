"""Turn tokens into training samples: documents joined by EOS and cut into sequences of one length.

torchtune's own text completion dataset truncates every document at the length of a sequence, so
most of a book is lost. Here a long document continues in the next sequence. Only the tail of the
whole text is dropped. The cost: a sequence may begin in the middle of a document.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

# Label of a token without a loss, as in torch and torchtune.
IGNORE_INDEX = -100


class SequenceDataset(Dataset):
    """Torchtune samples from tokens that are held in memory, 8 bytes per token.

    Args:
        tokens: Token ids, in order. The last ones, which do not fill a sequence, are dropped.
        seq_len: Number of tokens per sequence.
        eos_id: Id of the token that ends a document. It has an effect only with document masks.
        document_masks: Whether the samples keep documents apart (see `training_sample`).

    Attributes:
        sequences: The token ids, int64 (num_sequences, seq_len).
    """

    def __init__(
        self, tokens: Iterable[int], seq_len: int, eos_id: int = -1, document_masks: bool = False
    ):
        flat = np.fromiter(tokens, np.int64)
        whole = flat[: len(flat) // seq_len * seq_len]
        self.sequences = torch.from_numpy(whole.reshape(-1, seq_len))
        self._form = eos_id, document_masks

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return training_sample(self.sequences[index].tolist(), *self._form)


def encode_each(tokenizer: Any, texts: Iterable[str]) -> Iterator[list[int]]:
    """Return the token ids of each text, without special tokens."""
    return (tokenizer.encode(text, add_bos=False, add_eos=False) for text in texts)


def training_sample(tokens: list[int], eos_id: int, document_masks: bool) -> dict[str, Any]:
    """Return a torchtune sample whose labels equal its tokens.

    The recipe shifts the labels, so that every token but the last predicts the next token.

    Args:
        tokens: The token ids of one sequence.
        eos_id: Id of the last token of a document.
        document_masks: Whether to make a sample for ``torchtune.data.padded_collate_packed``.
            Positions then start at 0 with each document, and with each sequence. The second part of
            a document that was cut does not see the first part.

    Returns:
        ``tokens`` and ``labels`` as lists. With document masks, int64 tensors: ``tokens``,
        ``labels`` and ``input_pos`` (seq_len,), and ``seq_lens`` (documents,).
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
    """Sample indices of this rank, in an order that does not depend on the number of ranks.

    Rank r of R takes positions r, r + R, r + 2R, ... So R ranks take the same samples in one step
    as one rank with a batch R times as large. Position p is in pass p // num_samples over the data.
    The sampler of torch can only begin at the start. The sampler of torchdata remembers the place
    of one rank.

    Args:
        num_samples: Number of samples in the dataset.
        length: Number of positions in an epoch, over all ranks. The last positions, too few for
            each rank to have one, are left out. None: the epoch has no end.
        rank: Rank of this process.
        world_size: Number of ranks.
        seed: Seed of the order. Pass k is permuted by the seed ``seed + epoch + k``.
        shuffle: Whether each pass is permuted.
        start: Number of positions that all ranks together have already taken.
        epoch: Number of the epoch.
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
