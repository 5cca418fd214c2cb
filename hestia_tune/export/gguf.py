"""Writing a hard model as a GGUF file that llama.cpp loads, bit for bit.

Codes and scales are recovered from the dense hard weight, which is exact, and go into the file as
they are; container and metadata are the gguf package's. A type is chosen for every tensor: a block
type (see `hestia_tune.export.gguf_blocks`) for quantized weights; float32 for vectors (norms,
biases), as llama.cpp wants them; for embeddings and other dense matrices the first of F16, BF16,
F32 that holds every value. float16 seldom does: it has more digits than bfloat16 but a smallest
step of 2^-24, and a large embedding has some values below it.

The file is written under a temporary name and read back; every tensor is unpacked and compared
with its source before the file gets its name. Cost: three passes over the weights, each tensor
opened on its own, so memory holds a few copies of the largest tensor.

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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from hestia_tune.export.folder import require_space
from hestia_tune.export.gguf_blocks import (
    BLOCK_TYPES,
    DENSE_TYPES,
    TensorType,
    choose_block_type,
    import_gguf,
    to_fp16_scales,
)
from hestia_tune.export.gguf_model import ROPE_FACTORS, LlamaModel
from hestia_tune.export.gguf_vocab import add_vocabulary
from hestia_tune.export.source import SafetensorsFolder, same_values, split_hard, summary
from hestia_tune.files import staged
from hestia_tune.methods.granularity import GroupSize, check_divides, validate_group_size

log = logging.getLogger(__name__)

_CHOICES = {"auto": ("Q2_0", "Q4_0"), "smallest": tuple(BLOCK_TYPES)}


def write_gguf(
    folder: str | Path,
    path: str | Path,
    *,
    quantized: Mapping[str, GroupSize],
    block_type: str | Sequence[str] = "auto",
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes a Hugging Face Llama or Qwen2 with ternary weights as one GGUF file.

    Args:
        folder: Hugging Face folder: config.json, safetensors of any floating dtype, tokenizer.
        path: the file to write.
        quantized: name in the safetensors -> group_size ("channel" and "tensor" included) of every
            weight that is scale * {-1, 0, 1} in each of its groups, with bfloat16 scales.
        block_type: "auto", "smallest", a block type, or several, the first of which that holds a
            weight's groups is taken for it. "auto" is ("Q2_0", "Q4_0"): 2.25 bits per weight for
            multiples of 64, else 4.5. "smallest" is ("TQ1_0", "TQ2_0", "Q2_0", "Q4_0"), with 1.69
            bits for whole rows and multiples of 256; the module says what that costs. Choose
            "Q4_0" for a llama.cpp older than Q2_0.
        overwrite: replace a file that is there.

    Returns:
        Sizes of the file, as `hestia_tune.export.source.summary` lists them.

    Raises:
        ImportError: without the gguf package.
        FileExistsError, FileNotFoundError: the target exists; config, weights or tokenizer do not.
        ValueError: on an architecture, tokenizer or rotary scaling that llama.cpp does not have, a
            weight that is not ternary, a group size that the block types do not hold, a scale
            outside float16's normal range.
        OSError: if the disk is full.
        RuntimeError: if the file read back is not the model. In all cases nothing is left behind.
    """
    gguf = import_gguf()
    folder, path = Path(folder), Path(path)
    if path.is_dir() or (path.exists() and not overwrite):
        remedy = "it is a folder" if path.is_dir() else "choose another name or overwrite=True"
        raise FileExistsError(f"{path} exists; {remedy}")
    preferences = (block_type,) if isinstance(block_type, str) else tuple(block_type)
    if len(preferences) == 1:
        preferences = _CHOICES.get(preferences[0], preferences)
    if not preferences or set(preferences) - set(BLOCK_TYPES):
        raise ValueError(
            f'block_type must be "auto", "smallest" or of {", ".join(BLOCK_TYPES)}; '
            f"got {block_type!r}"
        )
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(f"{config_file} does not exist; pass a Hugging Face folder")
    model = LlamaModel(json.loads(config_file.read_text(encoding="utf-8")))
    writer = gguf.GGUFWriter(None, model.architecture)
    writer.add_name(folder.resolve().name)
    model.add_to(writer)
    add_vocabulary(writer, folder, model.config)
    entries = _plan(model, SafetensorsFolder(folder), quantized, preferences)
    require_space(path, sum(entry.num_bytes for entry in entries))
    with staged(path) as temporary:
        _write(writer, temporary, entries)
        _verify(temporary, entries)
        num_bytes = temporary.stat().st_size
    weights = [entry for entry in entries if entry.name != ROPE_FACTORS]
    packed = [entry for entry in weights if entry.group_size is not None]
    return summary(
        num_bytes=num_bytes,
        parameters=sum(entry.shape.numel() for entry in weights),
        quantized_parameters=sum(entry.shape.numel() for entry in packed),
        quantized_bytes=sum(entry.num_bytes for entry in packed),
        types=Counter(entry.kind.name for entry in weights),
    )


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of the file: where it comes from and how it is stored.

    Attributes:
        source: name in the folder, for messages.
        load: gives the tensor, rows in the folder's order.
        order: an index that puts the rows into llama.cpp's.
        name, kind: in the file.
        shape: as in the folder.
        group_size: of a quantized weight, else None.
    """

    source: str
    load: Callable[[], torch.Tensor]
    order: torch.Tensor | slice
    name: str
    kind: TensorType
    shape: torch.Size
    group_size: GroupSize | None = None

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() // self.kind.block * self.kind.num_bytes

    def encode(self) -> np.ndarray:
        """The bytes of the tensor, uint8 (num_bytes,)."""
        weight = self.load()
        if self.group_size is None:
            dtype = next(dtype for dtype, kind in DENSE_TYPES.items() if kind == self.kind)
            return weight[self.order].to(dtype).contiguous().view(torch.uint8).numpy().reshape(-1)
        # (out_features, in_features), (out_features or 1, groups)
        codes, scales = split_hard(weight, self.group_size, self.source)
        scales = to_fp16_scales(scales, self.source).expand(len(codes), -1)
        per_group = self.shape[1] // self.kind.block // scales.shape[1]
        scales = scales.repeat_interleave(per_group, 1)  # (out_features, blocks of a row)
        blocks = self.kind.pack(codes[self.order].numpy(), scales[self.order].numpy())
        return blocks.reshape(-1)

    def holds(self, data: np.ndarray) -> bool:
        """Whether the bytes of the tensor, unpacked, are its source, value by value."""
        rows = self.shape[0] if len(self.shape) > 1 else 1
        found = torch.from_numpy(self.kind.unpack(data.reshape(rows, -1)))
        return same_values(found.view(self.shape), self.load()[self.order])


def _plan(
    model: LlamaModel,
    source: SafetensorsFolder,
    quantized: Mapping[str, GroupSize],
    preferences: tuple[str, ...],
) -> list[Entry]:
    """What goes into the file; everything that can be refused by shape is refused here."""
    names = model.tensor_names(source.shapes)
    if unknown := [name for name in quantized if name not in names]:
        raise ValueError(
            f"quantized names tensors that {model.architecture} does not have or the folder "
            f"lacks: {unknown[:4]}; use the names of the safetensors, such as {next(iter(names))}"
        )
    kinds = {}
    for name, group_size in quantized.items():
        shape = source.shapes[name]
        validate_group_size(group_size)
        if len(shape) != 2 or name == "model.embed_tokens.weight":
            raise ValueError(f"only weights of linear layers can be quantized; got {name}")
        check_divides(group_size, shape[1], name)
        kinds[name] = choose_block_type(preferences, shape[1], group_size, name)
    entries = []
    if (factors := model.rope_factors()) is not None:
        entries.append(
            Entry(
                source="config.json",
                load=model.rope_factors,
                order=slice(None),
                name=ROPE_FACTORS,
                kind=DENSE_TYPES[torch.float32],
                shape=factors.shape,
            )
        )
    for theirs, ours in names.items():
        entries.append(
            Entry(
                source=theirs,
                load=partial(source.read, theirs),
                order=model.row_order(theirs),
                name=ours,
                kind=kinds.get(theirs) or _dense_type(source.read(theirs), theirs),
                shape=source.shapes[theirs],
                group_size=quantized.get(theirs),
            )
        )
    return entries


def _dense_type(tensor: torch.Tensor, name: str) -> TensorType:
    if tensor.dim() == 1:
        return DENSE_TYPES[torch.float32]
    for dtype, kind in DENSE_TYPES.items():
        if same_values(tensor.to(dtype), tensor):
            if kind.name != "F16":
                log.info("%s: %s instead of F16, which would round some values", name, kind.name)
            return kind
    raise ValueError(f"GGUF export holds up to float32; {name} has more digits")


def _write(writer: Any, path: Path, entries: list[Entry]) -> None:
    """Adds types and tensors to a ``gguf.GGUFWriter`` that has the rest, and writes the file."""
    embedding = next(e.kind for e in entries if e.name == "token_embd.weight")
    packed = Counter(entry.kind for entry in entries if entry.group_size is not None)
    writer.add_file_type(max(packed, key=packed.get, default=embedding).file_type)
    if packed:
        writer.add_quantization_version(import_gguf().GGML_QUANT_VERSION)
    for entry in entries:
        # A plain int as the type, and a dtype that is not uint8: the package then looks the type
        # up in no table of its own, and may be older than the type.
        writer.add_tensor_info(
            entry.name, entry.shape, np.dtype(np.float32), entry.num_bytes, entry.kind.ggml_id
        )
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in tqdm(entries, desc="writing GGUF", unit="tensor"):
            writer.write_tensor_data(entry.encode())
    finally:
        writer.close()


def _verify(path: Path, entries: list[Entry]) -> None:
    """Compares every tensor of the file with its source."""
    infos = read_tensor_infos(path)
    if [*infos] != [entry.name for entry in entries]:
        raise RuntimeError(f"{path} read back has other tensors than were written")
    for entry in tqdm(entries, desc="reading it back", unit="tensor"):
        type_id, shape, position = infos[entry.name]
        data = np.fromfile(path, np.uint8, entry.num_bytes, offset=position)
        same = (type_id, shape, data.size) == (entry.kind.ggml_id, entry.shape, entry.num_bytes)
        if not same or not entry.holds(data):
            raise RuntimeError(
                f"{entry.name} ({entry.kind.name}) read back from {path} differs from "
                f"{entry.source}; this is a defect of the export or of the disk"
            )


def read_tensor_infos(path: str | Path) -> dict[str, tuple[int, torch.Size, int]]:
    """Name of every tensor of a GGUF file -> its ggml type, its shape and its offset in the file.

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
