"""Training text as a stream: shuffled, tokenized and packed as it is read.

A run over 10B tokens can hold neither the text nor its tokens. Here each worker of each rank reads
its own share of the rows (rows.py), and memory does not grow with the number of tokens. Documents
are shuffled by blocks: the next ``shuffle_buffer`` of a share (or 64M characters, if that is less)
are read, permuted by a seed of their own and tokenized in lots. That mixes as far as a buffer that
slides along, whose state would be the documents in it; here it is the place of the block, a few
numbers, and the tokens that have filled no sequence yet.

The cost: resuming reads one block again and tokenizes one lot, and it needs the ranks and workers
that the run began with. A tokenized set (tokens.py) does not.
"""

import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from hestia_tune.config import Section, one_line, option
from hestia_tune.data.rows import DataStreamError, TextRows
from hestia_tune.data.sequences import (
    SequenceDataset,
    batch_encoder,
    sequence_dataset,
    training_sample,
)

BLOCK_CHARACTERS = 1 << 26
# Documents of a block when nothing is shuffled.
UNSHUFFLED_BLOCK = 64
# One call of the tokenizer gets at most this much; a longer document is a call of its own.
LOT_DOCUMENTS, LOT_CHARACTERS = 64, 1 << 17


@dataclass(frozen=True, kw_only=True)
class StreamConfig(Section):
    """The YAML's ``dataset`` section, if its component is ``streaming_text_dataset``."""

    section: ClassVar[str] = "dataset"
    source: str = option(
        text='first argument of `datasets.load_dataset`: a hub name, or "parquet", "json", "text" '
        "with data_files (.gz, .zst and .bz2 too; a line of a text file is a document); or "
        '"token_shards", a tokenized set, with its folder as data_files'
    )
    seq_len: int = option(text="tokens per sequence", low=1)
    column: str = option("text", "the column that holds the text")
    data_files: Any = option(None, "paths, globs or URLs; or one of these for each split")
    name: str | None = option(None, "the configuration of a hub dataset")
    split: str = option("train", "the split to read")
    revision: str | None = option(
        None,
        "the commit or branch of a hub dataset; a run that resumes after the dataset has changed "
        "needs the commit that it began with",
    )
    shuffle_buffer: int = option(
        1000,
        "documents that are shuffled together; 0 keeps files and documents in order; of a "
        "tokenized set, 0 keeps the order and all else shuffles all of its sequences",
        low=0,
    )
    seed: int = option(0, "of the shuffles, with the epoch's number", low=0)
    max_tokens: int | None = option(
        None,
        "tokens of all ranks together, rounded down to whole sequences on each rank; the data are "
        "read again, in a new order, if they hold less",
        low=1,
    )
    epochs: int | None = option(
        None,
        "passes over the data after which they end; null is no limit; the number of sequences is "
        "not known before, and may differ between ranks, except for a tokenized set",
        low=1,
    )
    document_masks: bool = option(False, "samples for torchtune.data.padded_collate_packed")
    max_retries: int = option(
        6, "tries after the first, 5 seconds apart, when a remote file does not answer", low=0
    )

    def __post_init__(self):
        super().__post_init__()
        if self.max_tokens is not None and self.max_tokens < self.seq_len:
            raise ValueError(
                f"{self.section}.max_tokens {self.max_tokens} is less than one sequence of "
                f"{self.seq_len} tokens; raise it"
            )


class StreamingTextDataset(IterableDataset):
    """Sequences of ``seq_len`` tokens from a source of documents; torchtune samples.

    ``state_dict()`` is the place of the share that was last iterated, which torchdata's
    ``StatefulDataLoader`` saves and restores in each worker.

    Args:
        tokenizer: a torchtune tokenizer (``encode``, ``eos_id``).
        config: the options.
        rank, world_size: of this process; of torch.distributed by default.

    Attributes:
        batch_size: that of the data loader. With it, each of several workers gives whole batches,
            and their sum is ``num_sequences // batch_size``.
        num_sequences: sequences that this rank gives (all its workers together), the same on every
            rank; None if the stream ends with its data, or never.

    Raises:
        ValueError: if something cannot be found.
    """

    def __init__(
        self,
        tokenizer: Any,
        config: StreamConfig,
        rank: int | None = None,
        world_size: int | None = None,
    ):
        if rank is None:
            grouped = dist.is_initialized()
            rank, world_size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        if world_size is None or not 0 <= rank < world_size:
            raise ValueError(f"rank must be 0 to world_size - 1; got {rank} of {world_size}")
        self.tokenizer, self.config, self.batch_size = tokenizer, config, 1
        self.rank, self.world_size = rank, world_size
        self._rows = TextRows(
            config.source,
            config.column,
            split=config.split,
            max_retries=config.max_retries,
            name=config.name,
            data_files=config.data_files,
            revision=config.revision,
        )
        self._place: dict[str, Any] | None = None
        self._resumes = False

    @property
    def num_sequences(self) -> int | None:
        if self.config.max_tokens is None:
            return None
        return self.config.max_tokens // self.config.seq_len // self.world_size

    @property
    def identity(self) -> str:
        """What must be the same for a place to mean the same."""
        config = self.config
        return (
            f"{self._rows.digest}/seq_len {config.seq_len}/seed {config.seed}/"
            f"shuffle_buffer {config.shuffle_buffer}"
        )

    def state_dict(self) -> dict[str, Any]:
        """The place after the last sequence given."""
        place = self._place if self._place is not None else self._start()
        return dict(place) | {"stream": self.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on after the place of ``state``.

        Raises:
            ValueError: if it is the place of another stream.
        """
        if state["stream"] != self.identity:
            raise ValueError(
                f"the saved place is that of stream {state['stream']}, not of {self.identity}: "
                "files, column, seq_len, seed or shuffle_buffer have changed; set them back, or "
                "start anew"
            )
        self._place, self._resumes = dict(state), True

    def _start(self) -> dict[str, Any]:
        """The place before the first document of this share."""
        worker = get_worker_info()
        worker_id, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return {
            "share": self.rank * num_workers + worker_id,
            "num_shares": self.world_size * num_workers,
            "epoch": 0,
            "block": 0,  # of the epoch
            "rows": None,  # where `datasets` stands before the block
            "lot": 0,  # of the block
            "carry": [],  # tokens before the lot that filled no sequence
            "given": 0,  # sequences of the lot
            "sequences": 0,  # in all
        }

    def __iter__(self) -> Iterator[dict[str, Any]]:
        start = self._start()
        place, self._resumes = (self._place if self._resumes else start), False
        for key in ("share", "num_shares"):
            if place[key] != start[key]:
                raise ValueError(
                    f"the state is that of share {place['share']} of {place['num_shares']} (ranks "
                    f"x workers), this is share {start['share']} of {start['num_shares']}; resume "
                    "on as many ranks and workers, or use a tokenized set (`tune run "
                    "hestia_tokenize`)"
                )
        self._place = place
        return self._sequences(place)

    def _sequences(self, place: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The sequences from a place on."""
        config, eos_id = self.config, self.tokenizer.eos_id
        limit = self._share_sequences(place)
        carry, given, sequences = place["carry"], place["given"], place["sequences"]
        if sequences == limit:
            return
        if get_worker_info() is not None:
            # Workers are the parallelism; threads of each worker would fight over the same cores.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        encode = batch_encoder(self.tokenizer)
        for at, lot in self._lots(place):
            tokens = list(carry)
            try:
                for ids in encode(lot):
                    tokens.extend(ids)
                    tokens.append(eos_id)
            except Exception as error:  # tokenizers raise errors of many unrelated types
                raise DataStreamError(
                    f"the tokenizer failed on a document of {self._rows.name}: {one_line(error)}"
                ) from error
            end = len(tokens) - len(tokens) % config.seq_len
            for first in range(given * config.seq_len, end, config.seq_len):
                given, sequences = given + 1, sequences + 1
                self._place = at | {"carry": carry, "given": given, "sequences": sequences}
                chosen = tokens[first : first + config.seq_len]
                yield training_sample(chosen, eos_id, config.document_masks)
                if sequences == limit:
                    return
            carry, given = tokens[end:], 0
        self._place = at | {"carry": carry, "given": 0, "sequences": sequences}

    def _lots(self, place: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """Texts that are tokenized at once, each with its place; at the end, none with the end's.

        Raises:
            DataStreamError: if the share holds no documents.
        """
        config = self.config
        share, num_shares = place["share"], place["num_shares"]
        while config.epochs is None or place["epoch"] < config.epochs:
            seed = f"{config.seed}/{place['epoch']}" if config.shuffle_buffer else None
            rows = self._rows.share(share, num_shares, seed)
            if place["rows"] is not None:
                rows.load_state_dict(place["rows"])
            size = config.shuffle_buffer or UNSHUFFLED_BLOCK
            for block in _grouped(self._rows.texts(rows), size, BLOCK_CHARACTERS):
                following = rows.state_dict()
                if seed is not None:
                    block_seed = f"{seed}/{share}/{num_shares}/{place['block']}"
                    random.Random(block_seed).shuffle(block)
                lots = _grouped(block, LOT_DOCUMENTS, LOT_CHARACTERS)
                for number, lot in enumerate(lots):
                    if number >= place["lot"]:
                        yield place | {"lot": number}, lot
                place = place | {"rows": following, "block": place["block"] + 1, "lot": 0}
            if place["block"] == 0:
                raise DataStreamError(
                    f"share {share} of {num_shares} (ranks x workers) of {self._rows.name} holds "
                    "no documents; use fewer workers, or more data"
                )
            place = place | {"epoch": place["epoch"] + 1, "block": 0, "rows": None}
        yield place, []

    def _share_sequences(self, place: dict[str, Any]) -> int | None:
        """Sequences of the share in all: whole batches, dealt to the workers in turn."""
        if self.num_sequences is None:
            return None
        batches = self.num_sequences // self.batch_size
        num_workers = place["num_shares"] // self.world_size
        own = range(place["share"] % num_workers, batches, num_workers)
        return len(own) * self.batch_size


def _grouped(texts: Iterable[str], count: int, characters: int) -> Iterator[list[str]]:
    """Lists of ``count`` texts, or of fewer with so many characters."""
    group, size = [], 0
    for text in texts:
        group.append(text)
        size += len(text)
        if len(group) >= count or size >= characters:
            yield group
            group, size = [], 0
    if group:
        yield group


def text_dataset(
    tokenizer: Any,
    *,
    source: str,
    seq_len: int,
    column: str = "text",
    max_tokens: int | None = None,
    **load_dataset_kwargs: Any,
) -> SequenceDataset:
    """Any text that Hugging Face ``datasets`` can load, as sequences of ``seq_len`` tokens.

    Everything is tokenized at the start and held in memory (8 bytes a token), which suits runs of
    up to some 100M tokens.

    Args:
        tokenizer: a torchtune tokenizer (``encode``, ``eos_id``).
        source: first argument of ``datasets.load_dataset``: a hub name, or "parquet", "json",
            "text" with ``data_files``.
        seq_len: tokens per sequence.
        column: the column that holds the text.
        max_tokens: read documents until there are this many tokens; None reads all.
        load_dataset_kwargs: passed on (``data_files``, ``name``, ``split``; "train" by default).

    Raises:
        ValueError: if nothing can be loaded, the column does not exist, or the text is too short.
        DataStreamError: on data that cannot be read, or are no text.
    """
    rows = TextRows(source, column, **load_dataset_kwargs)
    name = str(load_dataset_kwargs.get("data_files", source))
    return sequence_dataset(
        tokenizer, rows.texts(rows.share()), seq_len=seq_len, source=name, max_tokens=max_tokens
    )
