"""Hugging Face folders: the model that is exported, and the ones that are written from it.

Everything loads the dense one in bfloat16. Every quantized weight is a scale times a code, both
such that bfloat16 holds the product exactly; it takes 16 bits per weight all the same. Either the
source is a hard model already, and it is checked that it is one and that bfloat16 loses nothing; or
(``quantize=True``) its linears are made hard as they are read by the training's own rule: the naive
model, the baseline that training has to beat.

Folders of any layout are written under a temporary name; every tensor is read back and compared;
then the folder gets its name, and one that had it goes. Cost: memory for the tensors that change.
Those of a hard model in bfloat16 stay mapped from its files; a model that is quantized on the way,
or stored in another dtype, is held whole in bfloat16.
"""

import dataclasses
import importlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError

from hestia_tune.config import one_line
from hestia_tune.distributed import progress_bar
from hestia_tune.files import inside, read_json, read_state, staged
from hestia_tune.methods import GroupMethod
from hestia_tune.methods.granularity import GroupSize, check_divides, validate_group_size
from hestia_tune.methods.ternary import TernaryMethod
from hestia_tune.tensors import read_hard
from hestia_tune.tensors.group_tensor import GroupTensor
from hestia_tune.tensors.packed_tensor import as_dense

DESCRIPTION_FILE = "hestia.json"
INDEX_FILE = "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.*")
# Tokenizer, chat template, generation settings, licences.
_SETTINGS = ("*token*.json", "merges.txt", "*chat_template*", "generation_config.json")
_SIDE_FILES = (*_SETTINGS, *_TOKENIZER_FILES[1:], "LICENSE*", "NOTICE*", "USE_POLICY*")
_TYPES = {torch.bfloat16: "BF16", torch.int32: "I32", torch.int64: "I64"}


def import_optional(package: str, extra: str | None = None) -> Any:
    """An optional package, or ImportError that names the extra that brings it (None: its own)."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        extra = extra or package.replace("_", "-")
        raise ImportError(f"this needs pip install 'hestia-tune[{extra}]' ({error})") from error


class SafetensorsFolder:
    """The tensors of a Hugging Face folder, mapped from its files, which takes no memory.

    Attributes:
        shapes: of every weight, by name, in the order of the files; rotary buffers of old
            checkpoints, which loading computes, are left out.

    Raises:
        FileNotFoundError: if the folder has no safetensors file, or lacks one of its index.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        files = folder.glob("*.safetensors")
        if (index := folder / INDEX_FILE).is_file():
            files = {inside(folder, name) for name in read_json(index)["weight_map"].values()}
        self._tensors: dict[str, torch.Tensor] = {}
        for file in sorted(files):
            self._tensors |= sorted(read_state(file).items())
        self.shapes = {n: t.shape for n, t in self._tensors.items() if "rotary_emb." not in n}
        if not self.shapes:
            raise FileNotFoundError(f"{folder} has no model.safetensors; copy the model's")

    def read(self, name: str) -> torch.Tensor:
        """One tensor; ValueError unless it holds finite floating-point numbers."""
        tensor = self._tensors[name]
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ValueError(
                f"weights must be floating point and finite; {name} ({tensor.dtype}) in "
                f"{self.folder} is not; repair the folder"
            )
        return tensor


class ModelFolder(SafetensorsFolder):
    """A Hugging Face folder that can be exported.

    Args:
        folder: with config.json, safetensors of any floating dtype and a tokenizer.
        quantized: name in the safetensors -> group_size of every quantized weight.
        quantize: False: a hard model. True: a pretrained or latent model, whose weights in
            ``quantized`` are made hard as they are read, and the others rounded to bfloat16.
        method: what they are quantized by, with the group size of ``quantized``.

    Attributes:
        config: the parsed config.json, of a model in bfloat16.
        description: the parsed hestia.json, how a hard model was made; None without one.

    Raises:
        FileNotFoundError: without config.json, weights or a tokenizer.
        ValueError: if the weights are quantized already, or one of ``quantized`` is no matrix that
            its groups tile.
    """

    def __init__(
        self,
        folder: Path,
        quantized: Mapping[str, GroupSize],
        *,
        quantize: bool = False,
        method: GroupMethod | None = None,
    ):
        self.quantized, self.quantize = quantized, quantize
        self.method = method or TernaryMethod()
        if quantize and not quantized:
            raise ValueError("quantize=True needs the names of weights in quantized; got none")
        self.config: dict[str, Any] = read_json(folder / "config.json")
        self.config.pop("dtype", None)
        self.config["torch_dtype"] = "bfloat16"  # what any transformers reads
        file = folder / DESCRIPTION_FILE
        self.description = read_json(file) if file.is_file() and not quantize else None
        if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES):
            raise FileNotFoundError(f"{folder} has no tokenizer.json or the like; copy the model's")
        if method := (self.config.get("quantization_config") or {}).get("quant_method"):
            raise ValueError(f"export wants dense weights; {folder} is quantized ({method})")
        super().__init__(folder)
        for name, group_size in quantized.items():
            validate_group_size(group_size)
            if len(self.shapes.get(name, ())) != 2:
                raise ValueError(f"only matrices can be quantized; {name} is none of {folder}")
            check_divides(group_size, self.shapes[name][1], name)

    def read(self, name: str) -> torch.Tensor:
        tensor = super().read(name)
        if self.quantize and name in self.quantized:
            latent = tensor.float()
            method = dataclasses.replace(self.method, group_size=self.quantized[name])
            tensor = method.hard(latent, method.initial_parameters(latent))
        return tensor.to(torch.bfloat16) if self.quantize else tensor

    def read_hard(self, name: str) -> torch.Tensor:
        """One tensor of a hard model in bfloat16; ValueError if that would round a value."""
        tensor = self.read(name)
        if not is_exact(tensor, torch.bfloat16):
            raise ValueError(
                f"a hard model is exact in bfloat16; {name} ({tensor.dtype}) is not; round the "
                "model, or pass quantize=True for one that is not hard yet"
            )
        return tensor.to(torch.bfloat16)

    def pack(self, name: str, weight: torch.Tensor) -> GroupTensor:
        """Codes and scales of a weight of ``quantized``; ValueError if it is not hard."""
        try:
            return read_hard(weight, self.quantized[name], self.method.levels)
        except ValueError as error:
            raise ValueError(f"{name} is not a hard weight: {error}") from None


def is_exact(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether ``dtype`` holds every value; what it rounds does not come back as it was."""
    return torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


def write_huggingface(
    source: ModelFolder,
    target: Path,
    *,
    overwrite: bool = False,
    description: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes a model of any architecture as dense bfloat16 safetensors, equal to the hard model.

    Args:
        target: the folder to write; its parents are made.
        overwrite: replace a model folder that is there, once the new one is complete.
        description: content of ``hestia.json``: how the weights were made. None copies the source's
            own, if it has one.

    Returns:
        What `sizes` lists, and types: name -> number of tensors in the files.

    Raises:
        FileExistsError: if the target exists.
        ValueError: on a weight that is not hard or that bfloat16 would round.
        OSError: if the disk is full.
        RuntimeError: if the files read back are not the model. In all cases nothing is left behind,
            and a folder that was to be replaced is still there.
    """

    def stored(name: str) -> dict[str, torch.Tensor]:
        tensor = source.read_hard(name)
        if name in source.quantized and source.method.packed_formats:
            source.pack(name, tensor)  # refuses what is not hard
        return {name: tensor}

    description = description or source.description
    return write_safetensors(source, target, stored, source.config, description, overwrite)


def write_safetensors(
    source: ModelFolder,
    target: Path,
    stored: Callable[[str], dict[str, torch.Tensor]],
    config: Mapping[str, Any],
    description: Mapping[str, Any] | None,
    overwrite: bool,
) -> dict[str, Any]:
    """As `write_huggingface`, in any layout: ``stored`` gives what the files hold for a weight, by
    name; ``config`` becomes config.json."""
    texts = {"config.json": config, DESCRIPTION_FILE: description}
    state, num_bytes = write_folder(
        source.folder,
        target,
        (entry for name in source.shapes for entry in stored(name).items()),
        {name: json.dumps(text, indent=2) + "\n" for name, text in texts.items() if text},
        overwrite=overwrite,
    )
    kept = source.shapes.keys() - source.quantized.keys()
    quantized_bytes = sum(tensor.nbytes for name, tensor in state.items() if name not in kept)
    types = Counter(_TYPES[tensor.dtype] for tensor in state.values())
    found = sizes(source.shapes, source.quantized, num_bytes, quantized_bytes)
    return found | {"types": dict(types)}


def sizes(
    shapes: Mapping[str, torch.Size],
    quantized: Collection[str],
    num_bytes: int,
    quantized_bytes: int,
) -> dict[str, Any]:
    """What the files of a model weigh.

    Args:
        num_bytes: of all files with weights, their headers included.
        quantized_bytes: of the codes and scales of those in ``quantized``.

    Returns:
        bytes, parameters, quantized_parameters, quantized_bits_per_weight (None without any), and
        whole_bits_per_weight = 8 * bytes / parameters, which is 16 in bfloat16.
    """
    parameters = sum(shape.numel() for shape in shapes.values())
    num_quantized = sum(shapes[name].numel() for name in quantized)
    return {
        "bytes": num_bytes,
        "parameters": parameters,
        "quantized_parameters": num_quantized,
        "quantized_bits_per_weight": 8 * quantized_bytes / num_quantized if quantized else None,
        "whole_bits_per_weight": 8 * num_bytes / parameters,
    }


def write_folder(
    source: Path,
    target: Path,
    entries: Iterable[tuple[str, torch.Tensor]],
    texts: Mapping[str, str],
    *,
    overwrite: bool,
    file: str | None = None,
) -> tuple[dict[str, torch.Tensor], int]:
    """Writes the folder of a model, dense or packed; returns its tensors and the bytes they take.

    Args:
        source: Hugging Face folder whose tokenizer and other side files are copied.
        target, overwrite: as `write_huggingface`'s; its errors.
        entries: name and tensor; made one at a time, once nothing is in the way of the target.
        texts: name -> content of the other files, config.json among them.
        file: name of the one file that torch.save writes; None writes safetensors.
    """
    check_target(source, target, overwrite)
    state = dict(progress_bar(entries, desc=f"reading {source.name}", unit="tensor"))
    with staged(target) as staging:
        staging.mkdir()
        copy_side_files(source, staging)
        for name, text in texts.items():
            (staging / name).write_text(text, encoding="utf-8")
        try:
            if file is None:
                save_torch_state_dict(state, staging)
            else:
                torch.save(state, staging / file)
        except (SafetensorError, RuntimeError) as error:  # their words for a write that failed
            raise OSError(f"{staging} could not be written: {one_line(error)}") from error
        num_bytes, written = 0, {}
        for path in staging.glob(file or "*.safetensors"):
            path.chmod((staging / "config.json").stat().st_mode)  # may be its owner's alone
            num_bytes += path.stat().st_size
            written |= read_state(path)
        for name, expected in progress_bar(state.items(), desc="reading it back", unit="tensor"):
            found = written.get(name, torch.empty(0))
            same = torch.equal(as_dense(found), as_dense(expected))
            if not same or found.dtype != expected.dtype:
                raise RuntimeError(f"{name} read back differs from its source; check the disk")
        return state, num_bytes


def check_target(source: Path, target: Path, overwrite: bool) -> None:
    """Raises FileExistsError if ``target`` exists, unless it may be overwritten and is a model's
    folder, which neither is nor holds ``source``."""
    is_model = (target / "config.json").is_file() and not target.is_symlink()
    holds_source = source.resolve().is_relative_to(target.resolve())
    if os.path.lexists(target) and not (overwrite and is_model and not holds_source):
        raise FileExistsError(
            f"{target} exists; choose another name (overwrite=True replaces other models only)"
        )


def side_files(folder: Path) -> list[Path]:
    """Tokenizer, generation config, chat template and licences of a model folder.

    Raises:
        ValueError: if one of them is a link out of the folder, other than to the hub's cache.
    """
    allowed = folder.resolve(), folder.resolve().parents[1] / "blobs"
    found = [path for pattern in _SIDE_FILES for path in folder.glob(pattern)]
    for part in (part for path in found for part in (path, *path.rglob("*"))):
        if not any(part.resolve().is_relative_to(place) for place in allowed):
            raise ValueError(
                f"{part} is a link to {part.resolve()}, outside of it; put the file itself there"
            )
    return found


def copy_side_files(folder: Path, target: Path) -> None:
    """Copies the `side_files` of a model folder; its errors."""
    for path in side_files(folder):
        if path.is_dir():
            shutil.copytree(path, target / path.name, ignore=shutil.ignore_patterns("*.py"))
        else:
            shutil.copyfile(path, target / path.name)
