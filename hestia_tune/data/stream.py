"""Training text as a stream: shuffled, tokenized and packed while it is read.

A run over 10B tokens can hold neither the text nor its tokens. Here each worker of each rank
reads its own share of the rows, and memory does not grow with the number of tokens. The library
`datasets` finds the files, reads them, deals them out and remembers the position.

Documents are shuffled by blocks: the next ``shuffle_buffer`` documents of a share (or 16M
characters, if that is less) are read and permuted by a seed of their own. This mixes as far as a
sliding buffer does. The state of a sliding buffer would be its documents. Here the state is the
position of the block, a few numbers, and the tokens before the block that have not filled a
sequence yet.

The cost: resuming reads and tokenizes one block again (a second or two), and in a file that is
not parquet it reads everything before the block. Resuming also needs the ranks and workers that
the run began with. A tokenized set (tokens.py) does not. If one of many files is damaged, its
name is in the log of `datasets`, not in the error.
"""

import hashlib
import os
import random
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import datasets
import torch.distributed as dist
from datasets.distributed import split_dataset_by_node
from pyarrow import parquet
from torch.utils.data import IterableDataset, get_worker_info

from hestia_tune.config import StreamConfig, nearest
from hestia_tune.data.sequences import SequenceDataset, encode_each, training_sample
from hestia_tune.errors import InputError, InputTypeError, one_line

BLOCK_CHARACTERS = 1 << 24


class DataStreamError(InputError):
    """The stream met data that it cannot read.

    It may come days into a run: the caller should save a checkpoint before it passes the error on.
    """


def open_rows(config: StreamConfig) -> tuple[datasets.IterableDataset, str, list[str]]:
    """The rows of a hub dataset or of files, of which one column holds the text.

    Returns:
        The rows; a digest of local files' names and sizes or of other paths, split and column; and
        the files' paths.

    Raises:
        InputError: if there is no such dataset, file or split, or it is empty.
        DataStreamError: if the first row cannot be read, or is no text.
    """
    known = ("parquet", "json", "text", "token_shards")
    if config.source in known and not config.data_files:
        raise InputError(f"source {config.source} needs data_files; give a path, a list or a glob")
    near = nearest(config.source, known)
    if near and config.source not in known and not os.path.exists(config.source):
        # Before the hub is asked, which without a network takes half a minute.
        raise InputError(f"no source {config.source}{near}")
    try:
        builder: Any = datasets.load_dataset_builder(
            config.source, config.name, data_files=config.data_files, revision=config.revision
        )
        if hasattr(builder.config, "batch_size"):  # parquet; else a whole row group at once
            builder.config.batch_size = 256
        rows: Any = builder.as_streaming_dataset(config.split)
        if rows.num_shards < 128:  # to open more, to count their row groups, would take too long
            rows = rows.reshard()
    except Exception as error:  # of many unrelated types
        raise InputError(f"{config.files} could not be loaded: {one_line(error)}") from error
    if next(text_blocks(rows, config, 1), None) is None:
        raise InputError(f"{config.files} holds no rows")
    if rows.column_names:
        rows = rows.select_columns([config.column])
    paths = (builder.config.data_files or {}).get(config.split, [])
    # A path on the hub has repository and commit in it.
    files = [(PurePosixPath(p).name, os.path.getsize(p)) if os.path.isfile(p) else p for p in paths]
    described = repr((config.split, config.column, files))
    return rows, hashlib.sha256(described.encode()).hexdigest()[:16], paths


def text_blocks(
    rows: datasets.IterableDataset, config: StreamConfig, size: int
) -> Iterator[list[str]]:
    """Lists of ``size`` texts, or of fewer with 16M characters.

    After each, ``rows.state_dict()`` is the place behind it.

    Raises:
        DataStreamError: on data that cannot be read, or are no text.
    """
    block, characters = [], 0
    try:
        for row in rows.iter(batch_size=1):  # iter(rows) would deal out the share to the workers
            (text,) = row.get(config.column, [None])
            if not isinstance(text, str):
                found = f"{type(text).__name__}, not text; columns: {', '.join(row)}"
                raise InputTypeError(f"column {config.column!r} holds {found}")
            block.append(text)
            characters += len(text)
            if len(block) == size or characters >= BLOCK_CHARACTERS:
                yield block
                block, characters = [], 0
    except Exception as error:  # readers' errors are of many unrelated types
        raise DataStreamError(
            f"{config.files} cannot be read ({type(error).__name__}: {one_line(error)}); replace "
            "the file, take it out of data_files, or look at the network"
        ) from error
    if block:
        yield block


# With fewer files (or row groups) for each share than this, shares would be too uneven; then every
# share reads all rows and takes each num_shares-th. Reading costs little beside tokenizing.
LEAST_FILES = 8
LOT = 8  # documents that one call of the tokenizer gets
_START = {
    "epoch": 0,
    "block": 0,  # of the epoch
    "rows": None,  # where `datasets` stands before the block
    "carry": [],  # tokens before the block that filled no sequence
    "given": 0,  # sequences of the block
    "sequences": 0,  # in all
}


class StreamingTextDataset(IterableDataset):
    """Sequences of ``seq_len`` tokens from a source of documents; torchtune samples.

    ``state_dict()`` is the place of the share that was last iterated, which torchdata's
    ``StatefulDataLoader`` saves and restores in each worker.

    Args:
        tokenizer: a torchtune tokenizer (``encode``, ``eos_id``; with ``encode_batch``, of many
            texts without special tokens, it is faster).
        config: the options.

    Attributes:
        rank, world_size: of this process, which reads its share; those of torch.distributed.
        batch_size: that of the data loader, to which several workers give whole batches.

    Raises:
        InputError: if something cannot be found.
    """

    def __init__(self, tokenizer: Any, config: StreamConfig):
        self.tokenizer, self.config, self.batch_size = tokenizer, config, 1
        grouped = dist.is_initialized()
        self.rank = dist.get_rank() if grouped else 0
        self.world_size = dist.get_world_size() if grouped else 1
        self._rows, self._digest, self._paths = open_rows(config)
        self._place = self._following = _START  # the present one; that of the next iteration

    @property
    def num_sequences(self) -> int | None:
        """Of this rank (all its workers together), the same on every rank; None if the stream ends
        with its data, or never."""
        tokens = self.config.max_tokens
        return tokens and tokens // self.config.seq_len // self.world_size

    def count_documents(self) -> int | None:
        """Of one pass, all ranks together: by the hub, the footers of local parquet files, or the
        lines of local text; None where only reading everything would tell."""
        splits, count = self._rows.info.splits or {}, 0
        if self.config.split in splits:
            return splits[self.config.split].num_examples
        for path in self._paths:
            suffix = os.path.isfile(path) and PurePosixPath(path).suffix
            if suffix == ".parquet":
                count += parquet.read_metadata(path).num_rows
            elif suffix in (".txt", ".jsonl"):
                with open(path, "rb") as file:
                    count += sum(
                        chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b"")
                    )
            else:
                return None
        return count or None

    def identity(self) -> list:
        """What must be the same for a place to mean the same."""
        config = self.config
        return [self._digest, config.seq_len, config.seed, config.shuffle_buffer, *self._share()]

    def state_dict(self) -> dict[str, Any]:
        """The place after the last sequence given."""
        return self._place | {"stream": self.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on after ``state``; a ValueError if it is of another stream."""
        if state["stream"] != self.identity():
            raise InputError(
                "the saved place is that of another stream: files, column, seq_len, seed, "
                "shuffle_buffer or the number of ranks or workers have changed; set them back, "
                "start anew, or use a tokenized set (`tune run hestia_tokenize`)"
            )
        self._place = self._following = state

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._place, self._following = self._following, _START
        return self._sequences(self._place)

    def _sequences(self, place: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The sequences from a place on."""
        seq_len, eos_id = self.config.seq_len, self.tokenizer.eos_id
        carry, given, sequences = place["carry"], place["given"], place["sequences"]
        limit, (share, num_shares) = None, self._share()
        if self.num_sequences is not None:  # whole batches, dealt to the workers in turn
            workers, batches = num_shares // self.world_size, self.num_sequences // self.batch_size
            limit = len(range(share % workers, batches, workers)) * self.batch_size
        if sequences == limit:
            return
        if get_worker_info() is not None:
            # Workers are the parallelism; threads of each worker would fight over the same cores.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        encode = getattr(self.tokenizer, "encode_batch", partial(encode_each, self.tokenizer))
        for at, block in self._blocks(place):
            tokens, number = list(carry), 0
            for start in range(0, len(block), LOT):
                for ids in encode(block[start : start + LOT]):
                    tokens.extend(ids)
                    tokens.append(eos_id)
                end = len(tokens) - len(tokens) % seq_len
                for first in range(0, end, seq_len):
                    number += 1
                    if number <= given:
                        continue
                    sequences += 1
                    self._place = at | {"carry": carry, "given": number, "sequences": sequences}
                    chosen = tokens[first : first + seq_len]
                    yield training_sample(chosen, eos_id, self.config.document_masks)
                    if sequences == limit:
                        return
                tokens = tokens[end:]
            carry, given = tokens, 0
        self._place = at | {"carry": carry, "given": 0, "sequences": sequences}

    def _blocks(self, place: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """Texts that are shuffled together, with their place; at the end, none with the end's."""
        config, (share, num_shares) = self.config, self._share()
        strategy = "shards" if self._rows.num_shards >= LEAST_FILES * num_shares else "auto"
        while config.epochs is None or place["epoch"] < config.epochs:
            seed = f"{config.seed}/{place['epoch']}"
            rows = split_dataset_by_node(self._rows, share, num_shares, strategy=strategy)
            if config.shuffle_buffer:
                # It seeds the order of the files, but in epoch 0 leaves them as they are. `shuffle`
                # would add a buffer, which is lost on resuming.
                rows.set_epoch(1 + zlib.crc32(seed.encode()))
            if place["rows"] is not None:
                rows.load_state_dict(place["rows"])
            for block in text_blocks(rows, config, config.shuffle_buffer or LOT):
                following = rows.state_dict()
                if config.shuffle_buffer:
                    block_seed = f"{seed}/{share}/{num_shares}/{place['block']}"
                    random.Random(block_seed).shuffle(block)
                yield place, block
                place = place | {"rows": following, "block": place["block"] + 1}
            if place["block"] == 0:
                raise DataStreamError(
                    f"share {share} of {num_shares} (ranks x workers) of {config.files} holds no "
                    "documents; use fewer workers, or more data"
                )
            place = place | {"epoch": place["epoch"] + 1, "block": 0, "rows": None}
        yield place, []

    def _share(self) -> tuple[int, int]:
        """(number, of how many) of this worker of this rank."""
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return self.rank * workers + number, self.world_size * workers


def text_dataset(tokenizer: Any, **options: Any) -> SequenceDataset:
    """A text that is read once, in order, at the start, and held in memory (8 bytes a token), which
    suits runs of up to some 100M tokens.

    Args:
        tokenizer: a torchtune tokenizer.
        options: of :class:`hestia_tune.data.stream.StreamConfig`, ``shuffle_buffer`` being 0 and
            ``epochs`` 1 by default.

    Raises:
        ValueError, DataStreamError: as the stream does.
    """
    config = StreamConfig.parse({"shuffle_buffer": 0, "epochs": 1} | options)
    if config.epochs is None and config.max_tokens is None:
        raise InputError("a text in memory must end; give epochs or max_tokens")
    stream = StreamingTextDataset(tokenizer, replace(config, document_masks=False))
    stream.rank, stream.world_size = 0, 1
    tokens = (token for sample in stream for token in sample["tokens"])
    return SequenceDataset(tokens, config.seq_len, tokenizer.eos_id, config.document_masks)
