"""Token shards: the tokens of a source on disk, for those who train on it many times.

A folder of ``tokens_NNNNN.bin`` (the ids of one document after another, without EOS, 2 bytes each
if the vocabulary allows, else 4), ``tokens_NNNNN.idx`` (per document int64 [end in the .bin, in
tokens; length of its text in characters]) and ``index.json``. The index keeps which unit of the
source each document came from: so the shards are a source with the same units in the same order,
and streams from the two give the same batches for any shuffle, ranks and workers. If ``max_tokens``
left a part of the source out, its units would be few and uneven: then the shards have units of
their own, ranges of documents, shuffled among each other, and batches are not the stream's.

Files are written under temporary names and renamed when whole, the index last; a run that is killed
goes on behind the last whole shard. Reading maps one shard at a time into memory.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from hestia_tune.data.packing import batch_encoder, encoded, tokenizer_probe
from hestia_tune.data.sources import Item, Source, TextSource, text_source
from hestia_tune.data.stream_errors import DataStreamError
from hestia_tune.files import require_writable_dir, write_atomically

FORMAT = "hestia_tune.data.token_shards/1"
# Of shards that hold a part of a source only; more ranks x workers than these cannot share them.
_UNITS_OF_A_PART = 1024
INDEX = "index.json"


class TokenShards(Source):
    """The documents of a folder of token shards, as arrays of ids.

    Attributes:
        num_tokens: tokens in all, EOS of each document included.

    Raises:
        ValueError: if the folder is not complete or was made with another tokenizer.
    """

    def __init__(self, folder: Any, tokenizer: Any):
        if not isinstance(folder, str | os.PathLike):
            raise ValueError(f"source token_shards needs its folder as data_files; got {folder!r}")
        self.folder = Path(folder)
        index = _read_index(self.folder)
        if index is None:
            raise ValueError(f"{self.folder} holds no token shards: {INDEX} is missing")
        if not index["complete"]:
            raise ValueError(f"{self.folder} is not complete; run the tokenization again to go on")
        if index["probe"] != tokenizer_probe(tokenizer) or index["eos_id"] != tokenizer.eos_id:
            raise ValueError(f"{self.folder} was made with another tokenizer; tokenize anew")
        self.dtype = np.dtype(index["dtype"])
        self.parts = index["parts"]
        self.num_tokens = index["num_tokens"]
        self.shards = index["shards"]
        sums = [shard["sha256"] for shard in self.shards]
        self.fingerprint = hashlib.sha256(repr((self.parts, sums)).encode()).hexdigest()[:16]
        self._segments: dict[int, list[tuple[int, int, int]]] = {}
        is_part = index.get("truncated", False)
        if is_part:
            self._cut_into_units()
        for number, shard in enumerate(self.shards):
            for unit, first, count in [] if is_part else shard["segments"]:
                self._segments.setdefault(unit, []).append((number, first, count))
            sizes = (shard["tokens"] * self.dtype.itemsize, shard["documents"] * 16)
            for path, size in zip(_paths(self.folder, number), sizes, strict=True):
                if not path.is_file() or path.stat().st_size != size:
                    raise ValueError(f"{path} does not have its {size} bytes; tokenize anew")
        self._mapped: tuple[int, np.ndarray, np.ndarray] | None = None

    def _cut_into_units(self) -> None:
        """Units of like numbers of documents, instead of the source's."""
        total = sum(shard["documents"] for shard in self.shards)
        units = max(1, min(_UNITS_OF_A_PART, total))
        self.parts = [1] * units
        bounds = [total * k // units for k in range(units + 1)]
        start = 0
        for number, shard in enumerate(self.shards):
            end = start + shard["documents"]
            for unit in range(units):
                first, last = max(bounds[unit], start), min(bounds[unit + 1], end)
                if first < last:
                    segment = (number, first - start, last - first)
                    self._segments.setdefault(unit, []).append(segment)
            start = end

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": None}

    def read(self, unit: int, cursor: int | None) -> Iterator[Item]:
        """The unit's documents; a cursor is the number of a document in the unit."""
        number = 0
        for shard, first, count in self._segments.get(unit, []):
            for document in range(first + max((cursor or 0) - number, 0), first + count):
                tokens, ends = self._map(shard)
                begin = int(ends[document - 1, 0]) if document else 0
                # A copy: a view would keep the shard mapped while the shuffle holds the document.
                ids = np.array(tokens[begin : int(ends[document, 0])])
                yield number + document - first + 1, ids, int(ends[document, 1])
            number += count

    def _map(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        if self._mapped is None or self._mapped[0] != shard:
            bin_path, idx_path = _paths(self.folder, shard)
            try:
                # An empty file cannot be mapped.
                tokens = np.zeros(0, self.dtype)
                if self.shards[shard]["tokens"]:
                    tokens = np.memmap(bin_path, self.dtype, mode="r")
                ends = np.memmap(idx_path, np.int64, mode="r").reshape(-1, 2)
            except (OSError, ValueError) as error:
                raise DataStreamError(f"{bin_path} cannot be mapped: {error}") from error
            self._mapped = (shard, tokens, ends)
        return self._mapped[1:]


def verify_token_shards(folder: str | Path) -> int:
    """Reads all shards of a folder and holds them against their checksums.

    Returns:
        The number of tokens, EOS of each document included.

    Raises:
        ValueError: naming the first file that differs.
    """
    folder = Path(folder)
    index = _read_index(folder)
    if index is None:
        raise ValueError(f"{folder} holds no token shards: {INDEX} is missing")
    for number, shard in enumerate(index["shards"]):
        for path, key in zip(_paths(folder, number), ("sha256", "idx_sha256"), strict=True):
            with open(path, "rb") as file:
                found = _digest(file)
            if found != shard[key]:
                raise ValueError(f"{path} differs from its checksum; tokenize anew")
    return index["num_tokens"]


def write_token_shards(
    tokenizer: Any,
    folder: str | Path,
    *,
    source: str,
    seed: int | None = None,
    max_tokens: int | None = None,
    shard_tokens: int = 100_000_000,
    **source_arguments: Any,
) -> dict[str, Any]:
    """Tokenizes a source once; goes on where an earlier call was stopped.

    Args:
        tokenizer: a torchtune tokenizer.
        folder: made if need be; must hold nothing but shards of this same call.
        source: as for :func:`hestia_tune.data.streaming.streaming_text_dataset`, like
            ``source_arguments`` (``data_files``, ``column``, ``name``, ``split``, ``revision``,
            ``skip_bad_rows``, ``max_retries``).
        seed: the order of files, that of a stream's first epoch with this seed; None keeps them in
            order. It matters only with ``max_tokens``: which documents are taken.
        max_tokens: stops at the document that reaches so many tokens; None takes all.
        shard_tokens: tokens of a shard, if no single document is longer. What a kill can cost.

    Returns:
        The index, with ``num_tokens`` (EOS of each document included), ``num_documents`` and
        ``skipped_rows``.

    Raises:
        ValueError: if the folder holds other shards, or the source cannot be found.
        DataStreamError: on data that cannot be read.
    """
    for name, value in {"max_tokens": max_tokens, "shard_tokens": shard_tokens}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    folder = require_writable_dir(folder)
    texts = text_source(source, **source_arguments)
    vocab_size = getattr(tokenizer, "vocab_size", None) or 1 << 32
    made_from = {
        "format": FORMAT,
        "source": texts.fingerprint,
        "parts": list(texts.parts),
        "dtype": "<u2" if vocab_size <= 1 << 16 else "<u4",
        "eos_id": tokenizer.eos_id,
        "probe": tokenizer_probe(tokenizer),
        "seed": seed,
        "max_tokens": max_tokens,
    }
    index = _read_index(folder)
    if index is None:
        index = made_from | {
            "complete": False,
            "position": 0,
            "cursor": None,
            "num_tokens": 0,
            "num_documents": 0,
            "skipped_rows": 0,
            "shards": [],
        }
    differing = [key for key, value in made_from.items() if index.get(key) != value]
    if differing:
        raise ValueError(
            f"{folder} holds token shards made otherwise ({', '.join(differing)} differ); choose "
            "another folder, or empty it"
        )
    if not index["complete"]:
        for left_over in folder.glob("tokens_*.tmp"):
            left_over.unlink()
        _write_all(tokenizer, folder, texts, index, shard_tokens)
    return index


def _write_all(
    tokenizer: Any, folder: Path, texts: TextSource, index: dict[str, Any], shard_tokens: int
) -> None:
    limit = index["max_tokens"]
    with tqdm(total=limit, initial=index["num_tokens"], unit="tok", unit_scale=True) as progress:
        shard = _ShardWriter(folder, index)
        documents = encoded(_documents(texts, index), batch_encoder(tokenizer))
        for ids, (unit, characters, place) in documents:
            if ids is None:  # a skipped row
                shard.place = place
                continue
            if shard.tokens and shard.tokens + len(ids) > shard_tokens:
                shard.finish()
                shard = _ShardWriter(folder, index)
            shard.add(unit, ids, characters, place)
            progress.update(len(ids) + 1)
            if limit is not None and index["num_tokens"] + shard.tokens + shard.documents >= limit:
                index["truncated"] = True
                break
        index["complete"] = True
        shard.finish()


def _documents(texts: TextSource, index: dict[str, Any]):
    """(text, (unit, characters, the place behind it)), from the index's place on."""
    units = texts.order(0, index["seed"])
    start, skipped = index["cursor"], index["skipped_rows"]
    for position in range(index["position"], len(units)):
        for cursor, text, characters in texts.read(units[position], start):
            if text is None:
                skipped += 1
            place = {"position": position, "cursor": cursor, "skipped_rows": skipped}
            yield text, (units[position], characters, place)
        start = None


class _ShardWriter:
    """One shard under its temporary name; ``finish`` renames it and enters it into the index."""

    def __init__(self, folder: Path, index: dict[str, Any]):
        self.folder = folder
        self.index = index
        self.tokens = 0
        self.documents = 0
        self._ends = array("q")
        self._segments: list[list[int]] = []
        self.place: dict[str, Any] = {}
        self._sum = hashlib.sha256()
        self._paths = _paths(folder, len(index["shards"]))
        self._file = open(f"{self._paths[0]}.tmp", "wb")  # noqa: SIM115 (closed by finish)

    def add(self, unit: int, ids: list[int], characters: int, place: dict[str, Any]) -> None:
        data = np.array(ids, dtype=self.index["dtype"]).tobytes()
        self._file.write(data)
        self._sum.update(data)
        if not self._segments or self._segments[-1][0] != unit:
            self._segments.append([unit, self.documents, 0])
        self._segments[-1][2] += 1
        self.tokens += len(ids)
        self.documents += 1
        self._ends.extend((self.tokens, characters))
        self.place = place

    def finish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        ends = np.frombuffer(self._ends, np.int64).astype("<i8").tobytes()
        Path(f"{self._paths[1]}.tmp").write_bytes(ends)
        for path in self._paths:
            os.replace(f"{path}.tmp", path)
        index = self.index
        index["num_tokens"] += self.tokens + self.documents
        index["num_documents"] += self.documents
        index.update(self.place)
        index["shards"].append(
            {
                "tokens": self.tokens,
                "documents": self.documents,
                "sha256": self._sum.hexdigest(),
                "idx_sha256": hashlib.sha256(ends).hexdigest(),
                "segments": self._segments,
            }
        )
        write_atomically(self.folder / INDEX, json.dumps(index))


def _paths(folder: Path, shard: int) -> tuple[Path, Path]:
    return folder / f"tokens_{shard:05d}.bin", folder / f"tokens_{shard:05d}.idx"


def _read_index(folder: Path) -> dict[str, Any] | None:
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); empty the folder and start anew") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ValueError(f"{path} is no index of token shards ({FORMAT}); choose another folder")
    return index


def _digest(file: Any) -> str:
    found = hashlib.sha256()
    while block := file.read(1 << 20):
        found.update(block)
    return found.hexdigest()
