"""The tensors of a GGUF file: types, bytes, and reading them back."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hestia_tune.export.gguf_blocks import (
    BLOCK_TYPES,
    block_scales,
    split_ternary,
    to_fp16_scales,
)
from hestia_tune.export.gguf_model import LlamaModel
from hestia_tune.export.source import CHUNK, SafetensorsFolder, row_chunks
from hestia_tune.methods.granularity import GroupSize


@dataclass(frozen=True, kw_only=True)
class DenseType:
    """A floating type of ggml; ``file_type`` is ``general.file_type`` of a model made of it."""

    ggml_id: int
    file_type: int
    dtype: torch.dtype


DENSE_TYPES = {
    "F16": DenseType(ggml_id=1, file_type=1, dtype=torch.float16),
    "BF16": DenseType(ggml_id=30, file_type=32, dtype=torch.bfloat16),
    "F32": DenseType(ggml_id=0, file_type=0, dtype=torch.float32),
}


def import_gguf():
    """The gguf package, or ImportError that says how to get it."""
    try:
        import gguf
    except ImportError:
        raise ImportError(
            "the export to GGUF needs the gguf package: pip install 'hestia-tune[gguf]'"
        ) from None
    return gguf


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of the file: where it comes from and how it is stored.

    Attributes:
        source: name in the folder; None is a tensor made from the config.
        name: in the file.
        type_name: key of `BLOCK_TYPES` (if ``group_size`` is given) or of `DENSE_TYPES`.
        shape: as in the folder.
        group_size: of a quantized weight, else None.
    """

    source: str | None
    name: str
    type_name: str
    shape: torch.Size
    group_size: GroupSize | None = None

    @property
    def _block(self) -> tuple[int, int]:
        """Weights and bytes of one block."""
        if self.group_size is None:
            return 1, DENSE_TYPES[self.type_name].dtype.itemsize
        return BLOCK_TYPES[self.type_name].block, BLOCK_TYPES[self.type_name].num_bytes

    @property
    def ggml_id(self) -> int:
        return (DENSE_TYPES if self.group_size is None else BLOCK_TYPES)[self.type_name].ggml_id

    @property
    def num_bytes(self) -> int:
        block, num_bytes = self._block
        return self.shape.numel() // block * num_bytes

    def load(self, model: LlamaModel, source: SafetensorsFolder) -> torch.Tensor:
        """The source, rows in llama.cpp's order."""
        if self.source is None:
            return model.rope_factors()
        tensor, order = source.read(self.source), model.row_order(self.source)
        return tensor if order is None else tensor[order]

    def encode(self, model: LlamaModel, source: SafetensorsFolder) -> np.ndarray:
        """The bytes of the tensor, uint8 (num_bytes,)."""
        out = np.empty(self.num_bytes, np.uint8)
        if self.group_size is None:
            dtype, start = DENSE_TYPES[self.type_name].dtype, 0
            for part in row_chunks(self.load(model, source)):
                data = part.to(dtype).contiguous().view(torch.uint8).numpy().reshape(-1)
                out[start : start + data.size] = data
                start += data.size
            return out
        block_type = BLOCK_TYPES[self.type_name]
        codes, scales = split_ternary(source.read(self.source), self.group_size, self.source)
        half = to_fp16_scales(scales, self.source)
        scales = block_scales(half, self.shape, block_type.block)
        order = model.row_order(self.source)
        if order is not None:
            codes, scales = codes[order], scales[order]
        codes = codes.view(-1, block_type.block).numpy()
        scales = scales.reshape(-1).numpy()
        blocks, step = out.reshape(-1, block_type.num_bytes), CHUNK // block_type.block
        for start in range(0, len(blocks), step):
            part = slice(start, start + step)
            blocks[part] = block_type.pack(codes[part], scales[part])
        return out

    def holds(self, data: np.ndarray, expected: torch.Tensor) -> bool:
        """Whether the bytes of the tensor, dequantized, are ``expected``, value by value."""
        block, num_bytes = self._block
        data, step = data.reshape(-1, num_bytes), CHUNK // block
        for start in range(0, len(data), step):
            part = data[start : start + step]
            if self.group_size is None:
                found = torch.from_numpy(part).view(DENSE_TYPES[self.type_name].dtype)
            else:
                codes, scales = BLOCK_TYPES[self.type_name].unpack(part)
                found = torch.from_numpy(codes * scales.astype(np.float32)[:, None])
            wanted = expected.reshape(-1)[start * block : start * block + found.numel()]
            if not torch.equal(found.reshape(-1).double(), wanted.double()):
                return False
        return True


# Name -> (ggml type id, shape, offset in the file).
TensorInfos = dict[str, tuple[int, torch.Size, int]]


def read_tensor_infos(path: str | Path) -> TensorInfos:
    """Type, shape and place of every tensor of a GGUF file.

    The package's reader refuses types that are not in its enum, so what it makes of the tensor
    list is replaced by the list itself.
    """

    class Reader(import_gguf().GGUFReader):
        def _build_tensors(self, start_offs, fields):
            self.infos = {}
            for field in fields:
                _, name, _, dims, type_id, offset = field.parts
                shape = torch.Size(reversed([int(dim) for dim in dims]))
                position = int(start_offs) + int(offset[0])
                self.infos[bytes(name).decode("utf-8")] = (int(type_id[0]), shape, position)

    return Reader(path).infos
