"""Reading a Hugging Face folder one tensor at a time."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

CHUNK = 2**22  # weights looked at or converted at a time


def row_chunks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Slices of a tensor along its first axis, small enough to convert at once."""
    return tensor.split(max(1, CHUNK // max(1, tensor[0].numel())))


class SafetensorsFolder:
    """The tensors of a Hugging Face folder, read one at a time.

    The file is opened anew for each, so that the pages of those already read do not count as
    memory of this process.

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

    def read(self, name: str) -> torch.Tensor:
        """One tensor; ValueError if it holds a NaN or an infinity."""
        with safe_open(self._files[name], framework="pt") as reader:
            tensor = reader.get_tensor(name)
        if not all(part.isfinite().all() for part in row_chunks(tensor)):
            raise ValueError(f"weights must be finite; {name} in {self._files[name]} is not")
        return tensor
