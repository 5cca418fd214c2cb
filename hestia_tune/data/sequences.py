"""Turn tokens into training samples: documents joined by EOS and cut into sequences of one length.

torchtune's own text completion dataset truncates every document at the length of a sequence, so
most of a book is lost. Here a long document continues in the next sequence. Only the tail of the
whole text is dropped. The cost: a sequence may begin in the middle of a document. If the tokenizer
begins texts with BOS, such a sequence has BOS in place of its first token, because all text that a
model meets later begins so, too. Without it, Gemma 3 270M has a loss of 4.34 instead of 3.17.

Every CPython contains the text of the demo: its help topics (``help("assert")`` and so on), and the
docstrings of its standard library. So the demo needs no download, and the package contains no
corpus. A hash of a topic's name decides whether it is for training or for validation. A split by
position would move, because Python versions have different topics. Some topics quote others:
"compound" contains all of "while". So the training documents lose every paragraph that is also in a
validation topic. Otherwise the validation loss would partly measure recall. The cost: the text is
small (about half a megabyte, a few milliseconds to split), and its wording depends on the Python
version. So losses on it compare only within one version.
"""

import ast
import functools
import inspect
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, Sampler

from hestia_tune.errors import InputError

# Label of a token without a loss, as in torch and torchtune.
IGNORE_INDEX = -100


class SequenceDataset(Dataset):
    """Torchtune samples from tokens that are held in memory, 8 bytes per token.

    Args:
        tokens: Token ids, in order. The last ones, which do not fill a sequence, are dropped.
        seq_len: Number of tokens per sequence.
        eos_id: Id of the token that ends a document. It has an effect only with document masks.
        document_masks: Whether the samples keep documents apart (see `training_sample`).
        prefix: The tokens that begin every sequence (see `training_sample`).

    Attributes:
        sequences: The token ids, int64 (num_sequences, seq_len).
    """

    def __init__(
        self,
        tokens: Iterable[int],
        seq_len: int,
        eos_id: int = -1,
        document_masks: bool = False,
        prefix: Sequence[int] = (),
    ):
        flat = np.fromiter(tokens, np.int64)
        whole = flat[: len(flat) // seq_len * seq_len]
        self.sequences = torch.from_numpy(whole.reshape(-1, seq_len))
        self._form = eos_id, document_masks, prefix

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return training_sample(self.sequences[index].tolist(), *self._form)


def prefix_of(tokenizer: Any) -> list[int]:
    """Return the special tokens, usually BOS or none, that begin every text of a tokenizer.

    The files decide for `HuggingFaceTokenizer`. The texts of other tokenizers, which are
    torchtune's, begin with BOS, if it is not EOS.
    """
    if hasattr(tokenizer, "neutralized"):
        return tokenizer.encode("", add_bos=False, add_eos=False)
    bos_id = getattr(tokenizer, "bos_id", None)
    return [] if bos_id in (None, tokenizer.eos_id) else [bos_id]


def encode_each(tokenizer: Any, texts: Iterable[str]) -> Iterator[list[int]]:
    """Return the token ids of each text, after those of `prefix_of`."""
    prefix = prefix_of(tokenizer)
    for text in texts:
        ids = tokenizer.encode(text, add_bos=False, add_eos=False)
        if ids[: len(prefix)] != prefix:
            ids = [*prefix, *ids]
        yield ids if len(ids) > len(prefix) else []


def training_sample(
    tokens: list[int], eos_id: int, document_masks: bool, prefix: Sequence[int] = ()
) -> dict[str, Any]:
    """Return a torchtune sample whose labels equal its tokens.

    The recipe shifts the labels, so that every token but the last predicts the next token.

    Args:
        tokens: The token ids of one sequence.
        eos_id: Id of the last token of a document.
        document_masks: Whether to make a sample for ``torchtune.data.padded_collate_packed``.
            Positions then start at 0 with each document, and with each sequence. The second part of
            a document that was cut does not see the first part.
        prefix: The tokens that begin every sequence. They replace the first tokens of a sequence
            that continues a document.

    Returns:
        ``tokens`` and ``labels`` as lists. With document masks, int64 tensors: ``tokens``,
        ``labels`` and ``input_pos`` (seq_len,), and ``seq_lens`` (documents,).
    """
    tokens = [*prefix, *tokens[len(prefix) :]]
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


def pad_samples(samples: Sequence[dict[str, Any]], pad_id: int) -> dict[str, torch.Tensor]:
    """Return the tokens and labels of samples, int64 (batch, longest), padded at their ends.

    Args:
        samples: Samples with ``tokens`` and ``labels``. Other keys are left out.
        pad_id: Token of the padding.
    """
    ends = {"tokens": pad_id, "labels": IGNORE_INDEX}
    rows = {key: [torch.as_tensor(sample[key]).long() for sample in samples] for key in ends}
    length = max(len(row) for both in rows.values() for row in both)
    return {
        key: torch.stack([F.pad(row, (0, length - len(row)), value=end) for row in rows[key]])
        for key, end in ends.items()
    }


def document_mask(lengths: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return which tokens each token attends to: itself, and earlier ones of its own document.

    Args:
        lengths: For each sample, the lengths of its documents, int64. Their sum is seq_len.

    Returns:
        The mask, bool (batch, seq_len, seq_len).
    """
    documents = torch.stack(
        [torch.arange(len(row)).repeat_interleave(torch.as_tensor(row)) for row in lengths]
    )  # (batch, seq_len)
    return (documents.unsqueeze(2) == documents.unsqueeze(1)).tril()


# The hashes of the names have nine classes. One class is for validation: about a tenth of the
# characters. It is spread over many short topics, so it has every kind of prose in the text.
_HASH_CLASSES, _VALIDATION_CLASS = 9, 1
# Shorter paragraphs, such as "See also:", are everywhere and give nothing away.
_QUOTE_LENGTH = 40


def demo_documents(split: str) -> list[str]:
    """Return the help topics of this Python as documents, sorted by topic name.

    Args:
        split: "validation", about a tenth of the characters, or "train", the others.

    Raises:
        InputError: If ``split`` is another word.
        ModuleNotFoundError: If this Python was installed without its help topics.
    """
    from pydoc_data.topics import topics

    if split not in ("train", "validation"):
        raise InputError(f'split must be "train" or "validation"; got {split!r}')
    train, held_out = [], []
    for name in sorted(topics):
        is_held_out = zlib.crc32(name.encode()) % _HASH_CLASSES == _VALIDATION_CLASS
        (held_out if is_held_out else train).append(topics[name])
    return held_out if split == "validation" else without_quotes(train, held_out)


def without_quotes(documents: Iterable[str], held_out: Iterable[str]) -> list[str]:
    """Return ``documents`` without the paragraphs that are also in ``held_out``.

    Blank lines separate paragraphs. Line breaks and indentation do not count in the comparison.
    Paragraphs with fewer than 40 characters stay. Documents without any paragraph left are dropped.

    Args:
        documents: The documents to clean.
        held_out: Documents that must not be quoted.

    Returns:
        The cleaned documents, in order.
    """

    def key(paragraph: str) -> str:
        return " ".join(paragraph.split())

    paragraphs = (key(part) for document in held_out for part in document.split("\n\n"))
    quotable = {paragraph for paragraph in paragraphs if len(paragraph) >= _QUOTE_LENGTH}
    kept = (
        "\n\n".join(part for part in document.split("\n\n") if key(part) not in quotable)
        for document in documents
    )
    return [document for document in kept if document.strip()]


@functools.cache
def stdlib_docstrings() -> tuple[str, ...]:
    """Return the docstrings of the standard library, one document per module.

    This takes some ten seconds, once per process.
    """
    stdlib = Path(sysconfig.get_path("stdlib"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documents = []
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).with_suffix("").parts
        if parts[0] not in sys.stdlib_module_names or {"test", "tests", "idle_test"} & set(parts):
            continue
        try:
            nodes = ast.walk(ast.parse(path.read_bytes()))
        except SyntaxError:  # Some files of lib2to3 are deliberately not Python 3.
            continue
        texts = [ast.get_docstring(node) for node in nodes if isinstance(node, documented)]
        docstrings = dict.fromkeys(inspect.cleandoc(text).strip() for text in texts if text)
        if docstrings:
            documents.append("\n\n".join(docstrings) + "\n")
    return tuple(documents)


def demo_dataset(
    tokenizer: Any, *, seq_len: int, split: str = "train", docstrings: bool = False
) -> SequenceDataset:
    """Return the help topics of this Python as sequences of tokens, for the demo.

    Args:
        tokenizer: A torchtune tokenizer (``encode``, ``eos_id``).
        seq_len: Number of tokens per sequence.
        split: "train" or "validation".
        docstrings: Whether to add the docstrings of the standard library, without the paragraphs
            that are also in the validation topics. They are about five times as long as the topics.

    Returns:
        The sequences.

    Raises:
        InputError: If ``split`` is another word.
        ModuleNotFoundError: If this Python was installed without its help topics.
    """
    documents = demo_documents(split)
    if docstrings:
        documents += without_quotes(stdlib_docstrings(), demo_documents("validation"))
    encoded = encode_each(tokenizer, documents)
    tokens = (id_ for ids in encoded for id_ in [*ids, tokenizer.eos_id])
    return SequenceDataset(tokens, seq_len, prefix=prefix_of(tokenizer))
