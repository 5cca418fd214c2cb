"""Writes a hard model as a GGUF file, which llama.cpp loads with exactly the trained weights.

Codes and scales are recovered from the dense hard weight, which is exact, and are stored unchanged.
Every tensor gets a type. Quantized weights get a block type. Vectors (norms, biases) get float32,
which llama.cpp expects. Embeddings and other dense matrices get the first of F16, BF16 and F32 that
holds every value. F16 seldom does, because its smallest step is 2^-24. Embeddings that
``bits.embedding`` rounds to 4, 5 or 8 bits get Q4_0, Q5_0 or Q8_0, which hold them exactly. Every
tensor is read back from the file, unpacked and compared with its source before the file gets its
name. The export needs memory for the content of the file and for a few copies of the largest
tensor.

The gguf package packs the types TQ1_0 and TQ2_0, and unpacks all types except Q2_0, which version
0.19 does not know. The other types are packed here, because the package would choose scales of its
own. A block is a run of weights of one row with one fp16 scale, which is the trained scale:

    type    block  bytes  bits per weight  groups that it holds exactly
    TQ1_0     256     54           1.6875  multiples of 256, or whole rows
    TQ2_0     256     66           2.0625  multiples of 256, or whole rows
    Q2_0       64     18           2.25    multiples of 64, or whole rows
    Q4_0       32     18           4.5     multiples of 32, or whole rows; also codes of four levels
    Q2_K      256     84           2.625   codes only; multiples of 16, or whole rows; four levels

Q2_K is the one type that rounds: its codes are exact, its scales are not (`gguf_q2_k`). Its rows
must be multiples of 256. Every weight read back must be within the type's tolerance.

"Whole rows" are the granularities "channel" and "tensor". Their scale is repeated in every block,
so only the length of the row has to be a multiple of the block. fp16 has 11 significant bits and
bfloat16 has 8, so fp16 holds every bfloat16 scale of its normal range. A scale outside that range
is an error and is never rounded. The layouts follow ggml's ``ggml-common.h``. Type 42 (Q2_0 in
blocks of 64) is in llama.cpp since build b9916 of July 2026. Forks that read type 42 as blocks of
128 refuse the file or garble it.

llama.cpp uses the weights as they were trained, but its CPU kernels round the activations that are
multiplied by a block type to 8 bits. One scale covers a run of 32 activations for Q2_0 and Q4_0. It
covers 256 for TQ1_0 and TQ2_0, so one outlier makes 255 other activations coarser. On a
SmolLM2-135M with five ternary down projections this moved the logits by 2.6% (Q2_0, Q4_0) and 10%
(TQ1_0, TQ2_0). Activations that are rounded in the same way in transformers give the same.

The default, "auto", is the smallest type that holds the model and runs well: TQ2_0, or else Q2_0,
or else Q4_0 (`gguf_types.block_types`). `compare_types` compares the sizes of a model's files.
"""

import contextlib
import logging
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

import hestia_tune
from hestia_tune.distributed import progress_bar
from hestia_tune.errors import InputError
from hestia_tune.export import llama_cpp
from hestia_tune.export.folder import sizes
from hestia_tune.export.gguf_families import LlamaModel
from hestia_tune.export.gguf_tokenizer import add_vocabulary, check_tokens
from hestia_tune.export.gguf_types import (
    BLOCK_TYPES,
    EMBEDDING_TYPES,
    LOADERS,
    TensorType,
    block_types,
)
from hestia_tune.files import staged
from hestia_tune.models.embedding import embedding_codes
from hestia_tune.models.folder import ModelFolder, import_optional, is_exact

# The first type that holds every value is taken.
_DENSE_TYPES = {
    torch.float16: TensorType("F16", 1, 1, 1, 2),
    torch.bfloat16: TensorType("BF16", 30, 32, 1, 2),
    torch.float32: TensorType("F32", 0, 0, 1, 4),
}
_ROUTER = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")


def write_gguf(
    source: ModelFolder,
    path: Path,
    *,
    block_type: str | Sequence[str] = "auto",
    overwrite: bool = False,
    verify: bool = False,
) -> dict[str, Any]:
    """Write a Hugging Face model of a family in `gguf_families` as one GGUF file.

    Args:
        source: The model.
        path: The file to write.
        block_type: "auto", or one of `BLOCK_TYPES`, or several, of which every quantized weight
            gets the first type that holds its groups. The module docstring says what each costs.
        overwrite: Replace a file that exists, once the new file is complete.
        verify: Compare the logits of the file with those of transformers, if llama.cpp is installed
            (`llama_cpp.compare_file`).

    Returns:
        What `sizes` returns, and ``types``: name of a type -> number of tensors in the file.

    Raises:
        InputError: If the gguf package is missing; if the target is a folder, or exists and
            ``overwrite`` is False; if llama.cpp does not have the architecture, the tokenizer or
            the rotary scaling; if no block type holds the groups of a weight; if a scale is outside
            float16's normal range; or if llama.cpp computes other logits.
        OSError: If the disk is full.
        RuntimeError: If the file that is read back differs from the model.
    """
    gguf = import_optional("gguf")
    if path.is_dir() or (path.exists() and not overwrite):
        raise InputError(f"{path} exists; choose another name, or set overwrite=True for a file")
    model, num_bytes = LlamaModel(source), {}
    types, entry_types = block_types(source, block_type), {}
    check_entries(source, model, types)
    writer = _new_writer(source, model)
    for name, weight in progress_bar(model.tensors(), desc="packing for GGUF", unit="tensor"):
        origin = next(iter(model.entries[name].sources), "")
        if origin in source.quantized:
            kind, hard = types[origin], source.pack(origin, weight)
            layer = source.layers.get(origin)
            data = kind.pack(hard.codes(), hard.scale, origin, hard.levels, layer)
            if kind.tolerance and not kind.holds(data.reshape(-1), weight):
                raise InputError(
                    f"the scales of a block of {origin} differ by more than Q2_K can hold; use "
                    "convert.block_type=Q4_0"
                )
        elif origin in source.embeddings:
            kind = EMBEDDING_TYPES[str(source.embedding)]
            data = kind.pack(*embedding_codes(weight, str(source.embedding)), origin)
        else:
            kind, data = _pack_dense(weight, origin, is_router=name.endswith(_ROUTER))
        num_bytes[name], entry_types[name] = data.nbytes, kind
        # The package looks a type up in its own table if the type is an enum or the data are uint8.
        # A plain int and int8 avoid that, so the package may be older than the type.
        writer.add_tensor(name, data.view(np.int8), raw_shape=weight.shape, raw_dtype=kind.ggml_id)
    matrices = [name for name in entry_types if name not in _vectors(source, model)]
    writer.add_file_type(statistics.mode(entry_types[name] for name in matrices).file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    with staged(path) as temporary:
        try:
            writer.write_header_to_file(temporary)
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file(progress=True)
        finally:
            writer.close()
        _read_back(temporary, model, entry_types, num_bytes, writer.data_alignment)
        if verify:
            runs = {name: 256 if kind.block == 256 else 32 for name, kind in types.items()}
            llama_cpp.compare_file(source, temporary, runs)
        quantized_bytes = sum(num_bytes[name] for name in _quantized(source, model))
        return sizes(source.shapes, source.quantized, temporary.stat().st_size, quantized_bytes) | {
            "types": dict(Counter(kind.name for kind in entry_types.values()))
        }


def check_gguf(source: ModelFolder, block_type: str | Sequence[str] = "auto") -> None:
    """Raise InputError if a GGUF file cannot hold a model, its groups or its tokenizer.

    Args:
        source: The model. No weight is read.
        block_type: See `write_gguf`.
    """
    model = LlamaModel(source)
    check_entries(source, model, block_types(source, block_type))
    _new_writer(source, model)
    check_tokens(source.folder, model.config)


def check_entries(source: ModelFolder, model: LlamaModel, types: Mapping[str, TensorType]) -> None:
    """Raise InputError if a quantized weight is no linear, or if one tensor would have two types.

    Args:
        source: The model.
        model: The same model with llama.cpp's names.
        types: Name of a quantized weight in the safetensors -> its type.
    """
    held = {name for entry in model.entries.values() for name in entry.sources}
    for name in source.quantized:
        if name not in held or name == model.embedding:
            raise InputError(f"only weights of linear layers can be quantized; got {name}")
    for entry in model.entries.values():
        methods = {source.quantized.get(name) for name in entry.sources}
        if len(methods) > 1 or len({types.get(name) for name in entry.sources}) > 1:
            raise InputError(
                f"llama.cpp has the experts of a block in one tensor; {entry.sources[0]} and "
                "others have several methods; quantize them alike"
            )


@dataclass(frozen=True)
class TypeSize:
    """The file of a model with one block type, written or not.

    Attributes:
        name: The block type, or the types of the written file, such as "Q2_0 + Q4_0".
        bits: Bits of a quantized weight, with its scale.
        num_bytes: Bytes of the file.
        is_written: Whether this is the file that was written.
        loaders: Who loads it.
        tokens_per_second: Speed of decoding in the installed llama.cpp on this CPU. None: it was
            not measured.
    """

    name: str
    bits: float
    num_bytes: int
    is_written: bool
    loaders: str
    tokens_per_second: float | None = None


# Files of other types are written to measure them only up to this size.
_MEASURED_BYTES = 300_000_000
_WRITING_SECONDS, _RUNNING_SECONDS = 10.0, 20.0


def compare_types(
    source: ModelFolder, path: Path, block_type: str | Sequence[str] = "auto", *, measure: bool
) -> list[TypeSize]:
    """Return the sizes of the files of every block type that holds a model.

    Args:
        source: The model.
        path: Its GGUF file.
        block_type: What the file was written with.
        measure: Whether to measure the speed of the file, and of other small files, in the
            installed llama.cpp. It takes half a minute at most, and without llama.cpp nothing.
    """
    model, written = LlamaModel(source), block_types(source, block_type)
    names = sorted({kind.name for kind in written.values()}, key=list(BLOCK_TYPES).index)
    choices = {
        name: dict.fromkeys(source.quantized, kind)
        for name, kind in BLOCK_TYPES.items()
        if all(
            kind.fits(source.shapes[each][-1], method.group_size, method.levels)
            for each, method in source.quantized.items()
        )
    }
    choices.setdefault(" + ".join(names), written)
    weights = sum(source.shapes[name].numel() for name in source.quantized)
    found = []
    for name, types in choices.items() if weights else ():
        size = path.stat().st_size + _bytes(source, model, types) - _bytes(source, model, written)
        stored = _bytes(source, model, types, alignment=1)
        loaders = "; ".join(LOADERS[each] for each in names) if " + " in name else LOADERS[name]
        found.append(TypeSize(name, 8 * stored / weights, size, types == written, loaders))
    found.sort(key=lambda each: each.num_bytes)
    if measure:
        with contextlib.suppress(Exception):  # a speed is not worth an error
            return _with_speeds(found, source, path)
    return found


def _bytes(
    source: ModelFolder, model: LlamaModel, types: Mapping[str, TensorType], alignment: int = 32
) -> int:
    """Return the bytes of the quantized tensors in a file, padded to the alignment."""
    total = 0
    for name in _quantized(source, model):
        entry = model.entries[name]
        kind = types[entry.sources[0]]
        count = sum(source.shapes[each].numel() for each in entry.sources)
        count //= 1 if entry.half is None else 2
        total += -(-count // kind.block * kind.num_bytes // alignment) * alignment
    return total


def _with_speeds(rows: list[TypeSize], source: ModelFolder, path: Path) -> list[TypeSize]:
    """Return `compare_types` with the speeds that llama.cpp gives in time."""
    if not llama_cpp.is_installed():
        return rows
    started, files = time.monotonic(), {}
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        for row in sorted(rows, key=lambda each: not each.is_written):
            is_late = time.monotonic() - started > _WRITING_SECONDS
            if row.is_written:
                files[row.name] = path
            elif row.num_bytes <= _MEASURED_BYTES and not is_late:
                files[row.name] = Path(folder) / f"{row.name}.gguf"
                with _quiet():
                    write_gguf(source, files[row.name], block_type=row.name)
        speeds = llama_cpp.tokens_per_second(list(files.values()), _RUNNING_SECONDS)
    known = dict(zip(files, speeds, strict=True))
    return [replace(row, tokens_per_second=known.get(row.name)) for row in rows]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Show no progress bars and no log."""
    logging.disable(logging.WARNING)
    try:
        with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):
            yield
    finally:
        logging.disable(logging.NOTSET)


def _quantized(source: ModelFolder, model: LlamaModel) -> list[str]:
    """Return the tensors of the file that hold quantized weights."""
    entries = model.entries.items()
    return [name for name, each in entries if set(each.sources) & source.quantized.keys()]


def _vectors(source: ModelFolder, model: LlamaModel) -> set[str]:
    """Return the tensors of the file with one dimension."""
    return {
        name
        for name, entry in model.entries.items()
        if all(len(source.shapes[each]) == 1 for each in entry.sources)
    }


def _new_writer(source: ModelFolder, model: LlamaModel) -> Any:
    """Return a ``gguf.GGUFWriter`` with the model's metadata, hyperparameters and vocabulary."""
    import gguf

    writer = gguf.GGUFWriter(None, model.architecture)
    parameters = sum(shape.numel() for shape in source.shapes.values())
    folder = source.folder.resolve()
    try:
        metadata = gguf.Metadata.load(None, folder, None, parameters)  # reads README.md
    except (ValueError, yaml.YAMLError):  # README.md may hold anything
        metadata = gguf.Metadata(name=folder.name)
    metadata.quantized_by = f"hestia_tune {hestia_tune.__version__}"
    metadata.set_gguf_meta_model(writer)
    model.add_to(writer)
    add_vocabulary(writer, source.folder, model.config)
    return writer


def _pack_dense(
    weight: torch.Tensor, name: str, *, is_router: bool = False
) -> tuple[TensorType, np.ndarray]:
    """Return a dense tensor's type and bytes, or raise InputError if float32 does not hold it.

    Vectors and the routers of experts get float32, as llama.cpp's own converter writes them.
    """
    dtypes = _DENSE_TYPES if weight.dim() > 1 and not is_router else (torch.float32,)
    dtype = next((dtype for dtype in dtypes if is_exact(weight, dtype)), None)
    if dtype is None:
        raise InputError(f"GGUF export holds up to float32; {name} has more digits; round it")
    return _DENSE_TYPES[dtype], weight.to(dtype).contiguous().view(torch.int8).numpy()


def _read_back(
    path: Path,
    model: LlamaModel,
    types: Mapping[str, TensorType],
    num_bytes: Mapping[str, int],
    alignment: int,
) -> None:
    """Raise RuntimeError if a tensor of the file differs from the model's.

    Args:
        path: The GGUF file. Its tensors are at the end, in the model's order.
        model: The model that was written.
        types: Name of a tensor -> its type.
        num_bytes: Name of a tensor -> its bytes, without padding.
        alignment: Every tensor is padded to a multiple of this number of bytes.
    """
    from gguf import GGUFWriter

    padded = {name: GGUFWriter.ggml_pad(size, alignment) for name, size in num_bytes.items()}
    position = path.stat().st_size - sum(padded.values())
    for name, weight in progress_bar(model.tensors(), desc="reading it back", unit="tensor"):
        data = np.fromfile(path, np.uint8, num_bytes[name], offset=position)
        if not types[name].holds(data, weight):
            source = next(iter(model.entries[name].sources), name)
            raise RuntimeError(
                f"{source} ({types[name].name}) read back differs from its source; check the disk"
            )
        position += padded[name]
