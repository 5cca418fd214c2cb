"""Where documents come from: files cut into units, each of which one reader owns.

`datasets` resolves names (hub repositories, splits, configurations, globs) to files; the readers of
readers.py read them. The files are cut into units by a rule that knows only the files, never the
number of ranks or workers: so a run that resumes on another number of them deals the same units
anew (see shares.py). There are at least 128 units, or 8 per compressed file, unless there are more
files than that: then a unit is a file.
"""

import copy
import hashlib
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

from hestia_tune.config import one_line
from hestia_tune.data.readers import (
    BadRow,
    DatasetReader,
    LineReader,
    ParquetReader,
    compression_of,
)
from hestia_tune.data.stream_errors import (
    Backoff,
    DataStreamError,
    is_transient,
    retried,
)

MIN_UNITS = 128
# Each part of a file that cannot be seeked costs its reader a pass over the whole file.
MAX_UNSEEKABLE_PARTS = 8
# Rows among which there must be a document, where bad rows are skipped.
_CHECKED_ROWS = 1000
_FORMATS = ("parquet", "json", "text")

# Cursor behind the document; the document (None is a skipped row); its length in characters.
Item = tuple[int, Any, int]


class Source:
    """Units of documents.

    Attributes:
        parts: the number of units of each file; units are numbered file by file.
        fingerprint: changes with the files' names, their sizes (of local ones) and the units.
    """

    parts: Sequence[int]
    fingerprint: str

    @property
    def num_units(self) -> int:
        return sum(self.parts)

    def order(self, epoch: int, seed: int | None) -> list[int]:
        """All units in the order of an epoch: files shuffled by seed + epoch, unless seed is None.

        The units of a file stay together, in their order.
        """
        files = list(range(len(self.parts)))
        if seed is not None:
            random.Random(f"files/{seed + epoch}").shuffle(files)
        first = [0]
        for count in self.parts:
            first.append(first[-1] + count)
        return [unit for file in files for unit in range(first[file], first[file + 1])]

    def read(self, unit: int, cursor: int | None) -> Iterator[Item]:
        """The unit's documents from a cursor on (None is its start)."""
        raise NotImplementedError

    def fresh(self) -> "Source":
        """A copy that shares no open file, for one iterator."""
        return copy.copy(self)


class TextSource(Source):
    """Texts of one column of many files.

    Args:
        files: paths or URLs.
        kind: "parquet", "json" or "text"; None for ``dataset``.
        column: the column that holds the text.
        skip_bad_rows: skips and counts rows that are no text, rather than raise.
        max_retries: tries after the first when a remote file does not answer.
        dataset: a ``datasets.IterableDataset`` to read where ``kind`` is None.

    Raises:
        ValueError: if the first file lacks the column.
    """

    def __init__(
        self,
        files: Sequence[str],
        kind: str | None,
        column: str,
        *,
        skip_bad_rows: bool = False,
        max_retries: int = 6,
        dataset: Any = None,
    ):
        self.files = list(files)
        self.kind = kind
        self.column = column
        self.skip_bad_rows = skip_bad_rows
        self.max_retries = max_retries
        self._dataset = dataset
        wanted = -(-MIN_UNITS // len(self.files))
        self.parts = [
            min(wanted, MAX_UNSEEKABLE_PARTS) if kind is None or compression_of(file) else wanted
            for file in self.files
        ]
        common = os.path.commonprefix([os.path.dirname(file) for file in self.files])
        names = [file[len(common) :] for file in self.files]
        sizes = [os.path.getsize(file) if os.path.isfile(file) else None for file in self.files]
        described = repr((kind, column, names, sizes, self.parts)).encode()
        self.fingerprint = hashlib.sha256(described).hexdigest()[:16]
        self._reader, self._reader_file = None, -1

    def fresh(self) -> "TextSource":
        source = copy.copy(self)
        source._reader, source._reader_file = None, -1
        return source

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_reader": None, "_reader_file": -1}

    def read(self, unit: int, cursor: int | None) -> Iterator[Item]:
        file, part = self._locate(unit)
        backoff = Backoff(self.files[file], self.max_retries)
        while True:
            try:
                rows = self._open(file).rows(part, self.parts[file], cursor)
                for next_cursor, value in rows:
                    yield next_cursor, *self._document(file, value)
                    cursor = next_cursor
                    backoff.succeeded()
                return
            except DataStreamError:
                raise
            except Exception as error:  # pyarrow's and the network libraries' share no base class
                self._close()
                if is_transient(error):
                    backoff.failed(error)
                    continue
                if not _is_read_error(error):
                    raise
                raise DataStreamError(
                    f"{self.files[file]} cannot be read, it may be corrupt: {one_line(error)}; "
                    "replace the file or take it out of data_files"
                ) from error

    def check(self) -> None:
        """Reads one document, so that a wrong path or column fails before the run does.

        Raises:
            ValueError: if the first row holds none, or no row of many if bad ones are skipped.
        """
        fault = f"the {len(self.files)} data files, {self.files[0]} first, hold no rows"
        rows = self.fresh()
        rows.skip_bad_rows = False
        unit, tried = 0, 0
        while unit < self.num_units and tried < _CHECKED_ROWS:
            try:
                for _, document, _ in rows.read(unit, None):
                    if document is not None:
                        rows._close()
                        return
                    tried += 1
                    if tried == _CHECKED_ROWS:
                        break
                unit += 1
            except DataStreamError as error:
                if isinstance(error, ConnectionError):
                    raise
                fault = str(error)
                if rows.skip_bad_rows or not self.skip_bad_rows:
                    break
                rows.skip_bad_rows = True
        rows._close()
        raise ValueError(fault)

    def _locate(self, unit: int) -> tuple[int, int]:
        for file, count in enumerate(self.parts):
            if unit < count:
                return file, unit
            unit -= count
        raise IndexError(f"unit {unit} past the last")

    def _open(self, file: int) -> Any:
        if self._reader_file != file:
            self._close()
            path = self.files[file]
            if self.kind == "parquet":
                self._reader = ParquetReader(path, self.column)
            elif self.kind is None:
                self._reader = DatasetReader(self._dataset, file, self.column)
            else:
                self._reader = LineReader(path, self.column, is_json=self.kind == "json")
            self._reader_file = file
        return self._reader

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader, self._reader_file = None, -1

    def _document(self, file: int, value: str | BadRow) -> tuple[str | None, int]:
        if isinstance(value, str):
            return value, len(value)
        if self.skip_bad_rows:
            return None, 0
        raise DataStreamError(
            f"{self.files[file]}, {value.where} {value.reason}; mend it, or set skip_bad_rows: true"
        )


def text_source(
    source: str,
    *,
    column: str = "text",
    name: str | None = None,
    data_files: Any = None,
    split: str = "train",
    revision: str | None = None,
    skip_bad_rows: bool = False,
    max_retries: int = 6,
) -> TextSource:
    """Resolves what ``datasets.load_dataset`` would load to its files. Arguments as there.

    Raises:
        ValueError: if there is no such dataset, file, split or column.
        DataConnectionError: if the hub does not answer.
    """
    import datasets

    if source in _FORMATS and not data_files:
        raise ValueError(f"source {source!r} needs data_files; give a path, a list or a glob")
    what = source if data_files is None else f"{source} {data_files}"
    # A configuration file's list is no Python list, which `datasets` insists on.
    if isinstance(data_files, Sequence) and not isinstance(data_files, str):
        data_files = [str(file) for file in data_files]
    # "json", with data_files for the wanted split alone, has them as its "train" split.
    given = {} if data_files is None else {"data_files": data_files}

    def resolve() -> Any:
        return datasets.load_dataset_builder(source, name, revision=revision, **given)

    options = {"skip_bad_rows": skip_bad_rows, "max_retries": max_retries}
    try:
        builder = retried(resolve, f"dataset {what}", max_retries)
        found = {str(key): list(files) for key, files in (builder.config.data_files or {}).items()}
        kind = type(builder).__module__.rpartition(".")[2]
        if kind in _FORMATS and split in found:
            texts = TextSource(found[split], kind, column, **options)
        elif kind in _FORMATS:
            raise ValueError(f"there is no split {split!r}; it has {', '.join(found) or 'none'}")
        else:
            rows = retried(
                lambda: builder.as_streaming_dataset(split), f"dataset {what}", max_retries
            )
            shards = [f"{what}, shard {shard}" for shard in range(rows.num_shards)]
            texts = TextSource(shards, None, column, dataset=rows, **options)
    except DataStreamError:
        raise
    except Exception as error:  # `datasets` raises errors of many unrelated types
        raise ValueError(f"dataset {what} could not be loaded: {one_line(error)}") from error
    texts.check()
    return texts


def _is_read_error(error: Exception) -> bool:
    root = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError | EOFError) or root in ("pyarrow", "zlib", "fsspec", "aiohttp")
