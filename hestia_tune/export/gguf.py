"""Writes a hard model as a GGUF file, which llama.cpp loads with exactly the trained weights.

Codes and scales are recovered from the dense hard weight, which is exact, and are stored unchanged.
Every tensor gets a type. Quantized weights get a block type. Vectors (norms, biases) get float32,
which llama.cpp expects. Embeddings and other dense matrices get the first of F16, BF16 and F32 that
holds every value. F16 seldom does, because its smallest step is 2^-24. Every tensor is read back
from the file, unpacked and compared with its source before the file gets its name. The export needs
memory for the content of the file and for a few copies of the largest tensor.

The gguf package packs and unpacks all but two types. Its Q4_0 chooses its own scales, and version
0.19 does not know Q2_0, so both are packed here. A block is a run of weights of one row with one
fp16 scale, which is the trained scale:

    type    block  bytes  bits per weight  groups that it holds exactly
    TQ1_0     256     54           1.6875  multiples of 256, or whole rows
    TQ2_0     256     66           2.0625  multiples of 256, or whole rows
    Q2_0       64     18           2.25    multiples of 64, or whole rows
    Q4_0       32     18           4.5     multiples of 32, or whole rows; also codes of four levels
    Q2_K      256     84           2.625   codes only; multiples of 16, or whole rows; four levels

Q2_K is the one type that rounds: its codes are exact, its scales are not (`gguf_q2_k`). Its rows
must be multiples of 256. Every weight read back must be within the type's tolerance.

"Whole rows" are the granularities "channel" and "tensor". Their scale is repeated in every block,
so only the length of the row has to be a multiple of the block. fp16 has 11 significant bits and
bfloat16 has 8, so fp16 holds every bfloat16 scale of its normal range. A scale outside that range
is an error and is never rounded. The layouts follow ggml's ``ggml-common.h``. Type 42 (Q2_0 in
blocks of 64) is in llama.cpp since build b9916 of July 2026. Forks that read type 42 as blocks of
128 refuse the file or garble it.

llama.cpp uses the weights as they were trained, but its CPU kernels round the activations that are
multiplied by a block type to 8 bits. One scale covers a run of 32 activations for Q2_0 and Q4_0. It
covers 256 for TQ1_0 and TQ2_0, so one outlier makes 255 other activations coarser. On a
SmolLM2-135M with five ternary down projections this moved the logits by 2.6% (Q2_0, Q4_0) and 10%
(TQ1_0, TQ2_0). Activations that are rounded in the same way in transformers give the same. Q4_0 is
the default because it runs everywhere, holds all codes, and rounds activations in short runs.
``docs/convert.md`` says when another type is the better choice.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

import hestia_tune
from hestia_tune.distributed import progress_bar
from hestia_tune.errors import InputError
from hestia_tune.export import gguf_q2_k
from hestia_tune.export.folder import sizes
from hestia_tune.export.gguf_model import LlamaModel, add_vocabulary
from hestia_tune.files import staged
from hestia_tune.methods.granularity import GroupSize
from hestia_tune.models.folder import ModelFolder, import_optional, is_exact


@dataclass(frozen=True)
class TensorType:
    """A tensor type of ggml.

    Attributes:
        name: ggml's name of the type.
        ggml_id: ggml's number of the type.
        file_type: Value of ``general.file_type`` for a model that consists mostly of this type.
        block: Number of weights in a block; 1 for floats.
        num_bytes: Bytes of a block.
        run: Number of weights with a scale of their own. None: ``block``.
        tolerance: The largest relative error of a weight. 0: the type is exact.
    """

    name: str
    ggml_id: int
    file_type: int
    block: int
    num_bytes: int
    run: int | None = None
    tolerance: float = 0.0

    def fits(self, in_features: int, group_size: GroupSize, levels: int = 3) -> bool:
        """Return whether the type holds the codes of a weight exactly.

        Blocks must tile the rows, no run may contain parts of two groups, and the integers of the
        type must hold the codes. Q4_0 has the integers -8 to 7, Q2_K has 0 to 3, and the other
        types have -1 to 1.
        """
        if levels == 4 and self.name not in ("Q4_0", "Q2_K"):
            return False
        group = in_features if isinstance(group_size, str) else group_size
        return in_features % self.block == 0 and group % (self.run or self.block) == 0

    def pack(
        self, codes: torch.Tensor, scales: torch.Tensor, name: str, levels: int = 3
    ) -> np.ndarray:
        """Return the blocks as bytes, uint8 (out_features, in_features / block, num_bytes).

        Args:
            codes: int8 (out_features, in_features) that the type holds.
            scales: bfloat16 (out_features or 1, groups). Every group consists of whole runs.
            name: Name of the weight, for the error.
            levels: Number of different codes.

        Raises:
            InputError: If a scale is neither 0 nor in fp16's normal range.
        """
        # Compare in float32, because bfloat16 rounds half.max up.
        half, single = torch.finfo(torch.float16), scales.float()
        bad = (single != 0) & ((single < half.smallest_normal) | (single > half.max))
        if bad.any():
            row, group = bad.nonzero()[0].tolist()
            raise InputError(
                f"a GGUF scale is 0 or a float16 of the normal range; group {group} of row {row} "
                f"of {name} has the scale {scales[row, group].item():.9g}; leave gguf out of "
                "convert.formats, or name the layer in quantizer.exclude and train again"
            )
        array = codes.numpy()
        if self.name == "Q2_K":
            return gguf_q2_k.pack(array, single.expand(len(codes), -1).numpy(), levels)
        fp16 = scales.half().expand(len(codes), -1).numpy().astype("<f2")
        fp16 = fp16.repeat(codes.shape[1] // self.block // fp16.shape[1], axis=1)
        shape = (*fp16.shape, self.num_bytes)  # (out_features, blocks of a row, bytes)
        fp16 = fp16[..., None].view(np.uint8)
        if self.name.startswith("TQ"):
            import gguf

            kind = gguf.GGMLQuantizationType(self.ggml_id)
            blocks = gguf.quants.quantize(array.astype(np.float32), kind).reshape(shape)
            blocks[..., -2:] = fp16
            return blocks
        if self.name == "Q2_0":  # byte i holds code + 1 of the weights 4i to 4i + 3
            fields, width = (array + 1).reshape(*shape[:2], 16, 4), 2
        else:  # Q4_0: byte i holds code + 8 of the weights i and i + 16
            fields, width = (array + 8).reshape(*shape[:2], 2, 16).swapaxes(-1, -2), 4
        shifts = np.arange(0, 8, width, dtype=np.uint8)
        packed = np.bitwise_or.reduce(fields.astype(np.uint8) << shifts, axis=-1)
        return np.concatenate([fp16, packed], axis=-1)

    def holds(self, data: np.ndarray, weight: torch.Tensor) -> bool:
        """Return whether bytes, uint8 (bytes,), are a weight within the type's tolerance."""
        expected = weight.float()
        found = torch.from_numpy(self.unpack(data)).view(weight.shape)
        return bool(((found - expected).abs() <= self.tolerance * expected.abs()).all())

    def unpack(self, data: np.ndarray) -> np.ndarray:
        """Return the weights, float32 (weights,), of the bytes of their blocks, uint8 (bytes,)."""
        if self.name != "Q2_0":
            import gguf

            return gguf.quants.dequantize(data, gguf.GGMLQuantizationType(self.ggml_id))
        blocks = data.reshape(-1, self.num_bytes)
        scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
        fields = (blocks[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & np.uint8(3)
        codes = fields.reshape(len(blocks), self.block).astype(np.int8) - 1
        return (codes * scales).reshape(-1)


# The smallest type is first.
BLOCK_TYPES = {
    "TQ1_0": TensorType("TQ1_0", 34, 36, 256, 54),
    "TQ2_0": TensorType("TQ2_0", 35, 37, 256, 66),
    "Q2_0": TensorType("Q2_0", 42, 41, 64, 18),
    "Q2_K": TensorType("Q2_K", 10, 10, 256, 84, gguf_q2_k.RUN, gguf_q2_k.TOLERANCE),
    "Q4_0": TensorType("Q4_0", 2, 2, 32, 18),
}
# The first type that holds every value is taken.
_DENSE_TYPES = {
    torch.float16: TensorType("F16", 1, 1, 1, 2),
    torch.bfloat16: TensorType("BF16", 30, 32, 1, 2),
    torch.float32: TensorType("F32", 0, 0, 1, 4),
}


def write_gguf(
    source: ModelFolder,
    path: Path,
    *,
    block_type: str | Sequence[str] = "Q4_0",
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write a Hugging Face model of a family in `gguf_families` as one GGUF file.

    Args:
        source: The model.
        path: The file to write.
        block_type: One of `BLOCK_TYPES`, or several. Every quantized weight gets the first type
            that holds its groups. The module docstring says what each type costs.
        overwrite: Replace a file that exists, once the new file is complete.

    Returns:
        What `sizes` returns, and ``types``: name of a type -> number of tensors in the file.

    Raises:
        InputError: If the gguf package is missing; or if the target is a folder, or exists and
            ``overwrite`` is False.
        InputError: If llama.cpp does not have the architecture, the tokenizer or the rotary
            scaling, if no block type holds the groups of a weight, or if a scale is outside
            float16's normal range.
        OSError: If the disk is full.
        RuntimeError: If the file that is read back differs from the model.
    """
    gguf = import_optional("gguf")
    if path.is_dir() or (path.exists() and not overwrite):
        raise InputError(f"{path} exists; choose another name, or set overwrite=True for a file")
    model, types, num_bytes = LlamaModel(source), block_types(source, block_type), {}
    for name in source.quantized:
        if name not in model.names or name == "model.embed_tokens.weight":
            raise InputError(f"only weights of linear layers can be quantized; got {name}")
    writer = _new_writer(source, model)
    for name, weight in progress_bar(model.tensors(), desc="packing for GGUF", unit="tensor"):
        if name in source.quantized:
            hard = source.pack(name, weight)
            data = types[name].pack(hard.codes(), hard.scale, name, hard.levels)
            if types[name].tolerance and not types[name].holds(data.reshape(-1), weight):
                raise InputError(
                    f"the scales of a block of {name} differ by more than Q2_K can hold; use "
                    "block_type Q4_0"
                )
        else:
            types[name], data = _pack_dense(weight, name)
        num_bytes[name] = data.nbytes
        # The package looks a type up in its own table if the type is an enum or the data are uint8.
        # A plain int and int8 avoid that, so the package may be older than the type.
        gguf_name, data, ggml_id = model.names[name], data.view(np.int8), types[name].ggml_id
        writer.add_tensor(gguf_name, data, raw_shape=weight.shape, raw_dtype=ggml_id)
    matrices = [name for name in model.names if len(source.shapes.get(name, ())) == 2]
    writer.add_file_type(statistics.mode(types[name] for name in matrices).file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    with staged(path) as temporary:
        try:
            writer.write_header_to_file(temporary)
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file(progress=True)
        finally:
            writer.close()
        _read_back(temporary, model, types, num_bytes, writer.data_alignment)
        quantized_bytes = sum(num_bytes[name] for name in source.quantized)
        return sizes(source.shapes, source.quantized, temporary.stat().st_size, quantized_bytes) | {
            "types": dict(Counter(types[name].name for name in model.names))
        }


def check_gguf(source: ModelFolder, block_type: str | Sequence[str] = "Q4_0") -> None:
    """Raise InputError if a GGUF file cannot hold a model, its groups or its tokenizer.

    Args:
        source: The model. No weight is read.
        block_type: See `write_gguf`.
    """
    block_types(source, block_type)
    _new_writer(source, LlamaModel(source))


def block_types(source: ModelFolder, names: str | Sequence[str]) -> dict[str, TensorType]:
    """Return the block type of every quantized weight, by the weight's name.

    Args:
        source: The model.
        names: One of `BLOCK_TYPES`, or several, of which the first that fits is taken.

    Raises:
        InputError: If a type is unknown, or if no type holds the groups of a weight.
    """
    names = [names] if isinstance(names, str) else names
    if not names or set(names) - set(BLOCK_TYPES):
        raise InputError(
            f"block_type must be one or several of {', '.join(BLOCK_TYPES)}; got {names!r}"
        )
    levels = source.method.levels
    return {
        name: choose_block_type(names, source.shapes[name][1], group_size, name, levels)
        for name, group_size in source.quantized.items()
    }


def choose_block_type(
    names: Sequence[str], in_features: int, group_size: GroupSize, weight: str, levels: int = 3
) -> TensorType:
    """Return the first block type of ``names`` that holds such groups exactly.

    Args:
        names: Names of block types.
        in_features: Length of the weight's rows.
        group_size: The weight's group size.
        weight: Name of the weight, for the error.
        levels: Number of different codes.

    Raises:
        InputError: If no type of ``names`` holds the groups.
    """
    for name in names:
        if BLOCK_TYPES[name].fits(in_features, group_size, levels):
            return BLOCK_TYPES[name]
    raise InputError(
        f"no block of {' or '.join(names)} holds {weight} exactly (in_features {in_features}, "
        f"group_size {group_size}, {levels} levels); use block_type Q4_0 with blocks of 32, or "
        "leave the weight out of quantized, to be stored densely"
    )


def _new_writer(source: ModelFolder, model: LlamaModel) -> Any:
    """Return a ``gguf.GGUFWriter`` with the model's metadata, hyperparameters and vocabulary."""
    import gguf

    writer = gguf.GGUFWriter(None, model.architecture)
    parameters = sum(shape.numel() for shape in source.shapes.values())
    folder = source.folder.resolve()
    try:
        metadata = gguf.Metadata.load(None, folder, None, parameters)  # reads README.md
    except (ValueError, yaml.YAMLError):  # README.md may hold anything
        metadata = gguf.Metadata(name=folder.name)
    metadata.quantized_by = f"hestia_tune {hestia_tune.__version__}"
    metadata.set_gguf_meta_model(writer)
    model.add_to(writer)
    add_vocabulary(writer, source.folder, source.config)
    return writer


def _pack_dense(weight: torch.Tensor, name: str) -> tuple[TensorType, np.ndarray]:
    """Return a dense tensor's type and bytes, or raise InputError if float32 does not hold it."""
    dtypes = _DENSE_TYPES if weight.dim() > 1 else (torch.float32,)
    dtype = next((dtype for dtype in dtypes if is_exact(weight, dtype)), None)
    if dtype is None:
        raise InputError(f"GGUF export holds up to float32; {name} has more digits; round it")
    return _DENSE_TYPES[dtype], weight.to(dtype).contiguous().view(torch.int8).numpy()


def _read_back(
    path: Path,
    model: LlamaModel,
    types: Mapping[str, TensorType],
    num_bytes: Mapping[str, int],
    alignment: int,
) -> None:
    """Raise RuntimeError if a tensor of the file differs from the model's.

    Args:
        path: The GGUF file. Its tensors are at the end, in the model's order.
        model: The model that was written.
        types: Name of a tensor -> its type.
        num_bytes: Name of a tensor -> its bytes, without padding.
        alignment: Every tensor is padded to a multiple of this number of bytes.
    """
    from gguf import GGUFWriter

    padded = {name: GGUFWriter.ggml_pad(size, alignment) for name, size in num_bytes.items()}
    position = path.stat().st_size - sum(padded.values())
    for name, weight in progress_bar(model.tensors(), desc="reading it back", unit="tensor"):
        data = np.fromfile(path, np.uint8, num_bytes[name], offset=position)
        if not types[name].holds(data, weight):
            raise RuntimeError(
                f"{name} ({types[name].name}) read back differs from its source; check the disk"
            )
        position += padded[name]
