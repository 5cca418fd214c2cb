"""Training text as a stream: shuffled, tokenized and packed while it is read.

A run over 10B tokens can hold neither the text nor its tokens. Here each worker of each rank
reads its own share of the rows, and memory does not grow with the number of tokens. The library
`datasets` finds the files, reads them, deals them out and remembers the position.

Documents are shuffled by blocks: the next ``shuffle_buffer`` documents of a share (or 16M
characters, if that is less) are read and permuted by a seed of their own. This mixes as far as a
sliding buffer does. The state of a sliding buffer would be its documents. Here the state is the
position of the block, a few numbers, and the tokens before the block that have not filled a
sequence yet.

The cost: resuming reads and tokenizes one block again (a second or two). In a file that is not
parquet, resuming reads everything before the block. Resuming also needs the same number of ranks
and workers as before. A tokenized set (tokens.py) does not. If one of many files is damaged, its
name is in the log of `datasets`, not in the error.
"""

import hashlib
import os
import random
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any, Generic, TypeVar

import datasets
import torch.distributed as dist
from datasets.distributed import split_dataset_by_node
from pyarrow import parquet
from torch.utils.data import IterableDataset, get_worker_info

from hestia_tune.config import SourceConfig, StreamConfig, nearest
from hestia_tune.data.chats import chat_format
from hestia_tune.data.sequences import SequenceDataset, encode_each, prefix_of, training_sample
from hestia_tune.errors import InputError, InputTypeError, one_line
from hestia_tune.files import first_missing, literal

BLOCK_CHARACTERS = 1 << 24
# Tokens that are read at most to find out how long the data are.
_COUNTED_TOKENS = 200_000
_BYTE_ORDER_MARK = "\ufeff"


class DataStreamError(InputError):
    """Report data that a stream cannot read.

    This can happen after days of training. So the caller should save a checkpoint first, and then
    raise the error again.
    """


def open_rows(
    config: SourceConfig, columns: list[str] | None = None, reader: str | None = None
) -> tuple[datasets.IterableDataset, str, list[str]]:
    """Open a dataset of the hub, or files, as a stream of rows.

    Args:
        config: The options of the stream.
        columns: The columns to read. None: all columns.
        reader: The reader of the files. None: the source.

    Returns:
        The rows, a digest, and the paths of the files. The digest is of the split, the column, the
        names and sizes of local files, and the paths of other files.

    Raises:
        InputError: If there is no such dataset, file or split.
    """
    known = ("parquet", "json", "text", "token_shards")
    if config.source in known and not config.data_files:
        raise InputError(f"source {config.source} needs data_files; give a path, a list or a glob")
    if config.source in known and (missing := first_missing(config.data_files)):
        raise InputError(f"dataset.data_files: {missing} does not exist; check the path")
    near = nearest(config.source, known)
    if near and config.source not in known and not os.path.exists(config.source):
        # This check comes first, because asking the hub without a network takes half a minute.
        raise InputError(f"there is no source {config.source}{near}")
    try:
        builder: Any = datasets.load_dataset_builder(
            reader or config.source,
            config.name,
            data_files=literal(config.data_files),
            revision=config.revision,
        )
        if hasattr(builder.config, "batch_size"):  # Parquet reads a whole row group by default.
            builder.config.batch_size = 256
        rows: Any = builder.as_streaming_dataset(config.split)
        if rows.num_shards < 128:  # Opening more files, to count their row groups, takes too long.
            rows = rows.reshard()
    except Exception as error:  # The library raises many unrelated types.
        raise InputError(f"{config.files} could not be loaded: {one_line(error)}") from error
    if columns and rows.column_names and set(columns) <= set(rows.column_names):
        rows = rows.select_columns(columns)
    paths = (builder.config.data_files or {}).get(config.split, [])
    # A path on the hub contains the repository and the commit.
    files = [(PurePosixPath(p).name, os.path.getsize(p)) if os.path.isfile(p) else p for p in paths]
    described = repr((config.split, config.column, files))
    return rows, hashlib.sha256(described.encode()).hexdigest()[:16], paths


Document = TypeVar("Document")


def row_blocks(
    rows: datasets.IterableDataset,
    config: SourceConfig,
    size: int,
    read: Callable[[dict[str, Any], int], tuple[Document, int] | None],
    first: int = 0,
) -> Iterator[tuple[list[Document], int]]:
    """Yield lists of ``size`` documents, or of fewer that together have 16M characters.

    After each list, ``rows.state_dict()`` is the position after its last row.

    Args:
        rows: The rows to read.
        config: The options of the stream.
        size: Number of documents per list.
        read: Function of a row and its number, from 1, that returns the document and its number of
            characters, or None for a row without a document.
        first: Number of rows that were read before.

    Yields:
        Lists of documents, and the number of rows read.

    Raises:
        DataStreamError: If data cannot be read.
    """
    block, characters, number = [], 0, first
    try:
        for row in rows.iter(batch_size=1):  # iter(rows) would split the share among the workers.
            number += 1
            found = read({key: values[0] for key, values in row.items()}, number)
            if found is None:
                continue
            block.append(found[0])
            characters += found[1]
            if len(block) == size or characters >= BLOCK_CHARACTERS:
                yield block, number
                block, characters = [], 0
    except InputError as error:
        raise DataStreamError(f"{config.files} cannot be read ({one_line(error)})") from error
    except Exception as error:  # Readers raise many unrelated types.
        raise DataStreamError(
            f"{config.files} cannot be read ({type(error).__name__}: {one_line(error)}); repair "
            "the file (a run resumes if its size is the same), remove it from data_files, or check "
            "the network"
        ) from error
    if block:
        yield block, number


def read_text(column: str) -> Callable[[dict[str, Any], int], tuple[str, int] | None]:
    """Return a reader of rows for `row_blocks` that takes the text of a column.

    A row without text is no document: blank lines separate paragraphs, and an empty document would
    only teach the model to end. Byte order marks come from joined files, and are no text.
    """

    def read(row: dict[str, Any], number: int) -> tuple[str, int] | None:
        text = row.get(column)
        if not isinstance(text, str):
            form = chat_format(row)
            remedy = (
                f"; the rows hold chats ({form}): use "
                "dataset._component_=hestia_tune.data.streaming_chat_dataset"
                if form
                else "; set dataset.column"
            )
            content = f"{type(text).__name__}, not text; columns: {', '.join(row)}"
            raise InputTypeError(f"row {number}: column {column!r} holds {content}{remedy}")
        text = text.replace(_BYTE_ORDER_MARK, "")
        return (text, len(text)) if text.strip() else None

    return read


# Least number of files (or row groups) per share. With fewer, the shares would be too uneven. Then
# every share reads all rows and keeps one row in num_shares. Reading costs little compared with
# tokenizing.
LEAST_FILES = 8
LOT = 8  # Number of documents that one call of the tokenizer gets.
_START = {
    "epoch": 0,  # Index of the epoch.
    "block": 0,  # Index of the block in the epoch.
    "row": 0,  # Rows of the epoch before the block.
    "rows": None,  # Position of `datasets` before the block.
    "carry": [],  # Tokens before the block that have not filled a sequence.
    "given": 0,  # Sequences of the block that were given out.
    "sequences": 0,  # Sequences that were given out in total.
}


class Stream(IterableDataset):
    """Torchtune samples without an index, read by ranks and workers in shares of their own.

    ``state_dict()`` is the place in the share that was iterated last. The ``StatefulDataLoader`` of
    torchdata saves it and restores it in each worker.

    Attributes:
        rank: Rank of this process, which reads its share. The default comes from torch.distributed.
        world_size: Number of ranks. The default comes from torch.distributed.
        batch_size: Batch size of the data loader. Several workers give it whole batches.
    """

    def __init__(self) -> None:
        self.batch_size = 1
        grouped = dist.is_initialized()
        self.rank = dist.get_rank() if grouped else 0
        self.world_size = dist.get_world_size() if grouped else 1

    @property
    def seq_len(self) -> int:
        """Tokens per sequence, at most."""
        raise NotImplementedError

    @property
    def num_sequences(self) -> int | None:
        """Number of sequences of this rank, over all its workers; the same on every rank.

        None if the stream ends with its data, or never ends.
        """
        return None

    @property
    def epochs(self) -> int | None:
        """Number of passes after which the stream ends. None: it ends by its length, or never."""
        return None

    def reseed(self, seed: int) -> None:
        """Let the next iteration take another order."""
        raise NotImplementedError

    def avoid_seed(self, seed: int) -> None:
        """Take the next seed in place of this one."""
        raise NotImplementedError

    def identity(self) -> list:
        """Return the values that a saved place depends on."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last sequence that was given out."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration continue after a place from `state_dict`.

        Raises:
            InputError: If the place is from another stream.
        """
        if [*state["stream"], "rows"] == self.identity():
            raise InputError(
                "the saved place is from a version that divided the files among the readers; "
                "finish the run with that version, or start again with "
                "resume_from_checkpoint=False"
            )
        if state["stream"] != self.identity():
            raise InputError(
                "the saved place is from another stream: files, column, seq_len, seed, "
                "shuffle_buffer or the number of ranks or workers have changed; set them back, "
                "start again, or use a tokenized set (`tune run hestia_tokenize`)"
            )

    def _share(self) -> tuple[int, int]:
        """Return the number of this worker's share, and the number of shares over all ranks."""
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return self.rank * workers + number, self.world_size * workers

    def _limit(self) -> int | None:
        """Return the number of sequences of this worker. The workers take whole batches in turn."""
        if self.num_sequences is None:
            return None
        share, num_shares = self._share()
        workers, batches = num_shares // self.world_size, self.num_sequences // self.batch_size
        return len(range(share % workers, batches, workers)) * self.batch_size


class RowStream(Stream, Generic[Document]):
    """A stream of sequences from the rows of files or of a hub dataset.

    Subclasses say how a row becomes a document, and how documents become sequences.

    Args:
        config: The options.

    Raises:
        InputError: If there is no such dataset, file or split, or it is empty.
        DataStreamError: If the first row cannot be read.
    """

    # Number of documents in a block if they are not shuffled.
    ordered_block: int

    def __init__(self, config: SourceConfig):
        super().__init__()
        self.config = config
        self._rows, self._digest, self._paths = self._open()
        first = next(row_blocks(self._rows, config, 1, self._read), None)
        if first is None:
            raise InputError(f"{config.files} holds no rows; give files that contain text")
        # The place now, and the place where the next iteration begins.
        self._place = self._following = _START

    def _open(self) -> tuple[datasets.IterableDataset, str, list[str]]:
        """Open the rows; see `open_rows`."""
        return open_rows(self.config)

    def _read(self, row: dict[str, Any], number: int) -> tuple[Document, int] | None:
        """Return the document in a row and its number of characters; see `row_blocks`."""
        raise NotImplementedError

    def _samples(
        self, block: list[Document], carry: list[int]
    ) -> Generator[dict[str, Any], None, list[int]]:
        """Yield the samples of a block, and return the tokens that do not fill a sequence yet.

        Args:
            block: The documents.
            carry: The tokens that the block before has left.
        """
        raise NotImplementedError

    @property
    def seq_len(self) -> int:
        return self.config.seq_len

    @property
    def num_sequences(self) -> int | None:
        tokens = self.config.max_tokens
        return tokens and tokens // self.config.seq_len // self.world_size

    @property
    def epochs(self) -> int | None:
        return self.config.epochs

    def reseed(self, seed: int) -> None:
        self.config = replace(self.config, seed=seed)

    def avoid_seed(self, seed: int) -> None:
        if self.config.seed == seed:
            self.reseed(seed + 1)

    def count_documents(self) -> int | None:
        """The number of documents in one pass, over all ranks.

        The number comes from the hub, from the footers of local parquet files, or from the number
        of lines in local text files.

        Returns:
            The number, or None if only reading everything would give it.
        """
        splits, count = self._rows.info.splits or {}, 0
        if self.config.split in splits:
            return splits[self.config.split].num_examples
        for path in self._paths:
            suffix = os.path.isfile(path) and PurePosixPath(path).suffix
            if suffix == ".parquet":
                count += parquet.read_metadata(path).num_rows
            elif suffix in (".txt", ".jsonl"):
                with open(path, "rb") as file:
                    count += sum(1 for _ in file)
            else:
                return None
        return count or None

    def count_pass(self, most: int) -> tuple[float, str] | None:
        """Return the number of sequences of one pass over local files, if it is below ``most``.

        Short data are counted. For longer data, the files' sizes give an estimate.

        Args:
            most: The number of sequences that matters.

        Returns:
            The number of sequences, which may be a fraction, and the size of the text in words.
            None if the number is larger, or unknown.
        """
        if not self._paths or not all(map(os.path.isfile, self._paths)):
            return None
        rows = characters = 0

        def read(row: dict[str, Any], number: int) -> tuple[Document, int] | None:
            nonlocal rows, characters
            rows = number
            found = self._read(row, number)
            characters += found[1] if found else 0
            return found

        count, carry, is_whole = 0, [], True
        limit = min(most, max(1, _COUNTED_TOKENS // self.config.seq_len))
        for block, _ in row_blocks(self._rows, self.config, self.ordered_block, read):
            samples = self._samples(block, carry)
            while True:
                try:
                    next(samples)
                except StopIteration as end:
                    carry = end.value
                    break
                count += 1
            if count >= limit:
                is_whole = False
                break
        if count >= most:
            return None
        number = count + len(carry) / self.config.seq_len
        if not is_whole:
            files = [(path, os.path.getsize(path)) for path in self._paths]
            if all(path.endswith(".parquet") for path, _ in files):
                whole = sum(parquet.read_metadata(path).num_rows for path, _ in files)
                share = min(1.0, rows / whole)
            else:  # Compressed text has about a third of its size.
                packed = (".gz", ".zst", ".bz2")
                size = sum(n * (3 if path.endswith(packed) else 1) for path, n in files)
                share = min(1.0, characters / size)
            number, characters = number / share, round(characters / share)
        if number >= most:
            return None
        return number, f"{'' if is_whole else 'about '}{_size(characters)}"

    def identity(self) -> list:
        config, (share, num_shares) = self.config, self._share()
        values = [self._digest, config.seq_len, config.seed, config.shuffle_buffer, share]
        # Earlier versions gave every share one file, if there were as many.
        has_one_each = not self._divides_files and self._rows.num_shards == num_shares
        return [*values, num_shares, *["rows"] * has_one_each]

    @property
    def _divides_files(self) -> bool:
        """Whether every share reads files of its own, instead of some rows of all files."""
        num_shares, num_files = self._share()[1], self._rows.num_shards
        is_even = num_files >= 2 * num_shares and num_files % num_shares == 0
        return num_shares == 1 or is_even or num_files >= LEAST_FILES * num_shares

    def state_dict(self) -> dict[str, Any]:
        return self._place | {"stream": self.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._place = self._following = state

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._place, self._following = self._following, _START
        return self._sequences(self._place)

    def _sequences(self, place: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the sequences from a place on."""
        carry, given, sequences = place["carry"], place["given"], place["sequences"]
        limit, made, before = self._limit(), 0, None
        if sequences == limit:
            return
        if get_worker_info() is not None:
            # The workers already run in parallel. Threads in each would compete for the same cores.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        for at, block in self._blocks(place):
            if at["block"] == 0 and at["rows"] is None:  # A new pass over the data.
                if before == (made, len(carry)):
                    share, num_shares = self._share()
                    raise DataStreamError(
                        f"share {share} of {num_shares} (ranks x workers) of {self.config.files} "
                        f"gives no sequence of {self.config.seq_len} tokens; {self._remedy}"
                    )
                before = made, len(carry)
            samples, number = self._samples(block, list(carry)), 0
            while True:
                try:
                    sample = next(samples)
                except StopIteration as end:
                    left = end.value
                    break
                number, made = number + 1, made + 1
                if number <= given:
                    continue
                sequences += 1
                self._place = at | {"carry": carry, "given": number, "sequences": sequences}
                yield sample
                if sequences == limit:
                    return
            carry, given = left, 0
        self._place = at | {"carry": carry, "given": 0, "sequences": sequences}

    _remedy = "use fewer workers or more data"

    def _blocks(self, place: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[Document]]]:
        """Yield the place of a block and its documents, shuffled; last, the last place and [].

        Args:
            place: The place to begin at.

        Yields:
            The place of the block, and the documents.

        Raises:
            DataStreamError: If the share has no documents, or data cannot be read.
        """
        config, (share, num_shares) = self.config, self._share()

        def read_share(row: dict[str, Any], number: int) -> tuple[Document, int] | None:
            """Read a row of this share. Errors give its number among those of all shares."""
            return self._read(row, (number - 1) * num_shares + share + 1)

        divided = "shards", self._read
        strategy, read = divided if self._divides_files else ("examples", read_share)
        while config.epochs is None or place["epoch"] < config.epochs:
            seed = f"{config.seed}/{place['epoch']}"
            rows = split_dataset_by_node(self._rows, share, num_shares, strategy=strategy)
            if config.shuffle_buffer:
                # This seeds the order of the files. In epoch 0 `datasets` does not shuffle them.
                # `shuffle` would add a buffer, and its content would be lost on resuming.
                rows.set_epoch(1 + zlib.crc32(seed.encode()))
            if place["rows"] is not None:
                rows.load_state_dict(place["rows"])
            size, first = config.shuffle_buffer or self.ordered_block, place.get("row", 0)
            for block, row in row_blocks(rows, config, size, read, first):
                following = rows.state_dict()
                if config.shuffle_buffer:
                    block_seed = f"{seed}/{share}/{num_shares}/{place['block']}"
                    random.Random(block_seed).shuffle(block)
                yield place, block
                place = place | {"rows": following, "block": place["block"] + 1, "row": row}
            if place["block"] == 0:
                raise DataStreamError(
                    f"share {share} of {num_shares} (ranks x workers) of {config.files} holds no "
                    "documents; use fewer workers or more data"
                )
            place = place | {"epoch": place["epoch"] + 1, "block": 0, "rows": None, "row": 0}
        yield place, []


class StreamingTextDataset(RowStream[str]):
    """Torchtune samples: sequences of ``seq_len`` tokens from a source of documents.

    Args:
        tokenizer: A torchtune tokenizer (``encode``, ``eos_id``). It is faster with a method
            ``encode_batch``, which encodes many texts, with the tokens that begin each.
        config: The options.

    Attributes:
        prefix: The tokens that begin every sequence: those that the tokenizer puts before texts.

    Raises:
        InputError: If there is no such dataset, file or split, or it is empty.
        DataStreamError: If the first row cannot be read, or is not text.
    """

    ordered_block = LOT
    config: StreamConfig

    def __init__(self, tokenizer: Any, config: StreamConfig):
        self.tokenizer, self._read = tokenizer, read_text(config.column)
        self.prefix = prefix_of(tokenizer)
        super().__init__(config)

    def _open(self) -> tuple[datasets.IterableDataset, str, list[str]]:
        return open_rows(self.config, [self.config.column])

    def _samples(
        self, block: list[str], carry: list[int]
    ) -> Generator[dict[str, Any], None, list[int]]:
        seq_len, eos_id, tokens = self.config.seq_len, self.tokenizer.eos_id, carry
        encode = getattr(self.tokenizer, "encode_batch", partial(encode_each, self.tokenizer))
        for start in range(0, len(block), LOT):
            for ids in encode(block[start : start + LOT]):
                if ids:
                    tokens += [*ids, eos_id]
            end = len(tokens) - len(tokens) % seq_len
            for first in range(0, end, seq_len):
                chosen = tokens[first : first + seq_len]
                yield training_sample(chosen, eos_id, self.config.document_masks, self.prefix)
            tokens = tokens[end:]
        return tokens


def _size(characters: int) -> str:
    """Return a number of characters in words."""
    for factor, unit in ((1e9, "billion"), (1e6, "million")):
        if characters >= factor:
            return f"{characters / factor:.1f} {unit} characters"
    return f"{characters:,} characters"


def text_dataset(tokenizer: Any, **options: Any) -> SequenceDataset:
    """Return the sequences of a text that is read once, in order, and held in memory.

    The text takes 8 bytes per token. This suits runs of up to some 100M tokens.

    Args:
        tokenizer: A torchtune tokenizer.
        options: The options of :class:`hestia_tune.config.StreamConfig`. The default of
            ``shuffle_buffer`` is 0 here, and the default of ``epochs`` is 1.

    Returns:
        The sequences.

    Raises:
        InputError: If something cannot be found, an option is out of range, or the text has no end.
        DataStreamError: If data cannot be read, or are not text.
    """
    config = StreamConfig.parse({"shuffle_buffer": 0, "epochs": 1} | options)
    if config.epochs is None and config.max_tokens is None:
        raise InputError("a text that is held in memory must end; give epochs or max_tokens")
    stream = StreamingTextDataset(tokenizer, replace(config, document_masks=False))
    stream.rank, stream.world_size = 0, 1
    tokens = (token for sample in stream for token in sample["tokens"])
    return SequenceDataset(tokens, config.seq_len, tokenizer.eos_id, config.document_masks)
