"""Hugging Face folders: the model that is exported, and the ones that are written from it.

Everything loads the dense one in bfloat16. Every ternary weight is gamma * {-1, 0, 1} with a
bfloat16 gamma, so bfloat16 holds it exactly; it takes 16 bits per weight all the same. Either the
source is a hard model already, and it is checked that it is one and that bfloat16 loses nothing; or
(``quantize=True``) its linears are made hard on the way by the training's own rule: naive
ternarization, the baseline that training has to beat, and the input of the other exports.

Folders of any layout are written by huggingface_hub, shards and index, under a temporary name;
every tensor is read back and compared; then the folder gets its name, and one that had it goes.
Cost: memory for the tensors that change. Those of a hard model in bfloat16 stay mapped from its
files; a model that is quantized on the way, or stored in another dtype, is held whole in bfloat16.
"""

import importlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from tqdm import tqdm

from hestia_tune.files import staged
from hestia_tune.functional import hard_ternary
from hestia_tune.methods.granularity import GroupSize, check_divides, validate_group_size
from hestia_tune.tensors import TernaryTensor

DESCRIPTION_FILE = "hestia.json"
_TOKENIZER_FILES = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.*")
# Tokenizer, chat template, generation settings, code of the model, licences.
_SIDE_FILES = (
    "*token*.json",
    "*.model",
    "*.tiktoken",
    "vocab.*",
    "merges.txt",
    "*chat_template*",
    "generation_config.json",
    "*.py",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
_TYPES = {torch.bfloat16: "BF16", torch.int32: "I32", torch.int64: "I64"}


def import_optional(package: str) -> Any:
    """An optional package, or ImportError that says how to get it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        extra = package.replace("_", "-")
        raise ImportError(
            f"this export needs pip install 'hestia-tune[{extra}]' ({error})"
        ) from error


class SafetensorsFolder:
    """The tensors of a Hugging Face folder, read one at a time.

    The file is opened anew for each and mapped into memory, so a tensor that nobody holds takes
    none, and one that is not changed takes none that the system could not use for other things.

    Attributes:
        shapes: of every weight, by name, in the order of the files; rotary buffers of old
            checkpoints, which loading computes, are left out.

    Raises:
        FileNotFoundError: if the folder has no safetensors file, or lacks one of its index.
    """

    def __init__(self, folder: Path):
        index = folder / "model.safetensors.index.json"
        files = folder.glob("*.safetensors")
        if index.is_file():
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {folder / Path(name).name for name in weight_map.values()}
        self.shapes: dict[str, torch.Size] = {}
        self._files: dict[str, Path] = {}
        for file in sorted(files):
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 (not a mapping)
                    if "rotary_emb." not in name:
                        self.shapes[name] = torch.Size(reader.get_slice(name).get_shape())
                        self._files[name] = file
        if not self.shapes:
            raise FileNotFoundError(f"{folder} has no model.safetensors; copy the model's")

    def read(self, name: str) -> torch.Tensor:
        """One tensor; ValueError unless it holds finite floating-point numbers."""
        with safe_open(self._files[name], framework="pt") as reader:
            tensor = reader.get_tensor(name)
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ValueError(
                f"weights must be floating point and finite; {name} ({tensor.dtype}) in "
                f"{self._files[name]} is not; repair the folder"
            )
        return tensor


class ModelFolder(SafetensorsFolder):
    """A Hugging Face folder that can be exported.

    Attributes:
        folder: with config.json, safetensors and a tokenizer.
        quantized: name in the safetensors -> group_size of every ternary weight.
        config: the parsed config.json.
        description: the parsed hestia.json, how a hard model was made; None without one.

    Raises:
        FileNotFoundError: without config.json, weights or a tokenizer.
        ValueError: if the weights are quantized already, or one of ``quantized`` is no matrix that
            its groups tile.
    """

    def __init__(self, folder: Path, quantized: Mapping[str, GroupSize]):
        self.folder, self.quantized = folder, quantized
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        file = folder / DESCRIPTION_FILE
        self.description = json.loads(file.read_text("utf-8")) if file.is_file() else None
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

    def read_hard(self, name: str) -> torch.Tensor:
        """One tensor of a hard model in bfloat16; ValueError if that would round a value."""
        tensor = self.read(name)
        if not is_exact(tensor, torch.bfloat16):
            raise ValueError(
                f"a hard model is exact in bfloat16; {name} ({tensor.dtype}) is not; round the "
                "model, or pass quantize=True for one that is not hard yet"
            )
        return tensor.to(torch.bfloat16)

    def pack(self, name: str, weight: torch.Tensor) -> TernaryTensor:
        """Codes and scales of a weight of ``quantized``; ValueError if it is not hard."""
        try:
            return TernaryTensor.from_hard(weight, group_size=self.quantized[name])
        except ValueError as error:
            raise ValueError(f"{name} is not a hard weight: {error}") from None

    def sizes(self, num_bytes: int, quantized_bytes: int, types: Iterable[str]) -> dict[str, Any]:
        """Sizes of what was written from this.

        Args:
            num_bytes: of all files with weights, their headers included.
            quantized_bytes: of the codes and scales of ternary weights.
            types: of each tensor in the files.

        Returns:
            bytes, parameters, quantized_parameters (those that are ternary), types (name -> number
            of tensors), quantized_bits_per_weight (of the ternary weights; None without any), and
            whole_bits_per_weight = 8 * bytes / parameters, which is 16 in bfloat16.
        """
        parameters = sum(shape.numel() for shape in self.shapes.values())
        ternary = sum(self.shapes[name].numel() for name in self.quantized)
        return {
            "bytes": num_bytes,
            "parameters": parameters,
            "quantized_parameters": ternary,
            "quantized_bits_per_weight": 8 * quantized_bytes / ternary if ternary else None,
            "whole_bits_per_weight": 8 * num_bytes / parameters,
            "types": dict(Counter(types)),
        }


def is_exact(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether ``dtype`` holds every value; what it rounds does not come back as it was."""
    return torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


def write_huggingface(
    folder: str | Path,
    target: str | Path,
    *,
    quantized: Mapping[str, GroupSize],
    quantize: bool = False,
    compute_dtype: torch.dtype = torch.bfloat16,
    overwrite: bool = False,
    description: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes a Hugging Face model of any architecture as dense bfloat16 safetensors.

    Args:
        folder: Hugging Face folder: config.json, safetensors of any floating dtype, tokenizer.
        target: the folder to write; its parents are made.
        quantized: name in the safetensors -> group_size ("channel" and "tensor" included) of every
            ternary weight.
        quantize: False: ``folder`` is a hard model, and what is written equals it, whatever its
            dtype. True: it is a pretrained or latent model; the weights in ``quantized`` are made
            hard from their value in ``compute_dtype``, as the training's forward pass does, and
            the others are rounded to bfloat16.
        compute_dtype: floating point; read only with ``quantize``.
        overwrite: replace a model folder that is there, once the new one is complete.
        description: content of ``hestia.json``: how the weights were made. None copies that of
            a hard model, if it has one.

    Returns:
        Sizes, as `ModelFolder.sizes` lists them.

    Raises:
        FileExistsError, FileNotFoundError, ValueError: if the target exists; see `ModelFolder`.
        ValueError: without ``quantize``, on a weight that is not ternary or that bfloat16 would
            round.
        OSError: if the disk is full.
        RuntimeError: if the files read back are not the model. In all cases nothing is left behind,
            and a folder that was to be replaced is still there.
    """
    if quantize and not quantized:
        raise ValueError("quantize=True needs the names of weights in quantized; got none")
    source = ModelFolder(Path(folder), quantized)

    def stored(name: str) -> dict[str, torch.Tensor]:
        if not quantize:
            tensor = source.read_hard(name)
            if name in quantized:
                source.pack(name, tensor)  # refuses what is not ternary
            return {name: tensor}
        tensor = source.read(name)
        if name in quantized:
            tensor = hard_ternary(tensor.to(compute_dtype), group_size=quantized[name])
        return {name: tensor.to(torch.bfloat16)}

    if description is None and not quantize:
        description = source.description
    return write_folder(source, Path(target), stored, source.config, description, overwrite)


def write_folder(
    source: ModelFolder,
    target: Path,
    stored: Callable[[str], dict[str, torch.Tensor]],
    config: Mapping[str, Any],
    description: Mapping[str, Any] | None,
    overwrite: bool,
) -> dict[str, Any]:
    """Writes a Hugging Face folder of any layout, with the side files of ``source``.

    As `write_huggingface` with the same arguments, but for

    Args:
        stored: name of a weight -> what the files hold for it, by name.
        config: becomes config.json, of a model in bfloat16 for any transformers.
        description: None writes none.
    """
    is_model = (target / "config.json").is_file() and not target.is_symlink()
    holds_source = source.folder.resolve().is_relative_to(target.resolve())
    if os.path.lexists(target) and not (overwrite and is_model and not holds_source):
        raise FileExistsError(
            f"{target} exists; choose another name (overwrite=True replaces other models only)"
        )
    state, quantized_bytes = {}, 0
    for name in tqdm(source.shapes, desc=f"reading {source.folder.name}", unit="tensor"):
        parts = stored(name)
        state |= parts
        if name in source.quantized:
            quantized_bytes += sum(part.nbytes for part in parts.values())
    config = {key: value for key, value in config.items() if key != "dtype"}
    texts = {"config.json": config | {"torch_dtype": "bfloat16"}, DESCRIPTION_FILE: description}
    with staged(target) as staging:
        staging.mkdir()
        copy_side_files(source.folder, staging)
        for name, content in texts.items():
            if content is not None:
                (staging / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        try:
            save_torch_state_dict(state, staging)
        except SafetensorError as error:  # its word for a write that failed
            raise OSError(f"{staging} could not be written: {error}") from error
        files, written = [*staging.glob("*.safetensors")], {}
        for file in files:
            file.chmod((staging / "config.json").stat().st_mode)  # was its owner's alone
            written |= load_file(file)
        for name, expected in tqdm(state.items(), desc="reading it back", unit="tensor"):
            found = written.get(name)
            if found is None or found.dtype != expected.dtype or not torch.equal(found, expected):
                raise RuntimeError(
                    f"{name} read back from {staging} differs from its source; check the disk"
                )
        return source.sizes(
            num_bytes=sum(file.stat().st_size for file in files),
            quantized_bytes=quantized_bytes,
            types=[_TYPES[tensor.dtype] for tensor in state.values()],
        )


def copy_side_files(folder: Path, target: Path) -> None:
    """Copies tokenizer, generation config, chat template and licences of a model folder."""
    for path in (path for pattern in _SIDE_FILES for path in folder.glob(pattern)):
        if path.is_dir():
            shutil.copytree(path, target / path.name)
        else:
            shutil.copyfile(path, target / path.name)
