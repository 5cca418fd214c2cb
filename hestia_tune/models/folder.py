"""Hugging Face folders as they are read: weights mapped from files, and a model to export.

Every quantized weight of a hard model is a scale times a code, both such that bfloat16 holds the
product exactly. Either the folder holds a hard model already, and it is checked that it is one and
that bfloat16 loses nothing; or (``quantize=True``) its linears are made hard while they are read,
by the training's own rule: the naive model, the baseline that training has to beat.
"""

import dataclasses
import importlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hestia_tune.errors import InputError
from hestia_tune.files import inside, read_json, read_state
from hestia_tune.methods import GroupMethod
from hestia_tune.methods.granularity import GroupSize, check_divides, validate_group_size
from hestia_tune.methods.ternary import TernaryMethod
from hestia_tune.tensors import read_hard
from hestia_tune.tensors.group_tensor import GroupTensor

DESCRIPTION_FILE = "hestia.json"
INDEX_FILE = "model.safetensors.index.json"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_TOKENIZER_FILES = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.*")
# Tokenizer, chat template, generation settings, licences.
_SETTINGS = ("*token*.json", "merges.txt", "*chat_template*", "generation_config.json")
_SIDE_FILES = (*_SETTINGS, *_TOKENIZER_FILES[1:], "LICENSE*", "NOTICE*", "USE_POLICY*")


def import_optional(package: str, extra: str | None = None) -> Any:
    """An optional package, or ImportError that names the extra that brings it (None: its own)."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        extra = extra or package.replace("_", "-")
        raise InputError(f"this needs pip install 'hestia-tune[{extra}]' ({error})") from error


def hub_name(path: str | Path) -> str:
    """``owner/name`` of a folder in the hub's cache, or of what is no folder but a name on the
    hub; else the folder's own name."""
    if found := re.search(r"models--([^/]+)--([^/]+)/snapshots", str(Path(path).absolute())):
        return "/".join(found.groups())
    return Path(path).resolve().name if str(path) and Path(path).is_dir() else str(path)


class SafetensorsFolder:
    """The tensors of a Hugging Face folder, mapped from its files, which takes no memory.

    Attributes:
        shapes: of every weight, by name, in the order of the files; rotary buffers of old
            checkpoints, which loading computes, are left out.

    Raises:
        InputError: if the folder has no safetensors file, or lacks one of its index.
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
            raise InputError(f"{folder} has no model.safetensors; copy the model's")

    def read(self, name: str) -> torch.Tensor:
        """One tensor; ValueError unless it holds finite floating-point numbers."""
        tensor = self._tensors[name]
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise InputError(
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
        InputError: without config.json, weights or a tokenizer; or if the weights are quantized
            already, or one of ``quantized`` is no matrix that its groups tile.
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
            raise InputError("quantize=True needs the names of weights in quantized; got none")
        self.config: dict[str, Any] = read_json(folder / "config.json")
        self.config.pop("dtype", None)
        self.config["torch_dtype"] = "bfloat16"  # what any transformers reads
        file = folder / DESCRIPTION_FILE
        self.description = read_json(file) if file.is_file() and not quantize else None
        if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES):
            raise InputError(f"{folder} has no tokenizer.json or the like; copy the model's")
        if method := (self.config.get("quantization_config") or {}).get("quant_method"):
            raise InputError(f"export wants dense weights; {folder} is quantized ({method})")
        super().__init__(folder)
        for name, group_size in quantized.items():
            validate_group_size(group_size)
            if len(self.shapes.get(name, ())) != 2:
                raise InputError(f"only matrices can be quantized; {name} is none of {folder}")
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
            raise InputError(
                f"a hard model is exact in bfloat16; {name} ({tensor.dtype}) is not; round the "
                "model, or pass quantize=True for one that is not hard yet"
            )
        return tensor.to(torch.bfloat16)

    def pack(self, name: str, weight: torch.Tensor) -> GroupTensor:
        """Codes and scales of a weight of ``quantized``; ValueError if it is not hard."""
        return read_hard(weight, self.quantized[name], self.method.levels, name)


def is_exact(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether ``dtype`` holds every value; what it rounds does not come back as it was."""
    return torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


def side_files(folder: Path) -> list[Path]:
    """Tokenizer, generation config, chat template and licences of a model folder.

    Raises:
        InputError: if one of them is a link out of the folder, other than to the hub's cache.
    """
    allowed = folder.resolve(), folder.resolve().parents[1] / "blobs"
    found = [path for pattern in _SIDE_FILES for path in folder.glob(pattern)]
    for part in (part for path in found for part in (path, *path.rglob("*"))):
        if not any(part.resolve().is_relative_to(place) for place in allowed):
            raise InputError(
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
