"""Readers of one file each: documents in order, from any position at which a reader has stood.

A file is cut into ``num_parts`` parts that share no row, so that several processes read one file.
A reader yields ``(cursor, text)``; a later reader given that cursor goes on with the next row. What
that costs:

- parquet: a part is a range of row groups (of rows, if there are fewer row groups than parts). A
  cursor is a row number; going on decodes one row group from its start.
- JSON lines and text: a part is a range of bytes, a cursor a byte offset; going on is one seek.
- the same compressed (.gz, .zst, .bz2): no seeking exists, so a part is every num_parts-th line, a
  cursor a line number, and going on decompresses from the start of the file.

`datasets` reads these formats too, but finds its position again by reading a file from its start
and knows no line numbers; here it only resolves names (see sources.py) and serves other formats.
"""

import bisect
import bz2
import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hestia_tune.config import one_line
from hestia_tune.data.stream_errors import MissingColumnError

_BUFFER = 1 << 20
_ROWS_PER_BATCH = 256
COMPRESSIONS = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2"}


@dataclass(frozen=True)
class BadRow:
    """A row that is no text: where it stands in its file, and why."""

    where: str
    reason: str


Row = tuple[int, str | BadRow]


def compression_of(path: str) -> str | None:
    return next((name for end, name in COMPRESSIONS.items() if path.endswith(end)), None)


def open_binary(path: str) -> Any:
    """Opens a local path or a URL of any kind that fsspec knows, unbuffered if it is local."""
    if "://" not in path:
        return open(path, "rb", buffering=0)
    from fsspec.core import url_to_fs

    filesystem, inner_path = url_to_fs(path)
    return filesystem.open(inner_path, "rb")


class ParquetReader:
    """Rows of one column of a parquet file.

    Raises:
        MissingColumnError: if the file does not have the column.
        OSError, EOFError or an error of pyarrow: if the file is corrupt.
    """

    def __init__(self, path: str, column: str):
        import pyarrow.parquet as pq

        self.path = path
        self.column = column
        self._raw = open_binary(path)
        self._group, self._batches = -1, iter(())
        self._first, self._values, self._batch = 0, None, ()
        # Without a buffer, each row group's whole column would be held compressed.
        self._file = pq.ParquetFile(self._raw, pre_buffer=False, buffer_size=_BUFFER)
        metadata = self._file.metadata
        self._starts = [0]
        for group in range(metadata.num_row_groups):
            self._starts.append(self._starts[-1] + metadata.row_group(group).num_rows)
        names = self._file.schema_arrow.names
        if column not in names:
            raise MissingColumnError(
                f"{path} has no column {column!r}; it has {', '.join(names) or 'none'}"
            )

    def close(self) -> None:
        self._raw.close()

    def rows(self, part: int, num_parts: int, start: int | None = None) -> Iterator[Row]:
        begin, end = (self._bound(p, num_parts) for p in (part, part + 1))
        for row in range(begin if start is None else start, end):
            yield row + 1, self._value(row)

    def _bound(self, part: int, num_parts: int) -> int:
        num_groups = len(self._starts) - 1
        if num_groups >= num_parts:
            return self._starts[num_groups * part // num_parts]
        return self._starts[-1] * part // num_parts

    def _value(self, row: int) -> str | BadRow:
        group = bisect.bisect_right(self._starts, row) - 1
        if group != self._group or row < self._first:
            self._batches = self._file.iter_batches(
                _ROWS_PER_BATCH, row_groups=[group], columns=[self.column], use_threads=False
            )
            self._group, self._first, self._batch = group, self._starts[group], ()
            self._values = None
        while row >= self._first + len(self._batch):
            self._first += len(self._batch)
            batch = next(self._batches, None)
            if batch is None:
                raise EOFError(f"row group {group} ends before row {row}")
            self._batch, self._values = batch.column(0), None
        if self._values is None:
            self._values = _python_values(self._batch)
        value = self._values[row - self._first]
        if isinstance(value, str):
            return value
        if isinstance(value, UnicodeDecodeError):
            return BadRow(f"row {row}", f"is not UTF-8 ({one_line(value)})")
        return BadRow(f"row {row}", f"column {self.column!r} holds {_kind(value)}, not text")


class LineReader:
    """Rows of a JSON lines file (one column of each object), or the lines of a text file.

    Blank lines of a JSON lines file are no rows. Compressed data that is corrupt raises OSError,
    EOFError or zlib.error.
    """

    def __init__(self, path: str, column: str, is_json: bool):
        self.path = path
        self.column = column
        self.is_json = is_json
        self.compression = compression_of(path)

    def close(self) -> None:
        pass

    def rows(self, part: int, num_parts: int, start: int | None = None) -> Iterator[Row]:
        read = self._plain_lines if self.compression is None else self._compressed_lines
        if part == 0 and start is None and self._is_empty():
            yield 0, BadRow("line 1", "is missing: the file is empty")
        for place, cursor, line in read(part, num_parts, start):
            if place == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if self.is_json and not line.strip():
                continue
            value = self._parse(line)
            if isinstance(value, tuple):
                value = BadRow(f"line {self._line_number(place)}", value[0])
            yield cursor, value

    def _plain_lines(self, part: int, num_parts: int, start: int | None):
        with io.BufferedReader(open_binary(self.path), _BUFFER) as file:
            size = file.seek(0, io.SEEK_END)
            begin, end = size * part // num_parts, size * (part + 1) // num_parts
            place = start
            if place is None:
                # A line belongs to the part in which it starts.
                place = 0
                if begin > 0:
                    file.seek(begin - 1)
                    place = begin - 1 + len(file.readline())
            file.seek(place)
            while place < end and (line := file.readline()):
                yield place, place + len(line), line
                place += len(line)

    def _compressed_lines(self, part: int, num_parts: int, start: int | None):
        with open_binary(self.path) as raw, _decompressed(raw, self.compression) as file:
            for number, line in enumerate(file):
                if number >= (start or 0) and number % num_parts == part:
                    yield number, number + 1, line

    def _parse(self, line: bytes) -> str | tuple[str]:
        """The row's text, or in a tuple why it has none."""
        if b"\0" in line:
            return ("holds zero bytes; the file looks binary",)
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            return (f"is not UTF-8 ({one_line(error)})",)
        if not self.is_json:
            return text.rstrip("\r\n") if text.endswith("\n") else text
        try:
            row = json.loads(text)
        except ValueError as error:
            return (f"is not JSON ({one_line(error)}); the file must hold one object per line",)
        if not isinstance(row, dict):
            return (f"holds {_kind(row)}, not a JSON object; the file must hold one per line",)
        if self.column not in row:
            return (f"has no column {self.column!r}; it has {', '.join(row) or 'none'}",)
        value = row[self.column]
        if not isinstance(value, str):
            return (f"column {self.column!r} holds {_kind(value)}, not text",)
        return value

    def _line_number(self, place: int) -> int:
        """Line number, from 1; counted from the file's start, since only errors need it."""
        if self.compression is not None:
            return place + 1
        number = 1
        with open_binary(self.path) as file:
            while place > 0 and (block := file.read(min(place, _BUFFER))):
                number += block.count(b"\n")
                place -= len(block)
        return number

    def _is_empty(self) -> bool:
        with open_binary(self.path) as raw:
            if self.compression is None:
                return not raw.read(1)
            with _decompressed(raw, self.compression) as file:
                return not file.read(1)


class DatasetReader:
    """Rows of one shard of a `datasets.IterableDataset`, for formats without a reader of their own.

    A part is every num_parts-th row, a cursor a row number; going on reads from the shard's start.
    """

    def __init__(self, dataset: Any, shard: int, column: str):
        self.path = f"shard {shard}"
        self.column = column
        self._rows = dataset.shard(num_shards=dataset.num_shards, index=shard)

    def close(self) -> None:
        pass

    def rows(self, part: int, num_parts: int, start: int | None = None) -> Iterator[Row]:
        start = start or 0
        for number, row in enumerate(self._rows.skip(start), start):
            if number % num_parts != part:
                continue
            value = row.get(self.column)
            if self.column not in row:
                raise MissingColumnError(
                    f"{self.path} has no column {self.column!r}; it has {', '.join(row) or 'none'}"
                )
            if not isinstance(value, str):
                reason = f"column {self.column!r} holds {_kind(value)}, not text"
                value = BadRow(f"row {number}", reason)
            yield number + 1, value


def _decompressed(raw: Any, compression: str) -> io.BufferedReader:
    if compression == "gzip":
        return gzip.open(raw)
    if compression == "bz2":
        return bz2.open(raw)
    import pyarrow

    return io.BufferedReader(
        pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
    )


def _python_values(array: Any) -> list[Any]:
    """The array as Python objects; a UnicodeDecodeError in place of a text that is not UTF-8."""
    try:
        return array.to_pylist()
    except UnicodeDecodeError:
        return [_value_or_error(scalar) for scalar in array]


def _value_or_error(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error


def _kind(value: Any) -> str:
    return "null" if value is None else f"a value of type {type(value).__name__}"
