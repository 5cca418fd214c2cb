"""Writing a hard model as a GGUF file that llama.cpp loads, bit for bit.

Codes and scales are recovered from the dense hard weight, which is exact, and go into the file as
they are; container and metadata are the gguf package's. A type is chosen for every tensor: a block
type (see `hestia_tune.export.gguf_blocks`) for quantized weights; float32 for vectors (norms,
biases), as llama.cpp wants them; for embeddings and other dense matrices the first of F16, BF16,
F32 that holds every value. float16 seldom does: it has more digits than bfloat16 but a smallest
step of 2^-24, and a large embedding has some values below it.

Every tensor is read back from the file, unpacked and compared with its source before the file gets
its name. Cost: memory holds what goes into the file, and a few copies of the largest tensor.

What llama.cpp does with it: the weights are as trained, but its CPU kernels round the activations
that meet a block type to 8 bits: in runs of 32 for Q2_0 and Q4_0, in runs of 256 for TQ1_0 and
TQ2_0, where one outlier coarsens 255 others. On a SmolLM2-135M with five ternary down projections
the logits moved by 2.6% (Q2_0, Q4_0) and 10% (TQ1_0, TQ2_0), as they do in transformers with
activations rounded so. That is why "auto" leaves out the two types that would be smaller.
Q2_0 needs llama.cpp b9916 (July 2026) or later; TQ1_0 and TQ2_0 load since September 2024, mostly
on the CPU; Q4_0 runs everywhere. Forks that read type 42 as blocks of 128 refuse or garble Q2_0.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from hestia_tune.export.gguf_blocks import (
    BLOCK_TYPES,
    TensorType,
    choose_block_type,
    choose_dense_type,
    to_fp16_scales,
)
from hestia_tune.export.gguf_model import LlamaModel
from hestia_tune.export.gguf_vocab import add_vocabulary
from hestia_tune.export.source import ModelFolder, import_optional
from hestia_tune.files import staged
from hestia_tune.methods.granularity import GroupSize

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
        folder, quantized: as for `hestia_tune.export.write_huggingface`.
        path: the file to write.
        block_type: "auto", "smallest", a block type, or several, the first of which that holds a
            weight's groups is taken for it. "auto" is ("Q2_0", "Q4_0"): 2.25 bits per weight for
            multiples of 64, else 4.5. "smallest" is ("TQ1_0", "TQ2_0", "Q2_0", "Q4_0"), with 1.69
            bits for whole rows and multiples of 256; the module says what that costs. Choose
            "Q4_0" for a llama.cpp older than Q2_0.
        overwrite: replace a file that is there.

    Returns:
        Sizes of the file, as `hestia_tune.export.source.ModelFolder.summary` lists them.

    Raises:
        ImportError: without the gguf package.
        ValueError: besides the reasons there, on an architecture, tokenizer or rotary scaling that
            llama.cpp does not have, a group size that the block types do not hold, a scale outside
            float16's normal range.
        FileExistsError, FileNotFoundError, OSError, RuntimeError: as there.
    """
    gguf = import_optional("gguf")
    path = Path(path)
    if path.is_dir() or (path.exists() and not overwrite):
        raise FileExistsError(f"{path} exists; choose another name, or overwrite=True for a file")
    preferences = (block_type,) if isinstance(block_type, str) else tuple(block_type)
    if len(preferences) == 1:
        preferences = _CHOICES.get(preferences[0], preferences)
    if not preferences or set(preferences) - set(BLOCK_TYPES):
        raise ValueError(
            f'block_type must be "auto", "smallest" or of {", ".join(BLOCK_TYPES)}; '
            f"got {block_type!r}"
        )
    source = ModelFolder(Path(folder), quantized)
    model = LlamaModel(source)
    kinds = {}
    for name, group_size in quantized.items():
        if name not in model.names or name == "model.embed_tokens.weight":
            raise ValueError(f"only weights of linear layers can be quantized; got {name}")
        kinds[name] = choose_block_type(preferences, source.shapes[name][1], group_size, name)
    writer = gguf.GGUFWriter(None, model.architecture)
    writer.add_name(source.folder.resolve().name)
    model.add_to(writer)
    add_vocabulary(writer, source.folder, source.config)
    for name, weight in tqdm(model.tensors(), desc="packing for GGUF", unit="tensor"):
        if name in quantized:
            hard = source.pack(name, weight)
            scales = to_fp16_scales(hard.scale, name).expand(len(hard), -1)
            data = kinds[name].pack(hard.codes().numpy(), scales.numpy())
        else:
            dtype, kinds[name] = choose_dense_type(weight, name)
            data = weight.to(dtype).contiguous().view(torch.int8).numpy()
        # A plain int as the type, and bytes that are not uint8: the package then looks the type up
        # in no table of its own, and may be older than the type.
        writer.add_tensor(
            model.names[name],
            data.view(np.int8),
            raw_shape=weight.shape,
            raw_dtype=kinds[name].ggml_id,
        )
    matrices = Counter(kinds[n] for n in model.names if len(source.shapes.get(n, ())) == 2)
    writer.add_file_type(max(matrices, key=matrices.get).file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    with staged(path) as temporary:
        try:
            writer.write_header_to_file(temporary)
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file(progress=True)
        finally:
            writer.close()
        _verify(temporary, model, kinds)
        return source.summary(
            num_bytes=temporary.stat().st_size,
            quantized_bytes=sum(kinds[n].size_of(source.shapes[n].numel()) for n in quantized),
            types=[kinds[name].name for name in model.names],
        )


def _verify(path: Path, model: LlamaModel, kinds: Mapping[str, TensorType]) -> None:
    """Unpacks every tensor of the file, and compares it with its source."""
    found = read_tensor_infos(path)
    for name, weight in tqdm(model.tensors(), desc="reading it back", unit="tensor"):
        kind, (type_id, shape, position) = kinds[name], found[model.names[name]]
        data = np.fromfile(path, np.uint8, kind.size_of(weight.numel()), offset=position)
        unpacked = torch.from_numpy(kind.unpack(data)).view(weight.shape)
        same = torch.equal(unpacked, weight.float())
        if (type_id, shape) != (kind.ggml_id, weight.shape) or not same:
            raise RuntimeError(
                f"{name} ({kind.name}) read back from {path} differs from its source; this is a "
                "defect of the export or of the disk"
            )


def read_tensor_infos(path: str | Path) -> dict[str, tuple[int, torch.Size, int]]:
    """Name of every tensor of a GGUF file -> its ggml type, its shape and its offset in the file.

    The package's reader refuses types that are not in its enum, so what it makes of the tensor
    list is replaced by the list itself.
    """
    import gguf

    class Reader(gguf.GGUFReader):
        def _build_tensors(self, start_offs, fields):
            self.infos = {}
            for field in fields:
                _, name, _, dims, type_id, offset = field.parts
                shape = torch.Size(reversed([int(dim) for dim in dims]))
                position = int(start_offs) + int(offset[0])
                self.infos[bytes(name).decode("utf-8")] = (int(type_id[0]), shape, position)

    return Reader(path).infos
