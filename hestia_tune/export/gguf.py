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
    Q2_0       64     18           2.25    multiples of 64, or whole rows; codes -1 to 2
    Q4_0       32     18           4.5     multiples of 32, or whole rows; codes -8 to 7

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
or else Q4_0 (`block_types`). `compare_types` compares the sizes of a model's files.

LM Studio and llama.cpp use the chat template in the file. Ollama has templates of its own, in the
language of Go's text/template, and recognizes well-known chat templates only. So a Modelfile beside
the file has a template that is made from what the tokenizer's chat template renders: the text
before and after the content of each role. It is used only if it renders other conversations alike.
"""

import contextlib
import logging
import os
import shlex
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

import hestia_tune
from hestia_tune.distributed import progress_bar
from hestia_tune.errors import InputError, quiet_loggers
from hestia_tune.export import llama_cpp
from hestia_tune.export.format import PROMPT, Format, has_chat_template
from hestia_tune.export.gguf_families import (
    FAMILIES,
    LlamaModel,
    add_vocabulary,
    check_tokens,
    end_ids,
)
from hestia_tune.export.huggingface import sizes
from hestia_tune.export.logits import compare_gguf
from hestia_tune.files import read_json, staged, write_atomically
from hestia_tune.methods.groups import INT4, TERNARY, TWO_BIT, GroupMethod, GroupSize, Levels
from hestia_tune.methods.straight_through import embedding_codes
from hestia_tune.models.contents import Q2_0, Q2_0_BLOCK, Q2_0_BYTES, Q2_0_ID, unpack_q2_0
from hestia_tune.models.folder import ModelFolder, import_optional, is_exact

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TensorType:
    """Describe a tensor type of ggml.

    Attributes:
        name: ggml's name of the type.
        ggml_id: ggml's number of the type.
        file_type: Value of ``general.file_type`` for a model that consists mostly of this type.
        block: Number of weights in a block; 1 for floats.
        num_bytes: Bytes of a block.
    """

    name: str
    ggml_id: int
    file_type: int
    block: int
    num_bytes: int

    def fits(self, in_features: int, group_size: GroupSize, levels: Levels = TERNARY) -> bool:
        """Return whether the type holds the codes of a weight exactly.

        Blocks must tile the rows, no block may contain parts of two groups, and the integers of the
        type must hold the codes. Q4_0 has the integers -8 to 7, Q2_0 -1 to 2, and TQ1_0 and TQ2_0
        have -1 to 1.
        """
        if not {*levels} <= {*_INTEGERS.get(self.name, TERNARY)}:
            return False
        group = in_features if isinstance(group_size, str) else group_size
        return in_features % self.block == 0 and group % self.block == 0

    def pack(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        name: str,
        layer: str | None = None,
    ) -> np.ndarray:
        """Return the blocks as bytes, uint8 (out_features, in_features / block, num_bytes).

        Args:
            codes: int8 (out_features, in_features) that the type holds.
            scales: bfloat16 (out_features or 1, groups). Every group consists of whole blocks.
            name: Name of the weight, for the error.
            layer: The name by which the model knows the layer, for the error. None: ``name``.

        Raises:
            InputError: If the magnitude of a scale is neither 0 nor in fp16's normal range.
        """
        # Compare in float32, because bfloat16 rounds half.max up.
        half, single = torch.finfo(torch.float16), scales.float()
        bad = (single != 0) & ((single.abs() < half.smallest_normal) | (single.abs() > half.max))
        if bad.any():
            row, group = bad.nonzero()[0].tolist()
            raise InputError(
                f"a GGUF scale is 0 or a float16 of the normal range; group {group} of row {row} "
                f"of {name} has the scale {scales[row, group].item():.9g}; leave gguf out of "
                f"convert.formats, or {exclude_remedy(layer or name)} and train again"
            )
        array = codes.numpy()
        fp16 = scales.half().expand(len(codes), -1).numpy().astype("<f2")
        fp16 = fp16.repeat(codes.shape[1] // self.block // fp16.shape[1], axis=1)
        shape = (*fp16.shape, self.num_bytes)  # (out_features, blocks of a row, bytes)
        fp16 = fp16[..., None].view(np.uint8)
        if self.name.startswith("TQ"):
            import gguf

            kind = gguf.GGMLQuantizationType(self.ggml_id)
            blocks = gguf.quants.quantize(array.astype(np.float32), kind).reshape(shape)
            blocks[..., -2:] = fp16
            return blocks
        if self.name == "Q2_0":  # byte i holds code + 1 of the weights 4i to 4i + 3
            fields, width = (array + 1).reshape(*shape[:2], 16, 4), 2
        elif self.name == "Q8_0":  # byte i holds the code of weight i
            fields, width = array.view(np.uint8).reshape(*shape[:2], 32, 1), 8
        else:  # byte i holds 4 bits of code + 8 (Q4_0) or + 16 (Q5_0) of weights i and i + 16
            array = array + (16 if self.name == "Q5_0" else 8)
            fields, width = (array & 15).reshape(*shape[:2], 2, 16).swapaxes(-1, -2), 4
        shifts = np.arange(0, 8, width, dtype=np.uint8)
        packed = np.bitwise_or.reduce(fields.astype(np.uint8) << shifts, axis=-1)
        if self.name != "Q5_0":
            return np.concatenate([fp16, packed], axis=-1)
        # Four more bytes hold the fifth bits, the bit of weight i in bit i.
        fifth = np.packbits(array.reshape(*shape[:2], 32) >> 4, axis=-1, bitorder="little")
        return np.concatenate([fp16, fifth, packed], axis=-1)

    def holds(self, data: np.ndarray, weight: torch.Tensor) -> bool:
        """Return whether bytes, uint8 (bytes,), are a weight."""
        found = torch.from_numpy(self.unpack(data)).view(weight.shape)
        return torch.equal(found, weight.float())

    def unpack(self, data: np.ndarray) -> np.ndarray:
        """Return the weights, float32 (weights,), of the bytes of their blocks, uint8 (bytes,)."""
        if self.name == Q2_0:
            return unpack_q2_0(data)
        import gguf

        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType(self.ggml_id))


# Type -> the integers that it holds, if they are not -1 to 1.
_INTEGERS = {"Q2_0": TWO_BIT, "Q4_0": INT4}
# The smallest type is first.
BLOCK_TYPES = {
    "TQ1_0": TensorType("TQ1_0", 34, 36, 256, 54),
    "TQ2_0": TensorType("TQ2_0", 35, 37, 256, 66),
    Q2_0: TensorType(Q2_0, Q2_0_ID, 41, Q2_0_BLOCK, Q2_0_BYTES),
    "Q4_0": TensorType("Q4_0", 2, 2, 32, 18),
}
# Who loads a type. GPUs that are not named leave the products to the CPU.
LOADERS = {
    "TQ1_0": "llama.cpp since September 2024 on CPUs",
    "TQ2_0": "llama.cpp since September 2024 on CPUs, since July 2026 with Vulkan",
    "Q2_0": "llama.cpp since b9916 (July 2026): CPU (slow on x86), Metal, Vulkan, CUDA",
    "Q4_0": "every llama.cpp, LM Studio and Ollama",
}
# Choice of bits.embedding -> type.
EMBEDDING_TYPES = {
    "int4": BLOCK_TYPES["Q4_0"],
    "int5": TensorType("Q5_0", 6, 8, 32, 22),
    "int8": TensorType("Q8_0", 8, 7, 32, 34),
}
# What "auto" chooses from, the smallest type first. TQ1_0 is smaller than TQ2_0, but half as fast.
AUTO = ("TQ2_0", "Q2_0", "Q4_0")


def block_types(source: ModelFolder, names: str | Sequence[str]) -> dict[str, TensorType]:
    """Return the block type of every quantized weight, by the weight's name.

    Args:
        source: The model.
        names: One of `BLOCK_TYPES`, or several, of which the first that fits is taken; or "auto".
            "auto" is TQ2_0 if it holds every weight of codes -1 to 1. Otherwise it is the
            first of Q2_0 and Q4_0 that fits, so that the file runs on GPUs as a whole.

    Raises:
        InputError: If a type is unknown, or if no type holds the groups of a weight.
    """
    names = [names] if isinstance(names, str) else list(names)
    if names == ["auto"]:
        ternary = _ternary(source)
        held = [
            BLOCK_TYPES[AUTO[0]].fits(source.shapes[name][-1], method.group_size, method.levels)
            for name, method in ternary.items()
        ]
        names = list(AUTO if all(held) else AUTO[1:])
    if not names or set(names) - set(BLOCK_TYPES):
        raise InputError(
            f"block_type must be auto, or one or several of {', '.join(BLOCK_TYPES)}; got {names!r}"
        )
    return {
        name: choose_block_type(
            names,
            source.shapes[name][-1],
            method.group_size,
            name,
            method.levels,
            widths=[source.shapes[each][-1] for each in source.quantized],
            layer=source.layers.get(name),
        )
        for name, method in source.quantized.items()
    }


def _ternary(source: ModelFolder) -> dict[str, GroupMethod]:
    """Return name -> method of the weights that types of codes -1 to 1 hold."""
    return {name: m for name, m in source.quantized.items() if {*m.levels} <= {*TERNARY}}


def smaller_type(source: ModelFolder) -> str | None:
    """Return how a model gets a smaller block type than "auto" gives it, or None.

    Args:
        source: The model.
    """
    ternary = _ternary(source)
    if not ternary:
        return None
    widths, kinds = {source.shapes[name][-1] for name in ternary}, block_types(source, "auto")
    largest = max((kinds[name] for name in ternary), key=lambda kind: AUTO.index(kind.name))
    for name, size in (("TQ2_0", 256), ("Q2_0", 64)):
        if AUTO.index(name) < AUTO.index(largest.name) and not any(w % size for w in widths):
            return (
                f"{name} needs groups of {size}: train with quantizer.group_size={size} for "
                f"{8 * BLOCK_TYPES[name].num_bytes / BLOCK_TYPES[name].block:.2f} bits per weight"
            )
    return None


def choose_block_type(
    names: Sequence[str],
    in_features: int,
    group_size: GroupSize,
    weight: str,
    levels: Levels = TERNARY,
    *,
    widths: Iterable[int] = (),
    layer: str | None = None,
) -> TensorType:
    """Return the first block type of ``names`` that holds such groups exactly.

    Args:
        names: Names of block types.
        in_features: Length of the weight's rows.
        group_size: The weight's group size.
        weight: Name of the weight, for the error.
        levels: The codes.
        widths: Length of the rows of every quantized weight. A remedy must fit all of them.
        layer: The name by which the model knows the layer, for the error. None: ``weight``.

    Raises:
        InputError: If no type of ``names`` holds the groups. It gives the remedies that help.
    """
    for name in names:
        if BLOCK_TYPES[name].fits(in_features, group_size, levels):
            return BLOCK_TYPES[name]
    remedies = []
    fitting = [
        name for name, kind in BLOCK_TYPES.items() if kind.fits(in_features, group_size, levels)
    ]
    if fitting := [name for name in AUTO if name in fitting] or fitting:
        remedies.append(f"use convert.block_type={fitting[0]}")
    # Another size helps if a type of the list holds groups of this size in all rows. Q4_0 is the
    # last resort.
    every, lists = {in_features, *widths}, [names, *([] if fitting else [["Q4_0"]])]
    for allowed in lists if isinstance(group_size, int) else ():
        sizes = [
            size
            for size in (256, 128, 64, 32, "channel")
            if size != group_size
            and all(isinstance(size, str) or width % size == 0 for width in every)
            and all(any(BLOCK_TYPES[n].fits(w, size, levels) for n in allowed) for w in every)
        ]
        if sizes:
            also = "" if allowed is names else f" and convert.block_type={allowed[0]}"
            remedies.append(f"train again with quantizer.group_size={sizes[0]}{also}")
            break
    remedies.append(exclude_remedy(layer or weight) + " and train again")
    raise InputError(
        f"no block of {' or '.join(names)} holds {weight} exactly (in_features {in_features}, "
        f"group_size {group_size}, codes {levels[0]} to {levels[-1]}); {', or '.join(remedies)}"
    )


def exclude_remedy(layer: str) -> str:
    """Return the option that leaves out a layer and those of the same name in other blocks."""
    return f"""set quantizer.exclude='["*.{layer.removesuffix(".weight").rpartition(".")[2]}"]'"""


# The first type that holds every value is taken.
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_DENSE_TYPES = {
    "F16": TensorType("F16", 1, 1, 1, 2),
    "BF16": TensorType("BF16", 30, 32, 1, 2),
    "F32": TensorType("F32", 0, 0, 1, 4),
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
            (`compare_gguf`).

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
    model, types = LlamaModel(source), block_types(source, block_type)
    check_entries(source, model, types)
    writer, kinds = _new_writer(source, model), {}
    for name, weight in progress_bar(model.tensors(), desc="packing for GGUF", unit="tensor"):
        origin = next(iter(model.entries[name].sources), "")
        kinds[name] = kind = _type_of(source, types, name, origin, weight)
        if origin in source.quantized:
            hard = source.pack(origin, weight)
            data = kind.pack(hard.codes(), hard.scale, origin, source.layers.get(origin))
        elif origin in source.embeddings:
            data = kind.pack(*embedding_codes(weight, str(source.embedding)), origin)
        else:
            data = weight.to(_DTYPES[kind.name]).contiguous().view(torch.int8).numpy()
        # The package looks a type up in its own table if the type is an enum or the data are uint8.
        # A plain int and int8 avoid that, so the package may be older than the type.
        writer.add_tensor(name, data.view(np.int8), raw_shape=weight.shape, raw_dtype=kind.ggml_id)
    matrices = [name for name in kinds if name not in _vectors(source, model)]
    writer.add_file_type(statistics.mode(kinds[name] for name in matrices).file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    with staged(path) as temporary:
        try:
            writer.write_header_to_file(temporary)
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file(progress=True)
        finally:
            writer.close()
        GGUF.verify(source, temporary, kinds)
        if verify:
            runs = {name: 256 if kind.block == 256 else 32 for name, kind in types.items()}
            compare_gguf(source, temporary, runs)
        quantized_bytes = _bytes(source, model, types, alignment=1)
        return sizes(source.shapes, source.quantized, temporary.stat().st_size, quantized_bytes) | {
            "types": dict(Counter(kind.name for kind in kinds.values()))
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


MODELFILE = "Modelfile"
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
        kind = types[model.entries[name].sources[0]]
        total += -(-model.numel(name) // kind.block * kind.num_bytes // alignment) * alignment
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
    """Show no progress bars, and no notices of the files that are written to be measured."""
    with (
        open(os.devnull, "w") as nothing,
        contextlib.redirect_stderr(nothing),
        quiet_loggers("hestia_tune", "gguf", level=logging.ERROR),
    ):
        yield


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
    for name in ("languages", "tags"):  # YAML reads the language "no" as False
        if (values := getattr(metadata, name)) is not None:
            setattr(metadata, name, ["no" if value is False else str(value) for value in values])
    metadata.quantized_by = f"hestia_tune {hestia_tune.__version__}"
    metadata.set_gguf_meta_model(writer)
    model.add_to(writer)
    add_vocabulary(writer, source.folder, model.config)
    return writer


def _type_of(
    source: ModelFolder,
    types: Mapping[str, TensorType],
    name: str,
    origin: str,
    weight: torch.Tensor,
) -> TensorType:
    """Return the type of a tensor of the file.

    Vectors and the routers of experts get float32, as llama.cpp's own converter writes them.

    Args:
        source: The model.
        types: Name of a quantized weight in the safetensors -> its type.
        name: Name of the tensor in the file.
        origin: The first tensor of the safetensors that it is made of.
        weight: Its value.

    Raises:
        InputError: If float32 does not hold a dense tensor.
    """
    if origin in source.quantized:
        return types[origin]
    if origin in source.embeddings:
        return EMBEDDING_TYPES[str(source.embedding)]
    is_single = weight.dim() == 1 or name.endswith(_ROUTER)
    for kind in (_DENSE_TYPES["F32"],) if is_single else _DENSE_TYPES.values():
        if is_exact(weight, _DTYPES[kind.name]):
            return kind
    raise InputError(f"GGUF export holds up to float32; {origin} has more digits; round it")


def write_modelfile(source: ModelFolder, model: Path) -> Path:
    """Write a Modelfile for Ollama beside a GGUF file, and return its path.

    Args:
        source: The model, whose tokenizer has the chat template.
        model: The GGUF file.
    """
    folder, lines = source.folder, [f"FROM ./{model.name}"]
    if has_chat_template(folder):
        template = None
        with contextlib.suppress(Exception):  # a chat template is a program, and may raise anything
            template = _template_of(folder)
        if template is None:
            lines.append(
                "# Ollama uses its own template if it knows this model's chat template. Otherwise "
                "write one here: TEMPLATE"
            )
        else:
            lines.append(f'TEMPLATE """{template}"""')
    else:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    tokens = _token_texts(folder)
    stops = [tokens[index] for index in end_ids(folder, source.config) if index in tokens]
    lines += [f"PARAMETER stop {_quoted(stop)}" for stop in dict.fromkeys(stops)]
    path = model.with_name(MODELFILE)
    write_atomically(path, "\n".join(lines) + "\n")
    return path


def _quoted(text: str) -> str:
    """Return a text in the quotes of a Modelfile."""
    return '"' + text.replace('"', '\\"') + '"'


def _token_texts(folder: Path) -> dict[int, str]:
    """Return id -> text of the added tokens of a folder."""
    added = read_json(folder / "tokenizer.json").get("added_tokens", [])
    return {token["id"]: token["content"] for token in added}


def _template_of(folder: Path) -> str | None:
    """Return Go's template of a folder's chat template, or None if it cannot be said in it."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if "strftime_now" in str(tokenizer.chat_template):  # the file would say today's date forever
        return None
    adds_bos = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]

    def render(roles: str, is_prompt: bool = False) -> str:
        """Render a conversation of one letter for each role; the content is the role's number."""
        names = {"s": "system", "u": "user", "a": "assistant"}
        messages = [
            {"role": names[role], "content": f"<{role}{index}>"} for index, role in enumerate(roles)
        ]
        options = {"tokenize": False, "add_generation_prompt": is_prompt}
        text = tokenizer.apply_chat_template(messages, **options)
        # Ollama adds BOS to a text if the tokenizer does.
        return text.removeprefix(tokenizer.bos_token) if adds_bos else text

    return make_template(render)


def make_template(render: Callable[..., str]) -> str | None:
    """Return Go's template of a chat template, or None if it is none of texts around contents.

    Args:
        render: A function from the roles of a conversation ("s", "u", "a" for system, user and
            assistant) and whether the reply follows to a text. The content of message i of the
            role r is ``<ri>``.
    """
    first, second, third = render("u"), render("ua"), render("uau")
    reply = render("u", True).removeprefix(first)  # what comes before a reply
    before, after = third.removeprefix(second).split("<u2>")
    own = second.removeprefix(first).removeprefix(reply)
    if not own.startswith("<a1>") or not reply:
        return None
    end, user = own.removeprefix("<a1>"), "{}<u{}>{}"
    default = first.removesuffix(user.format(before, 0, after))  # a system prompt, or nothing
    # The texts around a system prompt, and whether they are a part of the user's first turn.
    ways: list[tuple[list[str], bool]] = [(["", "\n\n"], True)]
    asked = ["u", "uau"]
    with contextlib.suppress(Exception):  # a chat template without system prompts raises
        text = render("su")
        asked += ["su", "suauau"]
        joint = text.removeprefix(default + before).removesuffix(f"<u1>{after}")
        own = text.removesuffix(user.format(before, 1, after))
        ways = [(own.split("<s0>"), False), (joint.split("<s0>"), True)]

    def expected(roles: str, system: list[str], is_joint: bool) -> str:
        text = default if is_joint or "s" not in roles else ""
        for index, role in enumerate(roles):
            content = f"<{role}{index}>"
            if role == "s":
                text += "" if is_joint else content.join(system)
            elif role == "u":
                is_first = is_joint and roles[:index] == "s"
                text += ("<s0>".join(system) * is_first + content).join((before, after))
            else:
                text += content.join((reply, end))
        return text + reply

    for system, is_joint in ways:
        texts = (before, after, reply, end, default, *system)
        is_plain = len(system) == 2 and "{{" not in "".join(texts)
        if is_plain and all(render(r, True) == expected(r, system, is_joint) for r in asked):
            break
    else:
        return None
    prompt, content = "{{ .System }}".join(system), "{{ .Content }}"
    if is_joint:
        start = "{{ $system := .System }}" + default
        prompt = "{{ $system }}".join(system)
        content = "{{ if $system }}" + prompt + '{{ $system = "" }}{{ end }}' + content
    else:
        start = "{{ if .System }}" + prompt + "{{ else }}" + default + "{{ end }}"
    return (
        start
        + '{{ range .Messages }}{{ if eq .Role "user" }}'
        + content.join((before, after))
        + '{{ else if eq .Role "assistant" }}'
        + "{{ .Content }}".join((reply, end))
        + "{{ end }}{{ end }}"
        + reply
    )


def types_table(rows: Sequence[TypeSize]) -> str:
    """Return a Markdown table with a line for every block type that holds the model.

    Args:
        rows: What `compare_types` returned. Without a speed, the table has no column for it.
    """
    is_measured = any(row.tokens_per_second for row in rows)
    heads = ["GGUF type", "bits per quantized weight", "file (MB)"]
    heads += ["tokens/s on this CPU"] * is_measured + ["who loads it"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 2) + "---|"]
    for row in rows:
        speed = f"{row.tokens_per_second:.1f}" if row.tokens_per_second else "not measured"
        cells = [row.name + " (written)" * row.is_written, f"{row.bits:.2f}"]
        cells += [f"{row.num_bytes / 1e6:.1f}"] + [speed] * is_measured + [row.loaders]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


class _GGUF(Format):
    """A file of llama.cpp, with a Modelfile for Ollama beside it."""

    name = extra = library = "gguf"
    about = (
        "2.06 bits per weight as `TQ2_0`, 2.25 as `Q2_0`, or [another type](formats.md#block-types)"
    )
    runs_in = "llama.cpp, LM Studio, Ollama"
    packages = ("gguf",)
    file = "model.gguf"
    group_multiple = min(kind.block for kind in BLOCK_TYPES.values())
    architectures = tuple(FAMILIES)
    holds_stacks = True
    variants = {f"gguf {name}": f"convert.block_type={name}" for name in BLOCK_TYPES}
    # docs/formats.md, "Groups of 256", has the measurement.
    preferred_group = (
        256,
        "256 weights share a scale, so that llama.cpp's type TQ2_0 holds the model; it is small, "
        "and fast on CPUs; groups of 256 instead of 128 raised the loss of a small Llama by 0.04 "
        "without training, and by less than 0.001 after 100 steps (docs/formats.md)",
    )
    loading = """
With llama.cpp, LM Studio or Ollama. The tests of hestia_tune run files of this format in llama.cpp's
server, and compare the logits with those of transformers:

```bash
llama-cli -m MODEL/model.gguf
llama-server -m MODEL/model.gguf
ollama create my-model -f MODEL/Modelfile && ollama run my-model
```
"""  # noqa: E501

    def check(self, source, settings):
        check_gguf(source, settings.block_type)

    def write(self, conversion, target):
        options = conversion.config.convert
        summary = write_gguf(
            conversion.source,
            target,
            block_type=options.block_type,
            overwrite=options.overwrite,
            verify=True,
        )
        if options.overwrite or not target.with_name(MODELFILE).exists():
            write_modelfile(conversion.source, target)
        return summary

    def verify(
        self, source: ModelFolder, path: Path, types: Mapping[str, TensorType] | None = None
    ) -> None:
        """Compare every tensor of a file with the model's.

        Args:
            source: The hard model.
            path: The file. Its tensors are at the end, in the model's order.
            types: Name of a tensor -> its type. None: what the block type "auto" gives.

        Raises:
            RuntimeError: If a tensor differs.
        """
        from gguf import GGUF_DEFAULT_ALIGNMENT, GGUFWriter

        model = LlamaModel(source)
        if types is None:
            chosen, types = block_types(source, "auto"), {}
            for name, weight in model.tensors():
                origin = next(iter(model.entries[name].sources), "")
                types[name] = _type_of(source, chosen, name, origin, weight)
        num_bytes = {
            name: model.numel(name) // kind.block * kind.num_bytes for name, kind in types.items()
        }
        padded = {
            name: GGUFWriter.ggml_pad(size, GGUF_DEFAULT_ALIGNMENT)
            for name, size in num_bytes.items()
        }
        position = path.stat().st_size - sum(padded.values())
        for name, weight in progress_bar(model.tensors(), desc="reading it back", unit="tensor"):
            data = np.fromfile(path, np.uint8, num_bytes[name], offset=position)
            if not types[name].holds(data, weight):
                origin = next(iter(model.entries[name].sources), name)
                raise RuntimeError(
                    f"{origin} ({types[name].name}) read back differs from its source; check the "
                    "disk"
                )
            position += padded[name]

    def run_lines(self, path, name, *, is_chat=False):
        shell, model = shlex.quote(str(path)), f"local/{name}"
        modelfile = shlex.quote(str(path.with_name(MODELFILE)))
        return [
            f"llama-cli -m {shell}"
            if is_chat
            else f"llama-cli -m {shell} -p {PROMPT!r} -n 40 --single-turn   # without a chat "
            "template, llama-completion continues the text",
            f"llama-server -m {shell}   # then open http://localhost:8080",
            f"lms import {shell} --user-repo {model} --copy --yes   # LM Studio: the file goes to "
            f"~/.lmstudio/models/{model}/",
            f"ollama create {name} -f {modelfile} && ollama run {name}",
        ]

    def notes(self, conversion, path):
        source, block_type = conversion.source, conversion.config.convert.block_type
        if llama_cpp.is_installed():
            log.info("measuring the speed of the GGUF file in llama.cpp (half a minute at most)")
        rows = compare_types(source, path, block_type, measure=True)
        if not rows:  # no weight is quantized
            return ""
        section = conversion.config.convert
        options = "convert.block_type=NAME convert.overwrite=True"
        if section.source != "trained":
            options += f" {shlex.quote(f'convert.source={section.source}')}"
        lines = [types_table(rows), f"Another type: {options}"]
        if advice := smaller_type(source):
            lines.append(advice)
        return "\n".join(lines)


GGUF = _GGUF()
