"""Reads Hugging Face folders: weights mapped from their files, and models to export.

Every quantized weight of a hard model is a scale times a code. bfloat16 holds the scale and the
product exactly. A folder to export is one of two kinds. It may hold a hard model. Each weight that
is read is then checked: bfloat16 must lose nothing, and the weight must be hard. Or the folder
holds a pretrained model (``quantize=True``). Its linears are then made hard while they are read, by
the rule of the training. The result is the naive model, the baseline that training has to beat.
Linears that are hard already keep their weights.

Weights may be dense, or packed by compressed-tensors or MLX (`hestia_tune.models.packed_layouts`).
A packed weight is made dense when it is read.
"""

import importlib
import re
import shutil
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import huggingface_hub
import torch

from hestia_tune.errors import InputError, one_line
from hestia_tune.files import inside, read_json, read_state
from hestia_tune.methods import GroupMethod
from hestia_tune.methods.granularity import GroupSize, check_divides
from hestia_tune.methods.hard_weights import is_hard
from hestia_tune.methods.ternary import TernaryMethod
from hestia_tune.models.embedding import check_width, round_embedding
from hestia_tune.models.packed_layouts import PackedWeight, dense_config, find_packed
from hestia_tune.tensors import read_hard
from hestia_tune.tensors.group_tensor import GroupTensor

DESCRIPTION_FILE = "hestia.json"
INDEX_FILE = "model.safetensors.index.json"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_TOKENIZER_FILES = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.*")
# The files that are fetched from the hub: configuration, weights and tokenizer, but no code.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*"]
# Tokenizer, chat template, generation settings and licences.
_SETTINGS = ("*token*.json", "merges.txt", "*chat_template*", "generation_config.json")
_SIDE_FILES = (*_SETTINGS, *_TOKENIZER_FILES[1:], "LICENSE*", "NOTICE*", "USE_POLICY*")


def import_optional(package: str, extra: str | None = None) -> Any:
    """Import and return an optional package.

    Args:
        package: Name of the package.
        extra: Name of the extra that installs the package. None: the package's own name.

    Raises:
        InputError: If the package is missing. The message names the extra to install.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        extra = extra or package.replace("_", "-")
        raise InputError(f"this needs pip install 'hestia-tune[{extra}]' ({error})") from error


@cache
def local_folder(path: str) -> Path:
    """Return the folder of a model, fetched from the hub if necessary.

    Args:
        path: A folder, or the name of a repository on the hub.

    Raises:
        InputError: If there is neither, or if the repository cannot be fetched.
    """
    folder = Path(path)
    if folder.is_dir() or not HUB_NAME.fullmatch(path):
        if not (folder / "config.json").is_file():
            raise InputError(f"{folder} has no config.json; give the folder of a model")
        return folder
    try:
        return Path(huggingface_hub.snapshot_download(path, allow_patterns=_HUB_FILES))
    except Exception as error:  # the network, the hub or a file may fail in any way
        raise InputError(
            f"{path} is no folder here and could not be fetched from the hub: {one_line(error)}; "
            "check the name and the network"
        ) from error


def hub_name(path: str | Path) -> str:
    """Return the name of a model, as ``owner/name`` if the hub has it.

    Args:
        path: A folder of the hub's cache, another folder, or ``owner/name``.

    Returns:
        The repository's ``owner/name`` for a folder of the hub's cache; the last part of the path
        for another folder; anything else unchanged.
    """
    if match := re.search(r"models--([^/]+)--([^/]+)/snapshots", str(Path(path).absolute())):
        return "/".join(match.groups())
    return Path(path).resolve().name if str(path) and Path(path).is_dir() else str(path)


class SafetensorsFolder:
    """The tensors of a Hugging Face folder, mapped from its files, so that they take no memory.

    Args:
        folder: The folder.
        names: The safetensors files to read. None: the files of the index, or all files if the
            folder has no index.

    Attributes:
        tensors: Name -> every weight as the files hold it.
        shapes: Name -> shape of every weight. Rotary buffers of old checkpoints are left out,
            because the model computes them.

    Raises:
        InputError: If the folder has no safetensors file, or lacks a file of its index; or if its
            weights are in a layout that cannot be read.
    """

    def __init__(self, folder: Path, names: Iterable[str] | None = None):
        self.folder = folder
        files = folder.glob("*.safetensors")
        if names is None and (index := folder / INDEX_FILE).is_file():
            names = read_json(index)["weight_map"].values()
        if names is not None:
            files = {inside(folder, name) for name in names}
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(files):
            tensors |= sorted(read_state(file).items())
        file = folder / "config.json"
        config = read_json(file) if file.is_file() else {}
        self.tensors = find_packed(tensors, config)
        dense_config(config, folder)
        self.shapes = {n: t.shape for n, t in self.tensors.items() if "rotary_emb." not in n}
        if not self.shapes:
            raise InputError(f"{folder} has no model.safetensors; copy the model's")

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor, dense.

        Raises:
            InputError: If the tensor is not floating point, or has NaN or infinity.
        """
        tensor = self.tensors[name]
        tensor = tensor.dequantize() if isinstance(tensor, PackedWeight) else tensor
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise InputError(
                f"weights must be floating point and finite; {name} ({tensor.dtype}) in "
                f"{self.folder} is not; repair the folder"
            )
        return tensor


class ModelFolder(SafetensorsFolder):
    """Read a Hugging Face folder that can be exported.

    Args:
        folder: A folder with config.json, safetensors of any floating dtype and a tokenizer.
        quantized: Name in the safetensors -> method of every quantized weight. A group size stands
            for the ternary method with this group size.
        quantize: False: the folder holds a hard model. True: it holds a pretrained or latent model.
            Weights in ``quantized`` are then made hard as they are read, unless they are hard
            already. All weights are rounded to bfloat16.
        embedding: "int4", "int5" or "int8": the embedding, and an output head of its own, are
            rounded as they are read (`hestia_tune.models.embedding`). None: they are not.

    Attributes:
        quantized: Name -> method of every quantized weight.
        embeddings: The names of the weights that are rounded in this way.
        layers: Name of a quantized weight -> the name of its layer in the config's model, which
            options such as ``quantizer.exclude`` know. `checkpoints.open_source` fills it.
        config: The content of config.json, changed to say that the model is in bfloat16.
        description: The content of hestia.json, which says how a hard model was made. None if
            there is no hestia.json.

    Raises:
        InputError: If config.json, weights or a tokenizer are missing; if the weights are packed in
            a layout that cannot be read; or if a weight of ``quantized`` is not a matrix that its
            groups tile.
    """

    def __init__(
        self,
        folder: Path,
        quantized: Mapping[str, GroupMethod | GroupSize],
        *,
        quantize: bool = False,
        embedding: str | None = None,
    ):
        self.quantized = {
            name: each if isinstance(each, GroupMethod) else TernaryMethod(group_size=each)
            for name, each in quantized.items()
        }
        self.quantize, self.layers = quantize, dict[str, str]()
        if quantize and not quantized:
            raise InputError("quantize=True needs the names of weights in quantized; got none")
        self.config = dense_config(read_json(folder / "config.json"), folder)
        self.config.pop("dtype", None)
        self.config["torch_dtype"] = "bfloat16"  # a key that every version of transformers reads
        file = folder / DESCRIPTION_FILE
        self.description = read_json(file) if file.is_file() and not quantize else None
        if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES):
            raise InputError(f"{folder} has no tokenizer.json or the like; copy the model's")
        super().__init__(folder)
        for name, method in self.quantized.items():
            if len(self.shapes.get(name, ())) not in (2, 3):  # 3: a matrix for each expert
                raise InputError(f"only matrices can be quantized; {name} is none of {folder}")
            widths = [self.shapes[n][-1] for n in self.quantized if len(self.shapes.get(n, ())) > 1]
            check_divides(method.group_size, self.shapes[name][-1], name, widths=widths)
        self.embedding, self.embeddings = embedding, self._find_embeddings() if embedding else []

    def _find_embeddings(self) -> list[str]:
        """Return the names of the matrices with a row for each token, after a check."""
        rows = self.config.get("vocab_size")
        shapes = {n: s for n, s in self.shapes.items() if len(s) == 2 and s[0] == rows}
        names = [name for name in shapes if name not in self.quantized]
        if not names:
            raise InputError(
                f"bits.embedding rounds matrices of {rows} rows (vocab_size in config.json), and "
                f"{self.folder} has none; leave bits.embedding out"
            )
        for name in names:
            check_width(name, shapes[name][1])
        return names

    def read(self, name: str) -> torch.Tensor:
        tensor = super().read(name)
        if name in self.embeddings:
            tensor = round_embedding(tensor, str(self.embedding))
        if self.quantize and name in self.quantized:
            latent, method = tensor.float().flatten(0, -2), self.quantized[name]
            if not is_hard(latent, method.group_size, method.levels):
                hard = method.hard(latent, method.initial_parameters(latent))
                tensor = hard.view(tensor.shape)
        return tensor.to(torch.bfloat16) if self.quantize else tensor

    def read_hard(self, name: str) -> torch.Tensor:
        """Return one tensor of a hard model in bfloat16.

        Raises:
            InputError: If bfloat16 would round a value.
        """
        tensor = self.read(name)
        if not is_exact(tensor, torch.bfloat16):
            raise InputError(
                f"a hard model is exact in bfloat16; {name} ({tensor.dtype}) is not; round the "
                "model, or pass quantize=True for a model that is not hard yet"
            )
        return tensor.to(torch.bfloat16)

    def pack(self, name: str, weight: torch.Tensor) -> GroupTensor:
        """Return the codes and scales of a hard weight.

        Args:
            name: Name of a weight in ``quantized``.
            weight: The weight, (out_features, in_features). In the weights of experts, the rows of
                one expert are below the rows of another.

        Raises:
            InputError: If the weight is not hard.
        """
        method = self.quantized[name]
        return read_hard(weight.flatten(0, -2), method.group_size, method.levels, name)


def is_exact(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether ``dtype`` holds every value of a tensor without rounding."""
    return torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


def side_files(folder: Path) -> list[Path]:
    """Return the paths of tokenizer, generation config, chat template and licences of a model.

    Raises:
        InputError: If a path is a link out of the folder. Links to the hub's cache are allowed.
    """
    allowed = folder.resolve(), folder.resolve().parents[1] / "blobs"
    paths = [path for pattern in _SIDE_FILES for path in folder.glob(pattern)]
    for part in (part for path in paths for part in (path, *path.rglob("*"))):
        if not any(part.resolve().is_relative_to(place) for place in allowed):
            raise InputError(
                f"{part} is a link to {part.resolve()}, outside of the folder; replace the link by "
                "the file itself"
            )
    return paths


def copy_side_files(folder: Path, target: Path) -> None:
    """Copy the `side_files` of a model folder to another folder.

    Raises:
        InputError: If `side_files` raises it.
    """
    for path in side_files(folder):
        if path.is_dir():
            shutil.copytree(path, target / path.name, ignore=shutil.ignore_patterns("*.py"))
        else:
            shutil.copyfile(path, target / path.name)


def require_teacher(folder: str) -> None:
    """Raise InputError if the folder of ``distillation.teacher`` holds no model."""
    if not (Path(folder) / "config.json").is_file():
        raise InputError(
            f'distillation.teacher {folder} has no config.json; give "pretrained" or a Hugging '
            "Face folder"
        )
