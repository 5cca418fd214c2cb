"""Write and read the tokens of a stream on disk, for training on them many times.

The set is a folder with two files. ``tokens.bin`` has the ids of all documents, with EOS after each
document. An id takes 2 bytes if the vocabulary allows it, and otherwise 4 bytes. ``index.json`` has
the counts, the digest of the tokenizer and a checksum. The order is the order in which one process
reads the stream.

A sequence is found by its number alone. So a run resumes at once, on any number of ranks and
workers, and sees no sequence twice. The folder appears when it is complete. A writer that was
killed starts again from the beginning.

A set of generated chats is a folder of the same kind, with the messages in ``chats.jsonl`` in place
of the tokens.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import Dataset

from hestia_tune.config import ChatConfig, GeneratedConfig, StreamConfig
from hestia_tune.data.chat_stream import ChatSequences, chat_dataset
from hestia_tune.data.sequences import prefix_of, training_sample
from hestia_tune.data.stream import StreamingTextDataset
from hestia_tune.distributed import progress_bar
from hestia_tune.errors import InputError
from hestia_tune.files import checksum, kept_result, read_json, staged

log = logging.getLogger(__name__)

FORMAT, CHATS_FORMAT = "hestia_tune.data.tokens/2", "hestia_tune.data.chats/1"
INDEX, TOKENS, CHATS = "index.json", "tokens.bin", "chats.jsonl"
_ONE_PASS = {"seq_len": 1 << 13, "epochs": 1, "document_masks": False}
_REMEDY = "tokenize the text again"


class TokenizedSet(Dataset):
    """Torchtune samples: the sequences of a tokenized set, by their number in the file.

    Args:
        tokenizer: The tokenizer that made the set.
        config: The options of a stream, with the folder as ``data_files``. The options for reading
            text have no effect.

    Attributes:
        order: The arguments ``length``, ``seed`` and ``shuffle`` of the set's `PositionSampler`.
            The length is None if the passes have no end.

    Raises:
        InputError: If the folder holds no set, is damaged, or was made with another tokenizer.
    """

    def __init__(self, tokenizer: Any, config: StreamConfig):
        self.config, self.eos_id, self._prefix = config, tokenizer.eos_id, prefix_of(tokenizer)
        folder = Path(config.files)
        index = _read_index(folder)
        if index["tokenizer"] != _tokenizer_digest(tokenizer):
            state = getattr(tokenizer, "neutralized", [])
            why = (
                f", or with the {' and '.join(state)} of tokenizer.json, which changed its texts"
                if state
                else ""
            )
            raise InputError(f"{folder} was made with another tokenizer{why}; {_REMEDY}")
        self.path, self._dtype = folder / TOKENS, np.dtype(index["dtype"])
        size = index["num_tokens"] * self._dtype.itemsize
        if self.path.stat().st_size != size:
            raise InputError(f"{self.path} does not have its {size} bytes; {_REMEDY}")
        if not dist.is_initialized() or dist.get_rank() == 0:
            verify_token_shards(folder)  # This takes a second per gigabyte or two.
        self._length = index["num_tokens"] // config.seq_len
        passes = config.epochs and config.epochs * self._length
        most = config.max_tokens and config.max_tokens // config.seq_len
        length = min((limit for limit in (passes, most) if limit is not None), default=None)
        if 0 in (self._length, length):
            raise InputError(
                f"{folder} does not fill one sequence of {config.seq_len} tokens; lower seq_len "
                "or tokenize more text"
            )
        self.order = {"length": length, "seed": config.seed, "shuffle": config.shuffle_buffer > 0}

    def __len__(self) -> int:
        """Return the number of sequences in one pass."""
        return self._length

    def __getitem__(self, number: int) -> dict[str, Any]:
        seq_len = self.config.seq_len
        offset = number * seq_len * self._dtype.itemsize
        tokens = np.fromfile(self.path, self._dtype, seq_len, offset=offset).tolist()
        return training_sample(tokens, self.eos_id, self.config.document_masks, self._prefix)


def streaming_text_dataset(tokenizer: Any, **options: Any) -> StreamingTextDataset | TokenizedSet:
    """Return sequences from text files, a hub dataset, or a tokenized set.

    Args:
        tokenizer: A torchtune tokenizer (``encode``, ``eos_id``).
        options: The options of :class:`hestia_tune.config.StreamConfig`. With ``source:
            token_shards``, ``data_files`` is the folder of a tokenized set.

    Returns:
        The sequences.

    Raises:
        InputError: If something cannot be found, or an option is out of range.
    """
    config = StreamConfig.parse(options)
    kind = TokenizedSet if config.source == "token_shards" else StreamingTextDataset
    return kind(tokenizer, config)


class GeneratedChats(ChatSequences):
    """Torchtune samples: the chats of a generated set, packed and held in memory.

    Args:
        tokenizer: `hestia_tune.models.AutoTokenizer` or `HuggingFaceTokenizer`.
        config: The options.

    Attributes:
        order: The arguments of the set's `PositionSampler`, as in `TokenizedSet`.

    Raises:
        InputError: If the folder holds no such set, or is damaged.
    """

    def __init__(self, tokenizer: Any, config: GeneratedConfig):
        path = Path(config.cache_dir) / CHATS
        index = _read_index(path.parent, CHATS_FORMAT)
        if checksum(path) != index["sha256"]:
            raise InputError(
                f"{path} differs from its checksum; delete {path.parent}, and the model writes the "
                "chats again"
            )
        keys = ("seq_len", "seed", "packed", "chat_template_kwargs")
        shared = {key: getattr(config, key) for key in keys}
        options = {"source": "json", "data_files": str(path)} | shared
        self.config = ChatConfig.parse(options | {"epochs": config.epochs})
        super().__init__(chat_dataset(tokenizer, **options).samples)
        length = config.epochs and config.epochs * len(self)
        self.order = {"length": length, "seed": config.seed, "shuffle": True}


def self_generated_dataset(tokenizer: Any, **options: Any) -> TokenizedSet | GeneratedChats:
    """Return sequences that the pretrained model has sampled, shuffled by the seed.

    The method is LLM-QAT (arXiv 2305.17888). Each sequence has a random token, then a few greedy
    tokens, of which the model is sure, and then sampled tokens. A sequence that ends a document
    continues with another document, as in a text stream. With ``chats``, the model writes a user's
    turn and replies to it, and only replies have a loss.

    Args:
        tokenizer: A torchtune tokenizer (``encode``, ``eos_id``).
        options: The options of :class:`hestia_tune.config.GeneratedConfig`.

    Returns:
        The sequences.

    Raises:
        InputError: If an option is out of range, or the folder holds no such set.
    """
    config = GeneratedConfig.parse(options)
    if config.chats:
        return GeneratedChats(tokenizer, config)
    shared = {key: getattr(config, key) for key in ("seq_len", "seed", "epochs")}
    stream = StreamConfig(source="token_shards", data_files=config.cache_dir, **shared)
    return TokenizedSet(tokenizer, stream)


def verify_token_shards(folder: str | Path) -> None:
    """Read all tokens of a set, and check that they agree with their checksum.

    Args:
        folder: The folder of the set.

    Raises:
        InputError: If they differ, or the folder holds no set.
    """
    path, index = Path(folder) / TOKENS, _read_index(Path(folder))
    if checksum(path) != index["sha256"]:
        raise InputError(f"{path} differs from its checksum; {_REMEDY}")


def write_token_shards(
    tokenizer: Any, folder: str | Path, *, max_tokens: int | None = None, **options: Any
) -> dict[str, Any]:
    """Tokenize a source once. A set that the same call has already written is kept.

    Args:
        tokenizer: A torchtune tokenizer (``encode``, ``eos_id``).
        folder: The folder to write. It may be empty, or hold the result of the same call.
        max_tokens: Number of tokens to stop at. None: one pass over the data.
        options: The options of :class:`hestia_tune.config.StreamConfig`. They decide the order.

    Returns:
        The index, with ``num_tokens`` (including the EOS of each document) and ``num_documents``.

    Raises:
        InputError: If the folder holds anything else, or the source cannot be found.
        DataStreamError: If data cannot be read.
    """
    config = StreamConfig.parse(options | _ONE_PASS | {"max_tokens": max_tokens})
    stream = StreamingTextDataset(tokenizer, replace(config, max_tokens=None))
    stream.rank, stream.world_size = 0, 1
    stream.prefix = []  # The set holds the documents alone. Its sequences get the prefix.

    def parts():
        yield from (sample["tokens"] for sample in stream)
        yield stream.state_dict()["carry"]  # The tail.

    return write_set(
        tokenizer, folder, stream.identity(), parts(), max_tokens, stream.count_documents
    )


def write_set(
    tokenizer: Any,
    folder: str | Path,
    source: Any,
    parts: Iterable[list],
    max_tokens: int | None,
    count_documents: Callable[[], int | None] = lambda: None,
) -> dict[str, Any]:
    """Write a tokenized set from lists of tokens. A set that the same call has written is kept.

    Args:
        tokenizer: The tokenizer of the tokens.
        folder: The folder to write. It may be empty, or hold the result of the same call.
        source: Description of the tokens, as plain values for JSON. It identifies the set.
        parts: Lists of token ids. They are read only if the set has to be written.
        max_tokens: Number of tokens to stop at. None: all tokens.
        count_documents: Function that returns the number of documents, for the progress bar. It
            returns None if the number is unknown.

    Returns:
        The index, with ``num_tokens`` and ``num_documents``.

    Raises:
        InputError: If the folder holds anything else.
    """
    folder = Path(folder)
    index = {
        "format": FORMAT,
        "source": source,
        "dtype": "<u2" if (getattr(tokenizer, "vocab_size", None) or 1 << 32) <= 1 << 16 else "<u4",
        "tokenizer": _tokenizer_digest(tokenizer),
        "max_tokens": max_tokens,
    }
    if (written := _written(folder, index)) is not None:
        return written

    index |= {"num_tokens": 0, "num_documents": 0}
    documents = count_documents()  # The source may have far fewer tokens than max_tokens.
    limit = None if documents or max_tokens is None else f"at most {max_tokens:,}"
    progress = progress_bar(desc=limit, unit="tok", unit_scale=True)
    with staged(folder) as temporary, progress:
        temporary.mkdir()
        with open(temporary / TOKENS, "wb") as file:
            for tokens in parts:
                tokens = tokens[: (max_tokens or 1 << 62) - index["num_tokens"]]
                np.array(tokens, index["dtype"]).tofile(file)
                index["num_tokens"] += len(tokens)
                index["num_documents"] += tokens.count(tokenizer.eos_id)
                if documents and (done := index["num_documents"]):
                    whole = max(1.0, documents / done) * index["num_tokens"]
                    progress.total = round(min(whole, max_tokens or whole))
                progress.update(len(tokens))
                if index["num_tokens"] == max_tokens:
                    break
        index["sha256"] = checksum(temporary / TOKENS)
        (temporary / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return index


def write_chats(
    folder: str | Path, source: Any, rows: Iterable[Mapping[str, Any] | None], count: int
) -> None:
    """Write a set of generated chats. A set that the same call has written is kept.

    Args:
        folder: The folder to write. It may be empty, or hold the result of the same call.
        source: Description of the chats, as plain values for JSON. It identifies the set.
        rows: Rows with ``messages``, and None for chats to leave out. They are read only if the set
            has to be written.
        count: Number of rows to read.

    Raises:
        InputError: If the folder holds anything else, or no row is a chat.
    """
    folder = Path(folder)
    index: dict[str, Any] = {"format": CHATS_FORMAT, "source": source}
    if _written(folder, index) is not None:
        return
    chats = [row for row in islice(rows, count) if row is not None]
    if not chats:
        raise InputError(
            f"none of {count:,} chats that the model has written can be kept: none ends within "
            f"{source['seq_len']} tokens without special tokens in a turn; raise dataset.seq_len; "
            "or set dataset.chats=False for plain text, if the model was not trained on chats, or "
            "if its replies need special tokens, as GPT-OSS's do"
        )
    is_short = 2 * len(chats) < count
    few = f"; a larger seq_len than {source['seq_len']} keeps more" if is_short else ""
    log.info(
        f"{folder}: {len(chats):,} of {count:,} chats are kept; the others have a turn that does "
        f"not end, or a special token in a turn{few}"
    )
    with staged(folder) as temporary:
        temporary.mkdir()
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chats)
        (temporary / CHATS).write_text(lines, encoding="utf-8")
        index |= {"num_chats": len(chats), "sha256": checksum(temporary / CHATS)}
        (temporary / INDEX).write_text(json.dumps(index), encoding="utf-8")


def _written(folder: Path, index: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the index of a set that the same call has written, or None if the folder is empty.

    Raises:
        InputError: If the folder holds anything else.
    """
    if not folder.is_file() and not (folder.exists() and any(folder.iterdir())):
        return None
    _read_index(folder, index["format"])
    return kept_result(folder / INDEX, index, remedy="choose another folder, or empty it")


def _tokenizer_digest(tokenizer: Any) -> str:
    """Return a digest of what the tokenizer makes of a short text."""
    ids = tokenizer.encode("A probe: déjà vu,\n\n  2 + 2 = 4.", add_bos=False, add_eos=False)
    values = [ids, tokenizer.eos_id, getattr(tokenizer, "vocab_size", None)]
    # Earlier versions wrote texts as this state left them: cut, padded, or ended twice. And they
    # wrote the texts of torchtune's tokenizers without BOS.
    values += filter(None, [getattr(tokenizer, "neutralized", None)])
    prefix = prefix_of(tokenizer)
    values += [prefix] if ids[: len(prefix)] != prefix else []
    described = repr(tuple(values))
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def _read_index(folder: Path, form: str = FORMAT) -> dict[str, Any]:
    """Return the index of the set in a folder; raise InputError if there is none."""
    path = folder / INDEX
    index = read_json(path) if path.is_file() else {}
    if index.get("format") != form:
        what = "tokenized set" if form == FORMAT else "set of generated chats"
        raise InputError(
            f"{folder} holds no {what}: no {INDEX} of {form}; give the folder of a set, "
            "or an empty folder to write a set"
        )
    return index
