"""A tokenized set: the tokens of a stream on disk, for those who train on them many times.

A folder of ``tokens.bin`` (the ids of one document after another, EOS after each, 2 bytes each if
the vocabulary allows, else 4) and ``index.json`` (counts, the tokenizer's digest, a checksum). The
order is that of the stream when one process reads it. A sequence is found by its number alone: so a
run resumes on any number of ranks and workers, at once, and sees no sequence twice. The folder
appears when it is whole: a writer that is killed begins anew.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import Dataset

from hestia_tune import cache
from hestia_tune.config import GeneratedConfig, StreamConfig
from hestia_tune.data.sequences import training_sample
from hestia_tune.data.stream import StreamingTextDataset
from hestia_tune.distributed import progress_bar
from hestia_tune.errors import InputError
from hestia_tune.files import checksum, read_json, staged

FORMAT = "hestia_tune.data.tokens/2"
INDEX, TOKENS = "index.json", "tokens.bin"
_AT_ONCE = {"seq_len": 1 << 13, "epochs": 1, "document_masks": False}


class TokenizedSet(Dataset):
    """Sequences of a tokenized set by their number in the file; torchtune samples.

    Args:
        tokenizer: that of the set.
        config: the options of a stream, ``data_files`` being the folder; those of reading text have
            no effect.

    Attributes:
        order: length (None if the passes have no end), seed and shuffle of its `PositionSampler`.

    Raises:
        InputError: if the folder holds no set, is damaged, or was made with another tokenizer.
    """

    def __init__(self, tokenizer: Any, config: StreamConfig):
        self.config, self.eos_id = config, tokenizer.eos_id
        folder = Path(config.files)
        index = _read_index(folder)
        if index["tokenizer"] != _tokenizer_digest(tokenizer):
            raise InputError(f"{folder} was made with another tokenizer; tokenize anew")
        self.path, self._dtype = folder / TOKENS, np.dtype(index["dtype"])
        size = index["num_tokens"] * self._dtype.itemsize
        if self.path.stat().st_size != size:
            raise InputError(f"{self.path} does not have its {size} bytes; tokenize anew")
        if not dist.is_initialized() or dist.get_rank() == 0:
            verify_token_shards(folder)  # a second per gigabyte or two
        self._length = index["num_tokens"] // config.seq_len
        passes = config.epochs and config.epochs * self._length
        most = config.max_tokens and config.max_tokens // config.seq_len
        length = min((limit for limit in (passes, most) if limit is not None), default=None)
        if 0 in (self._length, length):
            raise InputError(f"{folder} does not fill one sequence of {config.seq_len} tokens")
        self.order = {"length": length, "seed": config.seed, "shuffle": config.shuffle_buffer > 0}

    def __len__(self) -> int:
        """The number of sequences of one pass."""
        return self._length

    def __getitem__(self, number: int) -> dict[str, Any]:
        seq_len = self.config.seq_len
        offset = number * seq_len * self._dtype.itemsize
        tokens = np.fromfile(self.path, self._dtype, seq_len, offset=offset).tolist()
        return training_sample(tokens, self.eos_id, self.config.document_masks)


def streaming_text_dataset(tokenizer: Any, **options: Any) -> StreamingTextDataset | TokenizedSet:
    """Sequences from text files, a hub dataset, or a tokenized set (``source: token_shards``).

    Args:
        tokenizer: a torchtune tokenizer (``encode``, ``eos_id``).
        options: those of :class:`hestia_tune.data.stream.StreamConfig`.

    Raises:
        InputError: if something cannot be found or an option is out of range.
    """
    config = StreamConfig.parse(options)
    kind = TokenizedSet if config.source == "token_shards" else StreamingTextDataset
    return kind(tokenizer, config)


def self_generated_dataset(tokenizer: Any, **options: Any) -> TokenizedSet:
    """Sequences that the pretrained model has sampled (LLM-QAT, arXiv 2305.17888), shuffled by the
    seed: each a random token, a few greedy ones, of which the model is sure, and sampled ones. One
    that ends a document goes on with another, as those of a text stream do.

    Args:
        options: those of `GeneratedConfig`.

    Raises:
        InputError: on an option out of range, or if the folder holds no such set.
    """
    config = GeneratedConfig.parse(options)
    read = {key: getattr(config, key) for key in ("seq_len", "seed", "epochs")}
    stream = StreamConfig(source="token_shards", data_files=config.cache_dir, **read)
    return TokenizedSet(tokenizer, stream)


def verify_token_shards(folder: str | Path) -> None:
    """Reads all tokens of a set and raises a ValueError if they differ from their checksum."""
    path, index = Path(folder) / TOKENS, _read_index(Path(folder))
    if checksum(path) != index["sha256"]:
        raise InputError(f"{path} differs from its checksum; tokenize anew")


def write_token_shards(
    tokenizer: Any, folder: str | Path, *, max_tokens: int | None = None, **options: Any
) -> dict[str, Any]:
    """Tokenizes a source once; a set of this same call that is there already stays.

    Args:
        max_tokens: stops at so many tokens; None takes one pass over the data.
        options: of :class:`hestia_tune.data.stream.StreamConfig`; they decide the order.

    Returns:
        The index, with ``num_tokens`` (EOS of each document included) and ``num_documents``.

    Raises:
        InputError: if the folder holds anything else, or the source cannot be found.
        DataStreamError: on data that cannot be read.
    """
    config = StreamConfig.parse(options | _AT_ONCE | {"max_tokens": max_tokens})
    stream = StreamingTextDataset(tokenizer, replace(config, max_tokens=None))
    stream.rank, stream.world_size = 0, 1

    def parts():
        yield from (sample["tokens"] for sample in stream)
        yield stream.state_dict()["carry"]  # the tail

    count = stream.count_documents
    return write_set(tokenizer, folder, stream.identity(), parts(), max_tokens, count)


def write_set(
    tokenizer: Any,
    folder: str | Path,
    source: Any,
    parts: Iterable[list],
    max_tokens: int | None,
    count_documents: Callable[[], int | None] = lambda: None,
) -> dict[str, Any]:
    """`write_token_shards` of lists of tokens, which are looked at only if the set is not there.

    ``source`` is what they are, as JSON; ``count_documents`` is for the progress bar.
    """
    folder = Path(folder)
    index = {
        "format": FORMAT,
        "source": source,
        "dtype": "<u2" if (getattr(tokenizer, "vocab_size", None) or 1 << 32) <= 1 << 16 else "<u4",
        "tokenizer": _tokenizer_digest(tokenizer),
        "max_tokens": max_tokens,
    }
    if folder.is_file() or (folder.exists() and any(folder.iterdir())):
        _read_index(folder)
        found = cache.kept(folder / INDEX, index, remedy="choose another folder, or empty it")
        assert found is not None
        return found

    index |= {"num_tokens": 0, "num_documents": 0}
    documents = count_documents()  # max_tokens may be far more than there is
    limit = None if documents or max_tokens is None else f"at most {max_tokens:,}"
    digest, progress = hashlib.sha256(), progress_bar(desc=limit, unit="tok", unit_scale=True)
    with staged(folder) as temporary, progress:
        temporary.mkdir()
        with open(temporary / TOKENS, "wb") as file:
            for tokens in parts:
                tokens = tokens[: (max_tokens or 1 << 62) - index["num_tokens"]]
                content = np.array(tokens, index["dtype"]).tobytes()
                file.write(content)
                digest.update(content)
                index["num_tokens"] += len(tokens)
                index["num_documents"] += tokens.count(tokenizer.eos_id)
                if documents and (done := index["num_documents"]):
                    whole = max(1.0, documents / done) * index["num_tokens"]
                    progress.total = round(min(whole, max_tokens or whole))
                progress.update(len(tokens))
                if index["num_tokens"] == max_tokens:
                    break
        index["sha256"] = digest.hexdigest()
        (temporary / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return index


def _tokenizer_digest(tokenizer: Any) -> str:
    """Changes with what the tokenizer makes of a short text."""
    ids = tokenizer.encode("A probe: déjà vu,\n\n  2 + 2 = 4.", add_bos=False, add_eos=False)
    described = repr((ids, tokenizer.eos_id, getattr(tokenizer, "vocab_size", None)))
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    index = read_json(path) if path.is_file() else {}
    if index.get("format") != FORMAT:
        raise InputError(f"{folder} holds no tokenized set: no {INDEX} of {FORMAT}")
    return index
