"""Writing a hard model as a GGUF file that llama.cpp loads, bit for bit.

Codes and scales are recovered from the dense hard weight, which is exact, and go into the file as
they are; container and metadata are the gguf package's. A type is chosen for every tensor: a block
type (see `hestia_tune.export.gguf_blocks`) for quantized weights; float32 for vectors (norms,
biases), as llama.cpp wants them; for embeddings and other dense matrices the first of F16, BF16,
F32 that holds every value. float16 seldom does: it has more digits than bfloat16 but a smallest
step of 2^-24, and a large embedding has some values below it.

Every tensor is unpacked again and compared with its source, and only then is the file written,
under a temporary name. It gets its name when every byte has been read back. Cost: memory holds what
goes into the file, and a few copies of the largest tensor.

What llama.cpp does with it: the weights are as trained, but its CPU kernels round the activations
that meet a block type to 8 bits: in runs of 32 for Q2_0 and Q4_0, in runs of 256 for TQ1_0 and
TQ2_0, where one outlier coarsens 255 others. On a SmolLM2-135M with five ternary down projections
the logits moved by 2.6% (Q2_0, Q4_0) and 10% (TQ1_0, TQ2_0), as they do in transformers with
activations rounded so. That is why "auto" leaves out the two types that would be smaller.
Q2_0 needs llama.cpp b9916 (July 2026) or later; TQ1_0 and TQ2_0 load since September 2024, mostly
on the CPU; Q4_0 runs everywhere. Forks that read type 42 as blocks of 128 refuse or garble Q2_0.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from hestia_tune.export.source import (
    SafetensorsFolder,
    read_config,
    same_values,
    split_hard,
    summary,
)
from hestia_tune.files import staged
from hestia_tune.methods.granularity import GroupSize

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
    model = LlamaModel(read_config(folder))
    writer = gguf.GGUFWriter(None, model.architecture)
    writer.add_name(folder.resolve().name)
    model.add_to(writer)
    add_vocabulary(writer, folder, model.config)
    entries = _entries(model, SafetensorsFolder(folder), quantized, preferences)
    packed = [entry for entry in entries.values() if entry.kind.name in BLOCK_TYPES]
    kinds = Counter(entry.kind for entry in packed)
    mostly = max(kinds, key=kinds.get, default=entries["token_embd.weight"].kind)
    writer.add_file_type(mostly.file_type)
    if packed:
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, entry in entries.items():
        # A plain int as the type, and bytes that are not uint8: the package then looks the type up
        # in no table of its own, and may be older than the type.
        data, ggml_id = entry.data.view(np.int8), entry.kind.ggml_id
        writer.add_tensor(name, data, raw_shape=entry.shape, raw_dtype=ggml_id)
    require_space(path, sum(entry.data.nbytes for entry in entries.values()))
    with staged(path) as temporary:
        try:
            writer.write_header_to_file(temporary)
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file(progress=True)
        finally:
            writer.close()
        _verify(temporary, entries)
        num_bytes = temporary.stat().st_size
    weights = [entry for name, entry in entries.items() if name != ROPE_FACTORS]
    return summary(
        num_bytes=num_bytes,
        parameters=sum(entry.shape.numel() for entry in weights),
        quantized_parameters=sum(entry.shape.numel() for entry in packed),
        quantized_bytes=sum(entry.data.nbytes for entry in packed),
        types=Counter(entry.kind.name for entry in weights),
    )


@dataclass(frozen=True)
class Entry:
    """One tensor of the file: its type, its shape in the folder, its bytes row by row."""

    kind: TensorType
    shape: torch.Size
    data: np.ndarray


def _entries(
    model: LlamaModel,
    source: SafetensorsFolder,
    quantized: Mapping[str, GroupSize],
    preferences: tuple[str, ...],
) -> dict[str, Entry]:
    """What goes into the file, by its name there; what shapes forbid is refused first."""
    source.check_quantized(quantized)
    names = model.tensor_names(source.shapes)
    kinds = {}
    for name, group_size in quantized.items():
        if name not in names or name == "model.embed_tokens.weight":
            raise ValueError(f"only weights of linear layers can be quantized; got {name}")
        in_features = source.shapes[name][1]
        kinds[name] = choose_block_type(preferences, in_features, group_size, name)
    entries = {}
    if (factors := model.rope_factors()) is not None:
        entries[ROPE_FACTORS] = dense_entry(factors, ROPE_FACTORS)
    for theirs, ours in tqdm(names.items(), desc="packing for GGUF", unit="tensor"):
        weight, order = source.read(theirs), model.row_order(theirs)
        if theirs in quantized:
            entry = packed_entry(weight, kinds[theirs], quantized[theirs], order, theirs)
        else:
            entry = dense_entry(weight[order], theirs)
        found = torch.from_numpy(entry.kind.unpack(entry.data)).view(entry.shape)
        if not same_values(found, weight[order]):
            raise RuntimeError(f"{theirs} unpacked from {entry.kind.name} differs from its source")
        entries[ours] = entry
    return entries


def packed_entry(
    weight: torch.Tensor,
    kind: TensorType,
    group_size: GroupSize,
    order: torch.Tensor | slice,
    name: str,
) -> Entry:
    """A hard weight (out_features, in_features) in a block type.

    Args:
        weight: rows as in the folder, which messages count.
        kind: one that fits; see `choose_block_type`.
        group_size: of the weight.
        order: an index that puts the rows into the file's order.
        name: the weight in error messages.

    Raises:
        ValueError: if it is not hard, or float16 does not hold its scales.
    """
    codes, scales = split_hard(weight, group_size, name)  # scales (out_features or 1, groups)
    scales = to_fp16_scales(scales, name).expand(len(codes), -1)
    per_group = weight.shape[1] // kind.block // scales.shape[1]
    scales = scales.repeat_interleave(per_group, 1)  # (out_features, blocks of a row)
    blocks = kind.pack(codes[order].numpy(), scales[order].numpy())
    return Entry(kind, weight.shape, blocks.reshape(len(codes), -1))


def dense_entry(tensor: torch.Tensor, name: str) -> Entry:
    """A tensor in the first floating type that holds it; ValueError, naming it, if none does."""
    types = [*DENSE_TYPES.items()]
    for dtype, kind in types[-1:] if tensor.dim() == 1 else types:
        if same_values(tensor.to(dtype), tensor):
            if tensor.dim() > 1 and kind.name != "F16":
                log.info("%s: %s instead of F16, which would round some values", name, kind.name)
            data = tensor.to(dtype).contiguous().view(torch.uint8).numpy()
            return Entry(kind, tensor.shape, data)
    raise ValueError(f"GGUF export holds up to float32; {name} has more digits")


def _verify(path: Path, entries: Mapping[str, Entry]) -> None:
    """Compares every tensor of the file, type, shape and bytes, with what was to be written."""
    found = read_tensor_infos(path)
    if [*found] != [*entries]:
        raise RuntimeError(f"{path} read back has other tensors than were written")
    for name, entry in entries.items():
        *info, position = found[name]
        data = np.fromfile(path, np.uint8, entry.data.nbytes, offset=position)
        same = np.array_equal(data, entry.data.reshape(-1))
        if info != [entry.kind.ggml_id, entry.shape] or not same:
            raise RuntimeError(
                f"{name} ({entry.kind.name}) read back from {path} differs from its source; this "
                "is a defect of the export or of the disk"
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
