"""Reading a Hugging Face folder one tensor at a time, and what its tensors hold, exactly."""

import importlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import safe_open

from hestia_tune.methods.granularity import GroupSize, check_divides, validate_group_size
from hestia_tune.tensors import TernaryTensor

DESCRIPTION_FILE = "hestia.json"
_TOKENIZER_FILES = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.*")


def import_optional(package: str) -> ModuleType:
    """An optional package, or ImportError that says how to get it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        extra = package.replace("_", "-")
        raise ImportError(
            f"this export needs the package {extra}: pip install 'hestia-tune[{extra}]' ({error})"
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
            raise FileNotFoundError(
                f"{folder} has no model.safetensors; pass a Hugging Face folder"
            )

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
                f"a hard model is exact in bfloat16; {name} ({tensor.dtype}) is not; save the "
                "model in bfloat16 and evaluate that one, or pass quantize=True for a model that "
                "is not hard yet"
            )
        return tensor.to(torch.bfloat16)

    def pack(self, name: str, weight: torch.Tensor) -> TernaryTensor:
        """Codes and scales of a weight of ``quantized``; ValueError if it is not hard."""
        try:
            return TernaryTensor.from_hard(weight, group_size=self.quantized[name])
        except ValueError as error:
            raise ValueError(f"{name} is not a hard weight: {error}") from None

    def summary(
        self, *, num_bytes: int, quantized_bytes: int, types: Iterable[str]
    ) -> dict[str, Any]:
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
