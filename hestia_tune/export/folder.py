"""Writing a Hugging Face folder: streamed, read back, and only then given its name.

safetensors' own `save_file` wants all tensors of a file in memory. Here the header is written
from the shapes alone, and each tensor goes to its place in the file as soon as it is made, so that
memory holds one layer whatever the size of a file. A file is: 8 bytes with the length of the
header, the header (JSON: name -> dtype, shape, place), the tensors without gaps; those of the
widest dtype come first, so that every tensor stands at a multiple of its element size.

The folder is made beside its target under a temporary name. Every tensor is read back with
safetensors' own reader and compared with its source; then the folder gets its name, and one that
had it goes. Cost: two passes over the source, one over the result.
"""

import errno
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hestia_tune.export.source import SafetensorsFolder

DESCRIPTION_FILE = "hestia.json"
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "*.tiktoken",
)
_COMPANIONS = (
    *_TOKENIZERS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "generation_config.json",
    "chat_template.*",
    "additional_chat_templates",
    "configuration_*.py",
    "modeling_*.py",
    "tokenization_*.py",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
_DTYPES = {torch.bfloat16: "BF16", torch.int32: "I32", torch.int64: "I64"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of the source and what is written for it.

    Attributes:
        source: its name.
        quantized: whether it is ternary.
        num_weights: its number of elements.
        parts: name in the written folder -> dtype and shape.
        encode: makes the parts.
        holds: whether parts that were read back are the source, exactly.
    """

    source: str
    quantized: bool
    num_weights: int
    parts: Mapping[str, tuple[torch.dtype, torch.Size]]
    encode: Callable[[], Mapping[str, torch.Tensor]]
    holds: Callable[[Mapping[str, torch.Tensor]], bool]

    @property
    def num_bytes(self) -> int:
        return sum(shape.numel() * dtype.itemsize for dtype, shape in self.parts.values())


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a folder that can be converted.

    Raises:
        FileNotFoundError: without config.json or a tokenizer.
        ValueError: if the weights are quantized already.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; pass a Hugging Face folder")
    if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZERS):
        raise FileNotFoundError(
            f"no tokenizer in {folder} ({', '.join(_TOKENIZERS)}); copy the model's into it"
        )
    config = json.loads(file.read_text(encoding="utf-8"))
    if method := (config.get("quantization_config") or {}).get("quant_method"):
        raise ValueError(f"export wants dense weights; {folder} is quantized already ({method})")
    return config


def read_description(folder: Path) -> dict[str, Any] | None:
    """How the weights of a hard model were made; None if its folder does not say."""
    file = folder / DESCRIPTION_FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def check_target(folder: Path, target: Path, overwrite: bool) -> None:
    """Raises FileExistsError if ``target`` must not be written or replaced."""
    source, resolved = folder.resolve(), target.resolve()
    if resolved == source or resolved in source.parents:
        raise FileExistsError(f"{target} holds the source {folder}; choose another name")
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise FileExistsError(f"{target} exists; choose another name or overwrite=True")
    if not (target / "config.json").is_file() or target.is_symlink():
        raise FileExistsError(f"{target} is no model folder and is not replaced; choose another")


def require_space(target: Path, needed: int) -> None:
    """Makes the parent of ``target``; OSError if its disk has fewer bytes than ``needed``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"the export needs {needed:,} bytes, {target.parent} has {free:,} free; make room",
        )


def write_folder(
    folder: Path,
    target: Path,
    entries: list[Entry],
    *,
    config: Mapping[str, Any],
    description: Mapping[str, Any] | None = None,
    shard_bytes: int = 5_000_000_000,
) -> dict[str, Any]:
    """Writes ``entries`` with the companions of ``folder`` (tokenizer, generation settings).

    Args:
        folder, target: the source; the folder to write, which is replaced if it exists.
        entries: the tensors.
        config: becomes config.json.
        description: becomes hestia.json; None writes none.
        shard_bytes: a file is begun anew before its tensors would exceed this.

    Returns:
        bytes: of all safetensors files, their headers included.
        parameters, quantized_parameters: number of weights, and of those that are ternary.
        quantized_bits_per_weight: of the ternary weights, their scales included; None without any.
        whole_bits_per_weight: 8 * bytes / parameters; divide 16 by it for the ratio to bfloat16.
        types: safetensors dtype -> number of tensors.

    Raises:
        OSError: if the disk is full.
        RuntimeError: if what was read back is not the source. Nothing is left in either case.
    """
    require_space(target, sum(entry.num_bytes for entry in entries))
    # A name of its own: nothing that is there already may be mistaken for a leftover.
    scratch = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".tmp", dir=target.parent))
    staging = scratch / "new"
    try:
        staging.mkdir()
        copy_side_files(folder, staging)
        _write_json(staging / "config.json", config)
        if description is not None:
            _write_json(staging / DESCRIPTION_FILE, description)
        shards = _shards(entries, shard_bytes)
        with tqdm(total=len(entries), desc=f"writing {target.name}", unit="tensor") as progress:
            for file, members in shards.items():
                _write_shard(staging / file, members, progress)
        if len(shards) > 1:
            _write_index(staging, shards)
        _verify(staging, entries)
        summary = _summarize(staging, shards)
        replace_folder(staging, target, scratch / "old")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return summary


def copy_side_files(folder: Path, staging: Path) -> None:
    """Copies tokenizer, generation config, chat template and licences."""
    for pattern in _COMPANIONS:
        for path in folder.glob(pattern):
            if path.is_dir():
                shutil.copytree(path, staging / path.name)
            else:
                shutil.copyfile(path, staging / path.name)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(content), indent=2) + "\n", encoding="utf-8")


def _shards(entries: list[Entry], shard_bytes: int) -> dict[str, list[Entry]]:
    """File name -> what is in it; all parts of one entry are in one file."""
    groups: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if groups[-1] and size + entry.num_bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.num_bytes
    if len(groups) == 1:
        return {"model.safetensors": entries}
    count = len(groups)
    return {f"model-{i:05}-of-{count:05}.safetensors": g for i, g in enumerate(groups, 1)}


def _write_shard(path: Path, entries: list[Entry], progress: tqdm) -> None:
    parts = [(name, *part) for entry in entries for name, part in entry.parts.items()]
    parts.sort(key=lambda part: -part[1].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in parts:
        start, end = end, end + shape.numel() * dtype.itemsize
        header[name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        data = file.tell()
        for entry in entries:
            for name, tensor in entry.encode().items():
                if (tensor.dtype, tensor.shape) != entry.parts[name]:
                    raise RuntimeError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}")
                file.seek(data + header[name]["data_offsets"][0])
                file.write(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()))
            progress.update()


def _write_index(staging: Path, shards: Mapping[str, list[Entry]]) -> None:
    names = {part: file for file, members in shards.items() for e in members for part in e.parts}
    total = sum(entry.num_bytes for members in shards.values() for entry in members)
    index = {"metadata": {"total_size": total}, "weight_map": names}
    _write_json(staging / "model.safetensors.index.json", index)


def _verify(staging: Path, entries: list[Entry]) -> None:
    """Compares every tensor of the files with its source."""
    written = SafetensorsFolder(staging)
    if {*written.shapes} != {part for entry in entries for part in entry.parts}:
        raise RuntimeError(f"{staging} read back has other tensors than were written")
    for entry in tqdm(entries, desc="reading it back", unit="tensor"):
        parts = {name: written.read(name) for name in entry.parts}
        same = all((p.dtype, p.shape) == entry.parts[name] for name, p in parts.items())
        if not same or not entry.holds(parts):
            raise RuntimeError(
                f"{entry.source} read back from {staging} differs from its source; this is a "
                "defect of the export or of the disk"
            )


def _summarize(staging: Path, shards: Mapping[str, list[Entry]]) -> dict[str, Any]:
    entries = [entry for members in shards.values() for entry in members]
    packed = [entry for entry in entries if entry.quantized]
    total = sum(entry.num_weights for entry in entries)
    quantized = sum(entry.num_weights for entry in packed)
    size = sum((staging / file).stat().st_size for file in shards)
    types = Counter(_DTYPES[dtype] for entry in entries for dtype, _ in entry.parts.values())
    return {
        "bytes": size,
        "parameters": total,
        "quantized_parameters": quantized,
        "quantized_bits_per_weight": (
            8 * sum(entry.num_bytes for entry in packed) / quantized if quantized else None
        ),
        "whole_bits_per_weight": 8 * size / total,
        "types": dict(types),
    }


def replace_folder(staging: Path, target: Path, old: Path) -> None:
    """Renames; a folder of that name is set aside first and comes back if that fails."""
    try:
        if target.exists():
            os.rename(target, old)
        os.rename(staging, target)
    finally:
        if old.exists() and not target.exists():
            os.rename(old, target)
