"""Shared by the tests of streams: a byte tokenizer, files in every format, a slow reference."""

import bz2
import gzip
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq

from hestia_tune.data import streaming_text_dataset

KINDS = ["parquet", "json", "json.gz", "json.zst", "text", "text.bz2"]


class Bytes:
    """A tokenizer with one id per byte; 0 ends a document."""

    eos_id = 0
    vocab_size = 256

    def encode(self, text, add_bos, add_eos):
        assert not add_bos and not add_eos
        return list(text.encode())


def make_texts(count, seed=0, longest=60):
    """Return documents of 0 to ``longest`` letters; each begins with its number."""
    rng = random.Random(seed)
    return [f"{n}:" + "ä" * rng.randrange(longest // 2) for n in range(count)]


def write(path, texts, kind, column="text", row_group_size=7):
    """Write one file of texts in a format of ``KINDS``."""
    form, _, compression = kind.partition(".")
    if form == "parquet":
        table = pa.table({column: texts, "n": list(range(len(texts)))})
        pq.write_table(table, path, row_group_size=row_group_size)
        return
    lines = texts if form == "text" else [json.dumps({column: t, "n": 1}) for t in texts]
    data = "".join(line + "\n" for line in lines).encode()
    if compression == "zst":
        half = len(data) // 2  # Two frames, as parallel compressors write.
        parts = [pa.compress(data[:half], "zstd"), pa.compress(data[half:], "zstd")]
        data = b"".join(part.to_pybytes() for part in parts)
    elif compression == "gz":
        data = gzip.compress(data)
    elif compression == "bz2":
        data = bz2.compress(data)
    path.write_bytes(data)


def write_files(folder, files, kind):
    """Write one file for each list of texts; return the arguments of a stream of all files."""
    folder.mkdir(exist_ok=True)
    form, _, compression = kind.partition(".")
    paths = []
    for number, texts in enumerate(files):
        end = {"json": "jsonl", "text": "txt"}.get(form, form)
        path = folder / f"f{number:02d}.{end}{'.' + compression if compression else ''}"
        write(path, texts, kind)
        paths.append(str(path))
    return {"source": form, "data_files": paths}


def stream(arguments, rank=None, world_size=None, **more):
    """Open a stream as one of several ranks; None: take the rank from torch.distributed."""
    options = {"seq_len": 16, "epochs": 1} | arguments | more
    rank, world_size = options.pop("rank", rank), options.pop("world_size", world_size)
    dataset = streaming_text_dataset(Bytes(), **options)
    if rank is not None:
        dataset.rank, dataset.world_size = rank, world_size
    return dataset


def tokens_of(items):
    """Return the tokens of every item as a list."""
    return [list(map(int, item["tokens"])) for item in items]


def reference(texts, seq_len):
    """Return the sequences of the texts that are not empty, and the number of tokens left over."""
    joined = [*b"".join(text.encode() + b"\0" for text in texts if text)]
    end = len(joined) - len(joined) % seq_len
    return [joined[first : first + seq_len] for first in range(0, end, seq_len)], len(joined) - end


def documents_in(sequences):
    """Return the numbers of the documents that end in the sequences, in order."""
    flat = bytes(t for sequence in sequences for t in sequence)
    return [int(d.split(b":")[0]) for d in flat.split(b"\0")[:-1] if b":" in d and d[:1].isdigit()]


def find_all(state, key):
    """Yield the values of a key at any depth of the state of a data loader."""
    if isinstance(state, dict):
        for name, value in state.items():
            yield from [value] if name == key else find_all(value, key)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from find_all(value, key)
