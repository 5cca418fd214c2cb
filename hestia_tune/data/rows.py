"""Documents of a hub dataset or of files, in blocks, by `datasets` in streaming mode.

`datasets` finds the files, reads them, deals them out and remembers its place. The cost of its way:
to go on in the midst of a file that is no parquet, it reads all that comes before; and which of
many files was bad stands in its log, not in the error.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, ClassVar

import datasets

from hestia_tune.config import Section, one_line, option

# Fewer files than this are opened at the start, to deal out parquet by row groups.
FEW_FILES = 128
BLOCK_CHARACTERS = 1 << 24


class DataStreamError(OSError):
    """The stream met data that it cannot read.

    It may come days into a run: the caller should save a checkpoint before it passes the error on.
    """


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

    @property
    def files(self) -> str:
        """What is read, for messages."""
        return str(self.data_files or self.source)


def open_rows(config: StreamConfig) -> tuple[datasets.IterableDataset, str]:
    """The rows of a hub dataset or of files, of which one column holds the text.

    Returns:
        The rows; and a digest of the files' names, their sizes (of local ones), split and column.

    Raises:
        ValueError: if there is no such dataset, file, split or column, or the first row is no text.
    """
    if config.source in ("parquet", "json", "text") and not config.data_files:
        raise ValueError(f"source {config.source} needs data_files; give a path, a list or a glob")
    try:
        builder = datasets.load_dataset_builder(
            config.source, config.name, data_files=config.data_files, revision=config.revision
        )
        if hasattr(builder.config, "batch_size"):  # parquet; else a whole row group at once
            builder.config.batch_size = 256
        rows = builder.as_streaming_dataset(config.split)
        if rows.num_shards < FEW_FILES:
            rows = rows.reshard()
        if next(text_blocks(rows, config, 1), None) is None:
            raise ValueError("it holds no rows")
    except Exception as error:  # `datasets` raises errors of many unrelated types
        raise ValueError(
            f"dataset {config.files} could not be loaded: {one_line(error)}"
        ) from error
    if rows.column_names:
        rows = rows.select_columns([config.column])
    paths = (builder.config.data_files or {}).get(config.split, [])
    sizes = [os.path.isfile(path) and os.path.getsize(path) for path in paths]
    names = [PurePosixPath(path).name for path in paths]
    described = repr((config.split, config.column, names, sizes))
    return rows, hashlib.sha256(described.encode()).hexdigest()[:16]


def text_blocks(
    rows: datasets.IterableDataset, config: StreamConfig, size: int
) -> Iterator[list[str]]:
    """Lists of ``size`` texts, or of fewer with 16M characters.

    After each, ``rows.state_dict()`` is the place behind it.

    Raises:
        DataStreamError: on data that cannot be read, or are no text.
    """
    # Looked up as a file is opened; they count tries.
    datasets.config.STREAMING_OPEN_MAX_RETRIES = config.max_retries + 1
    datasets.config.STREAMING_READ_MAX_RETRIES = config.max_retries + 1
    block, characters = [], 0
    try:
        for row in rows.iter(batch_size=1):  # iter(rows) would deal out the share to the workers
            (text,) = row.get(config.column, [None])
            if not isinstance(text, str):
                raise TypeError(
                    f"column {config.column!r} of a row holds {type(text).__name__}, not text; the "
                    f"row has {', '.join(row)}"
                )
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
