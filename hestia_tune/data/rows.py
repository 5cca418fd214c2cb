"""Documents of a hub dataset or of files, in blocks, by `datasets` in streaming mode.

`datasets` finds the files, reads them, deals them out and remembers its place. The cost of its way:
to go on in the midst of a file that is no parquet, it reads all that comes before; and which of
many files was bad stands in its log, not in the error.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import datasets
from datasets import IterableDataset

from hestia_tune.config import StreamConfig, nearest
from hestia_tune.errors import InputError, InputTypeError, one_line

BLOCK_CHARACTERS = 1 << 24


class DataStreamError(InputError):
    """The stream met data that it cannot read.

    It may come days into a run: the caller should save a checkpoint before it passes the error on.
    """


def open_rows(config: StreamConfig) -> tuple[IterableDataset, str, list[str]]:
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


def text_blocks(rows: IterableDataset, config: StreamConfig, size: int) -> Iterator[list[str]]:
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
