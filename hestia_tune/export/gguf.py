"""Writing a hard model as a GGUF file that llama.cpp loads, bit for bit.

Codes and scales are recovered from the dense hard weight, which is exact, and go into the file
through our own packing; container and metadata are the gguf package's. A type is chosen for every
tensor: a block type (see `hestia_tune.export.gguf_blocks`) for quantized weights; float32 for
vectors (norms, biases), as llama.cpp wants them; for embeddings and other dense matrices the first
of ``dense_type``, BF16, F32 that holds every value. float16 seldom does: it has more digits than
bfloat16 but a smallest step of 2^-24, and a large embedding has some values below it.

The file is written under a temporary name and read back; every tensor is unpacked and compared
with its source before the file gets its name. Cost: three passes over the weights, each tensor
opened on its own, so memory holds about two copies of the largest tensor.

What llama.cpp does with it: the weights are as trained, but its CPU kernels round the activations
that meet a block type to 8 bits: in runs of 32 for Q2_0 and Q4_0, in runs of 256 for TQ1_0 and
TQ2_0, where one outlier coarsens 255 others. On a SmolLM2-135M with five ternary down projections
the logits moved by 2.6% (Q2_0, Q4_0) and 10% (TQ1_0, TQ2_0), as they do in transformers with
activations rounded so. That is why "auto" leaves out the two types that would be smaller.
Q2_0 needs llama.cpp b9916 (July 2026) or later; TQ1_0 and TQ2_0 load since September 2024, mostly
on the CPU; Q4_0 runs everywhere. Forks that read type 42 as blocks of 128 refuse or garble Q2_0.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from hestia_tune.export.folder import require_space
from hestia_tune.export.gguf_blocks import BLOCK_TYPES, choose_block_type
from hestia_tune.export.gguf_model import ROPE_FACTORS, LlamaModel
from hestia_tune.export.gguf_tensors import (
    DENSE_TYPES,
    Entry,
    TensorInfos,
    import_gguf,
    read_tensor_infos,
)
from hestia_tune.export.gguf_vocab import Vocabulary, read_vocabulary
from hestia_tune.export.source import SafetensorsFolder, row_chunks
from hestia_tune.methods.granularity import GroupSize, check_divides, validate_group_size

log = logging.getLogger(__name__)

_CHOICES = {"auto": ("Q2_0", "Q4_0"), "smallest": tuple(BLOCK_TYPES)}


def write_gguf(
    folder: str | Path,
    path: str | Path,
    *,
    quantized: Mapping[str, GroupSize],
    block_type: str | Sequence[str] = "auto",
    dense_type: str = "F16",
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes a Hugging Face Llama or Qwen2 with ternary weights as one GGUF file.

    Args:
        folder: Hugging Face folder: config.json, safetensors of any floating dtype, tokenizer.
        path: the file to write.
        quantized: name in the safetensors -> group_size ("channel" and "tensor" included) of every
            weight that is scale * {-1, 0, 1} in each of its groups.
        block_type: "auto", "smallest", a block type, or several, the first of which that holds a
            weight's groups is taken for it. "auto" is ("Q2_0", "Q4_0"): 2.25 bits per weight for
            multiples of 64, else 4.5. "smallest" is ("TQ1_0", "TQ2_0", "Q2_0", "Q4_0"), with 1.69
            bits for whole rows and multiples of 256; the module says what that costs. Choose
            "Q4_0" for a llama.cpp older than Q2_0.
        dense_type: "F16", "BF16" or "F32": the first choice for matrices that are not quantized;
            one that it does not hold exactly gets BF16 or F32, and the log says so.
        overwrite: replace a file that is there.

    Returns:
        `gguf_summary` of the file.

    Raises:
        ImportError: without the gguf package.
        FileExistsError, FileNotFoundError: the target exists; config, weights or tokenizer do not.
        ValueError: on an architecture, tokenizer or rotary scaling that llama.cpp does not have, a
            weight that is not ternary, a group size that the block types do not hold, a scale
            outside float16's normal range.
        OSError: if the disk is full.
        RuntimeError: if the file read back is not the model. In all cases nothing is left behind.
    """
    import_gguf()
    folder, path = Path(folder), Path(path)
    if path.is_dir() or (path.exists() and not overwrite):
        remedy = "it is a folder" if path.is_dir() else "choose another name or overwrite=True"
        raise FileExistsError(f"{path} exists; {remedy}")
    preferences = _preferences(block_type, dense_type)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(f"{config_file} does not exist; pass a Hugging Face folder")
    model = LlamaModel(json.loads(config_file.read_text(encoding="utf-8")))
    vocabulary = read_vocabulary(folder, model.config)
    source = SafetensorsFolder(folder)
    entries = _plan(model, source, quantized, preferences, dense_type)
    require_space(path, sum(entry.num_bytes for entry in entries))

    temporary = path.with_name(f"{path.name}.tmp")
    try:
        _write(temporary, folder.resolve().name, model, vocabulary, source, entries)
        infos = read_tensor_infos(temporary)
        _verify(temporary, infos, model, source, entries)
        summary = _summarize(temporary, infos)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return summary


def gguf_summary(path: str | Path) -> dict[str, Any]:
    """Sizes of a GGUF file, from the file alone.

    Returns:
        bytes: of the file, metadata and tokenizer included.
        parameters, quantized_parameters: number of weights, and of those in block types.
        quantized_bits_per_weight: of the tensors in block types, their scales included; None
            without any.
        whole_bits_per_weight: of the file: 8 * bytes / parameters; divide 16 by it for the ratio
            to a bfloat16 model.
        types: type name -> number of tensors.
    """
    return _summarize(path, read_tensor_infos(path))


def _summarize(path: str | Path, infos: TensorInfos) -> dict[str, Any]:
    known = {t.ggml_id: (name, t) for name, t in (BLOCK_TYPES | DENSE_TYPES).items()}
    total = quantized = quantized_bytes = 0
    types: Counter[str] = Counter()
    for name, (ggml_id, shape, _) in infos.items():
        if ggml_id not in known:
            raise ValueError(f"{path} was not written here: {name} has the type {ggml_id}")
        if name == ROPE_FACTORS:
            continue
        type_name, kind = known[ggml_id]
        types[type_name] += 1
        total += shape.numel()
        if type_name in BLOCK_TYPES:
            quantized += shape.numel()
            quantized_bytes += shape.numel() // kind.block * kind.num_bytes
    size = Path(path).stat().st_size
    return {
        "bytes": size,
        "parameters": total,
        "quantized_parameters": quantized,
        "quantized_bits_per_weight": 8 * quantized_bytes / quantized if quantized else None,
        "whole_bits_per_weight": 8 * size / total,
        "types": dict(types),
    }


def _preferences(block_type: str | Sequence[str], dense_type: str) -> tuple[str, ...]:
    names = (block_type,) if isinstance(block_type, str) else tuple(block_type)
    if len(names) == 1:
        names = _CHOICES.get(names[0], names)
    if not names or set(names) - set(BLOCK_TYPES):
        raise ValueError(
            f'block_type must be "auto", "smallest" or of {", ".join(BLOCK_TYPES)}; '
            f"got {block_type!r}"
        )
    if dense_type not in DENSE_TYPES:
        raise ValueError(f"dense_type must be one of {', '.join(DENSE_TYPES)}; got {dense_type!r}")
    return names


def _plan(
    model: LlamaModel,
    source: SafetensorsFolder,
    quantized: Mapping[str, GroupSize],
    preferences: tuple[str, ...],
    dense_type: str,
) -> list[Entry]:
    """What goes into the file; everything that can be refused by shape is refused here."""
    names = model.tensor_names(source.shapes)
    if unknown := [name for name in quantized if name not in names]:
        raise ValueError(
            f"quantized names tensors that {model.architecture} does not have or the folder "
            f"lacks: {unknown[:4]}; use the names of the safetensors, such as {next(iter(names))}"
        )
    entries = []
    if (factors := model.rope_factors()) is not None:
        entries.append(Entry(source=None, name=ROPE_FACTORS, type_name="F32", shape=factors.shape))
    for theirs, ours in names.items():
        shape = source.shapes[theirs]
        group_size = quantized.get(theirs)
        if group_size is None:
            type_name = _dense_type(source, theirs, shape, dense_type)
        else:
            validate_group_size(group_size)
            if len(shape) != 2 or theirs == "model.embed_tokens.weight":
                raise ValueError(f"only weights of linear layers can be quantized; got {theirs}")
            check_divides(group_size, shape[1], theirs)
            type_name = choose_block_type(preferences, shape[1], group_size, theirs).name
        entries.append(
            Entry(source=theirs, name=ours, type_name=type_name, shape=shape, group_size=group_size)
        )
    return entries


def _dense_type(source: SafetensorsFolder, name: str, shape: torch.Size, wanted: str) -> str:
    if len(shape) == 1:
        return "F32"
    tensor = source.read(name)
    for type_name in dict.fromkeys((wanted, "BF16", "F32")):
        dtype = DENSE_TYPES[type_name].dtype
        if all((part.to(dtype).double() == part.double()).all() for part in row_chunks(tensor)):
            break
    else:
        raise ValueError(f"GGUF export holds up to float32; {name} has more digits")
    if type_name != wanted:
        log.info("%s: %s instead of %s, which would round some values", name, type_name, wanted)
    return type_name


def _write(
    path: Path,
    title: str,
    model: LlamaModel,
    vocabulary: Vocabulary,
    source: SafetensorsFolder,
    entries: list[Entry],
) -> None:
    writer = import_gguf().GGUFWriter(path, model.architecture)
    try:
        writer.add_name(title)
        model.add_to(writer)
        vocabulary.add_to(writer)
        kinds = Counter(e.type_name for e in entries if e.group_size is not None)
        if kinds:
            writer.add_file_type(BLOCK_TYPES[kinds.most_common(1)[0][0]].file_type)
            writer.add_quantization_version(import_gguf().GGML_QUANT_VERSION)
        else:
            embedding = next(e for e in entries if e.name == "token_embd.weight")
            writer.add_file_type(DENSE_TYPES[embedding.type_name].file_type)
        for entry in entries:
            # A plain int as the type, and a dtype that is not uint8: the package then looks the
            # type up in no table of its own, and may be older than the type.
            writer.add_tensor_info(
                entry.name, entry.shape, np.dtype(np.float32), entry.num_bytes, entry.ggml_id
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in tqdm(entries, desc=f"writing {title} as GGUF", unit="tensor"):
            writer.write_tensor_data(entry.encode(model, source))
    finally:
        writer.close()


def _verify(
    path: Path,
    infos: TensorInfos,
    model: LlamaModel,
    source: SafetensorsFolder,
    entries: list[Entry],
) -> None:
    """Compares every tensor of the file with its source."""
    if [*infos] != [entry.name for entry in entries]:
        raise RuntimeError(f"{path} read back has other tensors than were written")
    with open(path, "rb") as file:
        for entry in tqdm(entries, desc="reading it back", unit="tensor"):
            type_id, shape, position = infos[entry.name]
            file.seek(position)
            data = np.fromfile(file, np.uint8, entry.num_bytes)
            same = (type_id, shape, data.size) == (entry.ggml_id, entry.shape, entry.num_bytes)
            if not same or not entry.holds(data, entry.load(model, source)):
                raise RuntimeError(
                    f"{entry.name} ({entry.type_name}) read back from {path} differs from "
                    f"{entry.source}; this is a defect of the export or of the disk"
                )
