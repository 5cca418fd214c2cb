"""Documents of a hub dataset or of files, row by row, by `datasets` in streaming mode.

`datasets` finds the files, reads them, deals them out and remembers its place. Here is only what it
leaves open: parquet by row groups, shares that are even, files in another order in each epoch, and
errors that name the file. The cost of its way: to go on in the midst of a file that is no parquet,
it reads all that comes before.
"""

import hashlib
import io
import os
import traceback
import zlib
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import datasets
import fsspec.asyn
import fsspec.compression
import pyarrow as pa
from datasets.distributed import split_dataset_by_node
from torch.utils.data import get_worker_info

from hestia_tune.config import one_line

# With fewer files than this, parquet is dealt out by row groups. With many, to open them all at the
# start just to count their row groups would take too long.
FEW_FILES = 128
# With fewer files (or row groups) for each share than this, shares would be too uneven; then every
# share reads all rows and takes each num_shares-th. Reading costs little beside tokenizing.
LEAST_FILES_OF_A_SHARE = 8
_ROWS_AT_ONCE = 256
_FORMATS = ("parquet", "json", "text")


def _zstd_reader(file: Any, mode: str = "rb", **_: Any) -> io.BufferedReader:
    return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd"))


# fsspec reads .zst by a package of its own, and then only up to the end of the first frame.
fsspec.compression.register_compression("zstd", _zstd_reader, "zst", force=True)


class DataStreamError(OSError):
    """The stream met data that it cannot read; the message names the file where it is known.

    It may come days into a run: the caller should save a checkpoint before it passes the error on.
    """


class TextRows:
    """Rows of a hub dataset or of files, of which one column holds the text.

    Args:
        source: first argument of ``datasets.load_dataset``.
        column: the column that holds the text.
        split: the split to read.
        max_retries: tries after the first when a remote file does not answer.
        arguments: more of ``datasets.load_dataset`` (``name``, ``data_files``, ``revision``, ...).

    Attributes:
        name: source and files, for messages.
        digest: changes with the files' names, their sizes (of local ones), split and column.

    Raises:
        ValueError: if there is no such dataset, file, split or column, or the first row is no text.
    """

    def __init__(
        self,
        source: str,
        column: str,
        *,
        split: str = "train",
        max_retries: int = 6,
        **arguments: Any,
    ):
        self.column, self.max_retries = column, max_retries
        files = arguments.get("data_files")
        if source in _FORMATS and not files:
            raise ValueError(f"source {source!r} needs data_files; give a path, a list or a glob")
        self.name = str(source if files is None else files)
        try:
            download = datasets.DownloadConfig(max_retries=max_retries)
            builder = datasets.load_dataset_builder(source, download_config=download, **arguments)
            if hasattr(builder.config, "batch_size"):  # parquet; else a whole row group at once
                builder.config.batch_size = _ROWS_AT_ONCE
            self._rows = builder.as_streaming_dataset(split)
            if self._rows.num_shards < FEW_FILES:
                self._rows = self._rows.reshard()
            if next(self.texts(self._rows), None) is None:
                raise ValueError("it holds no rows")
        except Exception as error:  # `datasets` raises errors of many unrelated types
            raise ValueError(
                f"dataset {self.name} could not be loaded: {one_line(error)}"
            ) from error
        if self._rows.column_names:
            self._rows = self._rows.select_columns([column])
        paths = [str(path) for path in (builder.config.data_files or {}).get(split, [])]
        sizes = [os.path.getsize(path) if os.path.isfile(path) else None for path in paths]
        described = (split, column, [PurePosixPath(path).name for path in paths], sizes)
        self.digest = hashlib.sha256(repr(described).encode()).hexdigest()[:16]

    def share(
        self, index: int = 0, num_shares: int = 1, shuffle: str | None = None
    ) -> datasets.IterableDataset:
        """A part of the rows; all shares together hold each row once.

        Args:
            shuffle: seeds the order of the files; None keeps it.
        """
        many = self._rows.num_shards >= LEAST_FILES_OF_A_SHARE * num_shares
        rows = split_dataset_by_node(
            self._rows, index, num_shares, strategy="shards" if many else "auto"
        )
        if shuffle is not None:
            # `datasets` seeds the order of the files with the number of the epoch; in epoch 0 it is
            # as it is. Its `shuffle` would add a buffer, which is lost on resuming.
            rows.set_epoch(1 + zlib.crc32(shuffle.encode()))
        return rows

    def texts(self, rows: datasets.IterableDataset) -> Iterator[str]:
        """The texts of a share. After each, ``rows.state_dict()`` is the place behind it.

        Raises:
            DataStreamError: on data that cannot be read, or are no text.
        """
        for kind in (
            "READ",
            "OPEN",
        ):  # which `datasets` looks up as it opens a file; it counts tries
            setattr(datasets.config, f"STREAMING_{kind}_MAX_RETRIES", self.max_retries + 1)
        if get_worker_info() is not None:
            fsspec.asyn.reset_lock()  # a lock held at the fork would be held for ever
        batches = rows.iter(batch_size=1)  # iter(rows) would deal out the share to the workers
        while True:
            try:
                row = next(batches, None)
            except Exception as error:  # readers' errors are of many unrelated types
                raise DataStreamError(
                    f"{_file_of(error) or self.name} cannot be read ({type(error).__name__}: "
                    f"{one_line(error)}); replace the file, take it out of data_files, or look at "
                    "the network"
                ) from error
            if row is None:
                return
            if self.column not in row:
                raise DataStreamError(
                    f"a row of {self.name} has no column {self.column!r}; it has {', '.join(row)}"
                )
            (text,) = row[self.column]
            if not isinstance(text, str):
                kind = "null" if text is None else f"a value of type {type(text).__name__}"
                raise DataStreamError(
                    f"column {self.column!r} of a row of {self.name} holds {kind}, not text"
                )
            yield text


def _file_of(error: Exception) -> str | None:
    """The file that was being read, which only the frame of its reader knows."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    files = [frame.f_locals.get("file") for frame in frames]
    return next((file for file in reversed(files) if isinstance(file, str)), None)
