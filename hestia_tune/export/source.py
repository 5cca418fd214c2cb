"""Reading a Hugging Face folder one tensor at a time, and what its tensors hold, exactly."""

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import safe_open

from hestia_tune.config import nearest
from hestia_tune.methods.granularity import GroupSize, check_divides, validate_group_size
from hestia_tune.tensors import TernaryTensor

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "*.tiktoken",
)


def import_optional(module: str, extra: str) -> ModuleType:
    """A module of an optional package, or ImportError that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"this export needs the package {module.partition('.')[0]}: "
            f"pip install 'hestia-tune[{extra}]' ({error})"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a folder that can be exported.

    Raises:
        FileNotFoundError: without config.json or a tokenizer.
        ValueError: if the weights are quantized already.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; pass a Hugging Face folder")
    if not any(next(folder.glob(pattern), None) for pattern in TOKENIZER_FILES):
        raise FileNotFoundError(
            f"no tokenizer in {folder} ({', '.join(TOKENIZER_FILES)}); copy the model's into it"
        )
    config = json.loads(file.read_text(encoding="utf-8"))
    if method := (config.get("quantization_config") or {}).get("quant_method"):
        raise ValueError(f"export wants dense weights; {folder} is quantized already ({method})")
    return config


def row_chunks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Slices of a tensor along its first axis, small enough to convert at once."""
    return tensor.split(max(1, 2**22 // max(1, tensor[0].numel())))


def same_values(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors of one shape hold the same numbers, each in a dtype of its own."""
    pairs = zip(row_chunks(found), row_chunks(expected), strict=True)
    return all(torch.equal(a.double(), b.double()) for a, b in pairs)


class SafetensorsFolder:
    """The tensors of a Hugging Face folder, read one at a time.

    The file is opened anew for each and mapped into memory, so a tensor that nobody holds takes
    none, and one that is not changed takes none that the system could not use for other things.

    Attributes:
        shapes: of every tensor, by name, in the order of the files.

    Raises:
        FileNotFoundError: if the folder has no safetensors file, or lacks one of its index.
    """

    def __init__(self, folder: Path):
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = [folder / name for name in sorted(set(weight_map.values()))]
        else:
            files = sorted(folder.glob("*.safetensors"))
        missing = [file for file in files if not file.is_file()]
        if missing or not files:
            what = missing[0] if missing else folder / "model.safetensors"
            raise FileNotFoundError(f"the weights {what} do not exist; pass a Hugging Face folder")
        self.shapes: dict[str, torch.Size] = {}
        self._files: dict[str, Path] = {}
        for file in files:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 (not a mapping)
                    self.shapes[name] = torch.Size(reader.get_slice(name).get_shape())
                    self._files[name] = file

    def check_quantized(self, quantized: Mapping[str, GroupSize]) -> None:
        """ValueError if one of ``quantized`` is not here, or has a shape that takes no groups."""
        for name, group_size in quantized.items():
            validate_group_size(group_size)
            if name not in self.shapes:
                hint = nearest(name, self.shapes)
                raise ValueError(f"quantized names {name}, which the safetensors do not hold{hint}")
            shape = self.shapes[name]
            if len(shape) != 2:
                raise ValueError(
                    f"only matrices can be quantized; {name} has the shape {tuple(shape)}; leave "
                    "it out of quantized"
                )
            check_divides(group_size, shape[1], name)

    def read(self, name: str) -> torch.Tensor:
        """One tensor; ValueError if it holds a NaN or an infinity."""
        with safe_open(self._files[name], framework="pt") as reader:
            tensor = reader.get_tensor(name)
        if not all(part.isfinite().all() for part in row_chunks(tensor)):
            raise ValueError(f"weights must be finite; {name} in {self._files[name]} is not")
        return tensor


def split_hard(
    weight: torch.Tensor, group_size: GroupSize, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a hard weight, exactly: weight == codes * scale.

    Args:
        weight: (out_features, in_features), floating point, every group scale * {-1, 0, 1}.
        group_size: a positive int, "channel" or "tensor".
        name: the layer in error messages.

    Returns:
        codes: int8, (out_features, in_features).
        scales: bfloat16, (out_features, in_features / group_size), (out_features, 1) for
            "channel", (1, 1) for "tensor"; 0 for a group of zeros.

    Raises:
        ValueError: if a group is not so; names the layer and the first such group.
    """
    try:
        packed = TernaryTensor.from_hard(weight, group_size=group_size)
    except ValueError as error:
        raise ValueError(f"{name} is not a hard weight: {error}") from None
    return packed.codes(), packed.scale


def summary(
    *,
    num_bytes: int,
    parameters: int,
    quantized_parameters: int,
    quantized_bytes: int,
    types: Mapping[str, int],
) -> dict[str, Any]:
    """Sizes of what was written.

    Returns:
        bytes: of all files with weights, their headers included.
        parameters, quantized_parameters: number of weights, and of those that are ternary.
        quantized_bits_per_weight: of the ternary weights, their scales included; None without any.
        whole_bits_per_weight: 8 * bytes / parameters; divide 16 by it for the ratio to bfloat16.
        types: name of a type in the file -> number of tensors.
    """
    bits = 8 * quantized_bytes / quantized_parameters if quantized_parameters else None
    return {
        "bytes": num_bytes,
        "parameters": parameters,
        "quantized_parameters": quantized_parameters,
        "quantized_bits_per_weight": bits,
        "whole_bits_per_weight": 8 * num_bytes / parameters,
        "types": dict(types),
    }
