"""A tokenized set: the tokens of a stream on disk, for those who train on them many times.

A folder of ``tokens.bin`` (the ids of one document after another, EOS after each, 2 bytes each if
the vocabulary allows, else 4) and ``index.json`` (counts, the tokenizer's digest, a checksum). The
order is that of the stream when one process reads it. A sequence is found by its number alone: so a
run resumes on any number of ranks and workers, at once, and sees no sequence twice. Shuffled, each
pass has an order of its own, which takes 4 bytes a sequence in each process.

The writer says in the index how far it is, so that one that is killed goes on from there.
"""

import functools
import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset
from tqdm import tqdm

from hestia_tune.data.rows import DataStreamError
from hestia_tune.data.sequences import PROBE, training_sample
from hestia_tune.data.stream import StreamConfig, StreamingTextDataset
from hestia_tune.files import require_writable_dir, write_atomically

FORMAT = "hestia_tune.data.tokens/2"
INDEX, TOKENS = "index.json", "tokens.bin"
# Tokens written at once, and between two entries in the index: what a kill can cost.
_CHUNK, _SAVED_EVERY = 1 << 13, 1 << 24


class TokenizedSet(Dataset):
    """Sequences of a tokenized set by their number in the run; torchtune samples.

    Sequence ``n`` is in pass ``n // sequences_per_pass`` over the data.

    Args:
        tokenizer: that of the set.
        config: the options of a stream, ``data_files`` being the folder; those of reading text have
            no effect.

    Attributes:
        num_sequences: in all; None if the passes have no end.

    Raises:
        ValueError: if the folder is not complete, damaged, or made with another tokenizer.
    """

    def __init__(self, tokenizer: Any, config: StreamConfig):
        if not isinstance(config.data_files, str | os.PathLike):
            raise ValueError(
                f"source token_shards needs its folder as data_files; got {config.data_files!r}"
            )
        self.config, self.eos_id = config, tokenizer.eos_id
        folder = Path(config.data_files)
        index = _read_index(folder)
        if not index["complete"]:
            raise ValueError(f"{folder} is not complete; run the tokenization again to go on")
        if index["tokenizer"] != _tokenizer_digest(tokenizer):
            raise ValueError(f"{folder} was made with another tokenizer; tokenize anew")
        self.path, self._dtype = folder / TOKENS, np.dtype(index["dtype"])
        size = index["num_tokens"] * self._dtype.itemsize
        if not self.path.is_file() or self.path.stat().st_size != size:
            raise ValueError(f"{self.path} does not have its {size} bytes; tokenize anew")
        self.sequences_per_pass = index["num_tokens"] // config.seq_len
        if self.sequences_per_pass == 0:
            raise ValueError(f"{folder} does not fill one sequence of {config.seq_len} tokens")
        limits = [config.max_tokens and config.max_tokens // config.seq_len]
        limits += [config.epochs and config.epochs * self.sequences_per_pass]
        self.num_sequences = min((n for n in limits if n is not None), default=None)

    def __len__(self) -> int:
        """The number of sequences; of one pass, if the passes have no end."""
        return self.sequences_per_pass if self.num_sequences is None else self.num_sequences

    def __getitem__(self, number: int) -> dict[str, Any]:
        turn, number = divmod(number, self.sequences_per_pass)
        if self.config.shuffle_buffer:
            number = int(_order(self.sequences_per_pass, self.config.seed, turn)[number])
        seq_len = self.config.seq_len
        try:
            tokens = np.memmap(
                self.path,
                self._dtype,
                mode="r",
                offset=number * seq_len * self._dtype.itemsize,
                shape=(seq_len,),
            ).tolist()
        except (OSError, ValueError) as error:
            raise DataStreamError(f"{self.path} cannot be mapped: {error}") from error
        return training_sample(tokens, self.eos_id, self.config.document_masks)


@functools.lru_cache(maxsize=2)  # of training and validation
def _order(num_sequences: int, seed: int, turn: int) -> np.ndarray:
    """Permutation of range(num_sequences), uint32."""
    numbers = np.arange(num_sequences, dtype=np.uint32)
    return np.random.default_rng([seed, turn]).permutation(numbers)


def verify_token_shards(folder: str | Path) -> int:
    """Reads all tokens of a set and holds them against their checksum.

    Returns:
        The number of tokens, EOS of each document included.

    Raises:
        ValueError: if they differ.
    """
    folder = Path(folder)
    index = _read_index(folder)
    if _digest(folder / TOKENS).hexdigest() != index["sha256"]:
        raise ValueError(f"{folder / TOKENS} differs from its checksum; tokenize anew")
    return index["num_tokens"]


def write_token_shards(
    tokenizer: Any, folder: str | Path, *, max_tokens: int | None = None, **options: Any
) -> dict[str, Any]:
    """Tokenizes a source once; goes on where an earlier call was stopped.

    Args:
        tokenizer: a torchtune tokenizer.
        folder: made if need be; must hold nothing but a set of this same call.
        max_tokens: stops at so many tokens; None takes one pass over the data.
        options: of :class:`hestia_tune.data.stream.StreamConfig`; they decide the order.

    Returns:
        The index, with ``num_tokens`` (EOS of each document included) and ``num_documents``.

    Raises:
        ValueError: if the folder holds another set, or the source cannot be found.
        DataStreamError: on data that cannot be read.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1; got {max_tokens}")
    folder = require_writable_dir(folder)
    config = StreamConfig.parse(options | {"seq_len": _CHUNK, "max_tokens": None, "epochs": 1})
    config = replace(config, document_masks=False)
    stream = StreamingTextDataset(tokenizer, config, rank=0, world_size=1)
    made_from = {
        "format": FORMAT,
        "source": stream.identity,
        "dtype": "<u2" if (getattr(tokenizer, "vocab_size", None) or 1 << 32) <= 1 << 16 else "<u4",
        "tokenizer": _tokenizer_digest(tokenizer),
        "max_tokens": max_tokens,
    }
    index = made_from | {"complete": False, "num_tokens": 0, "num_documents": 0, "place": None}
    if (folder / INDEX).is_file():
        index = _read_index(folder)
    differing = [key for key, value in made_from.items() if index.get(key) != value]
    if differing:
        raise ValueError(
            f"{folder} holds tokens made otherwise ({', '.join(differing)} differ); choose another "
            "folder, or empty it"
        )
    if not index["complete"]:
        _write(stream, folder, index)
    return index


def _write(stream: StreamingTextDataset, folder: Path, index: dict[str, Any]) -> None:
    """Writes what is left to write, from the place in the index on."""
    if index["place"] is not None:
        stream.load_state_dict(index["place"])
    dtype, limit = np.dtype(index["dtype"]), index["max_tokens"]
    path = folder / TOKENS
    with (
        open(path, "ab") as file,
        tqdm(total=limit, initial=index["num_tokens"], unit="tok", unit_scale=True) as progress,
    ):
        file.truncate(index["num_tokens"] * dtype.itemsize)
        digest = _digest(path)

        def add(tokens: list[int]) -> bool:
            """Returns whether there are enough."""
            if limit is not None:
                tokens = tokens[: limit - index["num_tokens"]]
            content = np.array(tokens, dtype)
            file.write(content.tobytes())
            digest.update(content.tobytes())
            index["num_tokens"] += len(tokens)
            index["num_documents"] += tokens.count(stream.tokenizer.eos_id)
            progress.update(len(tokens))
            return index["num_tokens"] == limit

        def save(**changes: Any) -> None:
            file.flush()
            os.fsync(file.fileno())
            index.update(changes)
            write_atomically(folder / INDEX, json.dumps(index))

        for sample in stream:
            if add(sample["tokens"]):
                break
            if index["num_tokens"] % _SAVED_EVERY == 0:
                save(place=stream.state_dict())
        else:
            add(stream.state_dict()["carry"])
        save(place=None, complete=True, sha256=digest.hexdigest())


def _tokenizer_digest(tokenizer: Any) -> str:
    """Changes with what the tokenizer makes of a short text."""
    ids = [tokenizer.encode(text, add_bos=False, add_eos=False) for text in PROBE]
    described = repr((ids, tokenizer.eos_id, getattr(tokenizer, "vocab_size", None)))
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    if not path.is_file():
        raise ValueError(f"{folder} holds no tokenized set: {INDEX} is missing")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); empty the folder and start anew") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ValueError(f"{path} is no index of a tokenized set ({FORMAT}); tokenize anew")
    return index


def _digest(path: Path) -> Any:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest
