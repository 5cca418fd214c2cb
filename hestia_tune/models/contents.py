"""Finds out what weights are: their codes, their groups, and in a model folder their bytes.

`find_hard` finds the layers of a pretrained model that are hard already. Training and conversion
continue from the codes of these layers (`hestia_tune.methods.groups`). They need groups that
fit: the method's group size must divide the group size of the layer. The search reads each weight
once or twice, one at a time.

`read_matrices` describes a model folder. It needs neither a config nor the model's class. A matrix
counts as a linear of a block if a part of its name is a number, as in
``model.layers.3.mlp.up_proj.weight``. One weight at a time is in memory, dense in float32.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchao.utils import TorchAOBaseTensor

from hestia_tune.distributed import progress_bar
from hestia_tune.errors import InputError, one_line, warn_once
from hestia_tune.files import inside, read_json, read_state
from hestia_tune.methods import GroupMethod, Method
from hestia_tune.methods.groups import (
    BINARY,
    INT4,
    SYMMETRIC,
    TERNARY,
    TWO_BIT,
    GroupSize,
    Levels,
    find_codes,
    find_group_size,
    is_hard,
    rounded_hard,
)
from hestia_tune.models.folder import (
    DESCRIPTION_FILE,
    EncodedWeight,
    SafetensorsFolder,
    import_optional,
    is_float8,
)

Q2_0 = "Q2_0"
# llama.cpp's number of the type Q2_0, and weights and bytes of its block. The package gguf may be
# older than the type: https://github.com/ggml-org/llama.cpp has it since July 2026.
Q2_0_ID, Q2_0_BLOCK, Q2_0_BYTES = 42, 64, 18
_IN_BLOCK = re.compile(r"(^|\.)\d+\.")
# Codes -> what a weight with these codes is called.
KINDS = {
    BINARY: "binary",
    TERNARY: "ternary",
    TWO_BIT: "four levels",
    SYMMETRIC: "symmetric four levels",
    INT4: "4-bit integers",
}


def find_hard(
    weights: Iterable[tuple[str, Tensor]], methods: Mapping[str, Method]
) -> dict[str, GroupSize]:
    """Return name -> group size of every layer that is hard already, in the codes of its method.

    Args:
        weights: Name and weight of every quantized layer.
        methods: Name -> method. Without groups (Fairy2i), no layer is hard already.

    Returns:
        The group sizes. If a scale has more bits than the method can hold, there is a warning.

    Raises:
        InputError: If the method's group size would change a layer. The message names the layer,
            its group size and a group size that fits all layers of this method.
    """
    found: dict[str, GroupSize] = {}
    widths, wrong, changes = {}, [], dict[str, float]()
    for name, weight in weights:
        method = methods[name]
        if not isinstance(method, GroupMethod):
            continue
        levels = method.levels
        size = find_group_size(weight, levels)
        fits = is_hard(weight, method.group_size, levels, any_scale=levels == TWO_BIT)
        if size or fits:
            found[name], widths[name] = size or method.group_size, weight.shape[1]
            wrong += [] if fits else [name]
        if fits:
            kept = "6 significant bits" if method.levels == TWO_BIT else "bfloat16"
            share = rounded_hard(method, weight).float() / weight.float()
            change = float((share - 1).nan_to_num(0).abs().max())
            changes[kept] = max(change, changes.get(kept, 0.0))
    found = named_alike(found, widths)
    if wrong:
        method: Any = methods[wrong[0]]
        alike = {name: size for name, size in found.items() if methods[name] == method}
        in_rows = all(isinstance(size, str) for size in alike.values())
        sizes = (widths[n] if isinstance(s, str) else s for n, s in alike.items())
        remedy = "channel" if in_rows else math.gcd(*sizes)
        raise InputError(
            f"{wrong[0]} is {KINDS[method.levels]} already, {groups_text([found[wrong[0]]])}; "
            f"quantizer.group_size {method.group_size} would change it; set "
            f"quantizer.group_size={remedy}"
        )
    for kept, change in changes.items():
        if change:
            warn_once(
                f"scales of the pretrained model are rounded to {kept}, by up to {change:.2%}"
            )
    return found


def named_alike(found: Mapping[str, GroupSize], widths: Mapping[str, int]) -> dict[str, GroupSize]:
    """Return the group sizes with one word for one thing.

    A row of 128 weights is a channel, and a group of 128 as well. If other layers have groups of
    128, it is called 128.

    Args:
        found: Name -> group size of each layer.
        widths: Name -> in_features of each layer.
    """
    return {
        name: widths[name] if size == "channel" and widths[name] in found.values() else size
        for name, size in found.items()
    }


def groups_text(sizes: Iterable[GroupSize]) -> str:
    """Return group sizes in words, for example "in groups of 128"."""
    words = {"channel": "with one scale per row", "tensor": "with one scale per matrix"}
    texts = dict.fromkeys(words.get(str(size), f"in groups of {size}") for size in sizes)
    return " or ".join(texts)


def describe(found: Mapping[str, GroupSize], methods: Mapping[str, Any]) -> str:
    """Return a description of a model that is hard already, for the log.

    Args:
        found: What `find_hard` returned, at least one layer.
        methods: Name -> method of every quantized layer.
    """
    where = "" if len(found) == len(methods) else f" in {len(found)} of {len(methods)} linears"
    kinds = " or ".join(dict.fromkeys(KINDS[methods[name].levels] for name in found))
    return f"{kinds} already{where}, {groups_text(found.values())}"


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Describe a matrix of a model.

    Attributes:
        name: Its name in the files, without ".weight".
        stored: How the files hold it, for example "bfloat16", "2 bits of MLX", or "Q4_0" in a GGUF
            file.
        nbytes: Its bytes in the files.
        width: in_features.
        size: The number of its weights.
        zeros: The number of its weights that are 0.
        levels: Its codes. None: it is dense.
        group_size: The number of weights that share a scale. None: it is dense.
    """

    name: str
    stored: str
    nbytes: int
    width: int
    size: int
    zeros: int
    levels: Levels | None = None
    group_size: GroupSize | None = None

    @property
    def kind(self) -> str:
        """The codes and groups, or the dtype, in words."""
        if self.levels is None or self.group_size is None:
            is_block_type = self.stored.startswith(("Q", "IQ", "TQ", "MX", "NV"))  # of llama.cpp
            return self.stored if is_block_type else f"dense {self.stored}"
        return f"{KINDS[self.levels]} {groups_text([self.group_size])}"


def read_matrices(folder: Path) -> tuple[list[Matrix], int]:
    """Return what every matrix of a folder is, by name, and the bytes of all tensors.

    Args:
        folder: A folder with safetensors, dense or packed by compressed-tensors or MLX; a packed
            folder that hestia_convert wrote for torchtune; or a GGUF file.

    Raises:
        InputError: If the folder has no such weights, or if they are damaged.
    """
    matrices, num_bytes = [], 0
    tensors = _tensors(folder).items()
    for name, value in progress_bar(tensors, desc=f"reading {folder.name}", unit="tensor"):
        stored, nbytes = _storage(value)
        num_bytes += nbytes
        if len(value.shape) != 2:
            continue
        if isinstance(value, Tensor) and not value.dtype.is_floating_point:
            raise InputError(f"{name} in {folder} is {stored} and no weight; give another folder")
        dense = value.to(torch.bfloat16) if _is_raw_float8(value) else value.dequantize()
        levels, group_size = find_codes(dense) if dense is not None else (None, None)
        matrices.append(
            Matrix(
                name=name.removesuffix(".weight"),
                stored=stored,
                nbytes=nbytes,
                width=value.shape[1],
                size=math.prod(value.shape),
                zeros=0 if dense is None else int((dense == 0).sum()),
                levels=levels,
                group_size=group_size,
            )
        )
    sizes = {m.name: m.group_size for m in matrices if m.group_size}
    alike = named_alike(sizes, {m.name: m.width for m in matrices})
    matrices.sort(key=lambda m: re.sub(r"\d+", lambda number: number[0].zfill(9), m.name))
    return [replace(m, group_size=alike.get(m.name)) for m in matrices], num_bytes


def _is_raw_float8(value: Any) -> bool:
    """Return whether a value is a plain tensor of float8, with which torch cannot compute."""
    return type(value) is Tensor and is_float8(value.dtype)


def _storage(value: Any) -> tuple[str, int]:
    """Return how a file holds a value, in words, and its bytes."""
    if isinstance(value, GGUFTensor):
        return value.stored, value.nbytes
    stored = str(value.dtype).removeprefix("torch.")
    if isinstance(value, TorchAOBaseTensor):
        parts = [getattr(value, part).nbytes for part in value.tensor_data_names]
        return type(value).__name__, sum(parts)
    if isinstance(value, EncodedWeight):
        return f"{value.bits} bits of {value.layout}, {stored}", value.nbytes
    return stored, value.nbytes


def _tensors(path: Path) -> dict[str, Any]:
    """Return name -> tensor of a folder or a GGUF file, packed as they are stored."""
    if path.suffix == ".gguf" and path.is_file():
        return read_gguf(path)
    if not path.is_dir():
        what = "is no folder and no .gguf file" if path.exists() else "does not exist"
        raise InputError(f"{path} {what}; give the folder of a model, or a .gguf file")
    file = path / DESCRIPTION_FILE
    packed = read_json(file).get("weights") if file.is_file() else None
    if packed:
        return read_state(inside(path, packed))
    others = sorted(path.glob("*.gguf"))
    if others and not any(path.glob("*.safetensors")):
        raise InputError(f"{path} has no safetensors; inspect its GGUF file: {others[0]}")
    return SafetensorsFolder(path).tensors


@dataclass(frozen=True, eq=False, kw_only=True)
class GGUFTensor:
    """A tensor of a GGUF file, mapped from the file.

    Attributes:
        shape: Its shape; the last dimension is in_features.
        stored: The name of its type in llama.cpp, such as "Q4_0".
        nbytes: Its bytes in the file.
        values: Its blocks, as the package gguf reads them.
    """

    shape: tuple[int, ...]
    stored: str
    nbytes: int
    values: Any

    def dequantize(self) -> Tensor | None:
        """Return the dense weight in float32, or None for a type that gguf cannot read."""
        if self.stored == Q2_0:
            return torch.from_numpy(unpack_q2_0(self.values)).view(self.shape)
        gguf = import_optional("gguf")
        kind = getattr(gguf.GGMLQuantizationType, self.stored)
        try:
            dense = gguf.quants.dequantize(self.values, kind)
        except NotImplementedError:
            return None
        return torch.from_numpy(dense.copy()).float().view(self.shape)


def read_gguf(path: Path) -> dict[str, GGUFTensor]:
    """Return name -> tensor of a GGUF file.

    Raises:
        InputError: If the package gguf is missing or cannot read the file.
    """
    gguf = import_optional("gguf")
    found: dict[str, GGUFTensor] = {}

    class Reader(gguf.GGUFReader):
        """The package's reader, which may not know Q2_0. It fills ``found`` in the file's order."""

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            for field in fields:
                _, name, _, sizes, kind, offset = field.parts
                text, shape = bytes(name).decode("utf-8"), tuple(map(int, reversed(sizes)))
                if text in found:
                    raise ValueError(f"two tensors have the name {text}")
                if int(kind[0]) == Q2_0_ID:
                    nbytes, begin = math.prod(shape) // Q2_0_BLOCK * Q2_0_BYTES, int(offset[0])
                    values, stored = self.data[start_offs + begin :][:nbytes], Q2_0
                else:
                    super()._build_tensors(start_offs, [field])
                    (tensor,) = self.tensors
                    values, stored, nbytes = tensor.data, tensor.tensor_type.name, tensor.n_bytes
                found[text] = GGUFTensor(
                    shape=shape, stored=stored, nbytes=int(nbytes), values=values
                )

    try:
        Reader(path)
    except Exception as error:  # the package raises many types for damaged bytes, and new types
        reason = f"cannot be read by the package gguf ({one_line(error)})"
        remedy = "get it again, or update gguf if its types are newer"
        raise InputError(f"{path} {reason}; {remedy}") from error
    return found


def unpack_q2_0(data: np.ndarray) -> np.ndarray:
    """Return the weights, float32 (weights,), of the bytes of Q2_0 blocks, uint8 (bytes,).

    A block has a float16 scale, and then 16 bytes. Byte i holds the codes of the weights 4i to
    4i + 3, plus 1, from its lowest bits up.
    """
    blocks = np.asarray(data).reshape(-1, Q2_0_BYTES)
    scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    fields = (blocks[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & np.uint8(3)
    codes = fields.reshape(len(blocks), Q2_0_BLOCK).astype(np.int8) - 1
    return (codes * scales).reshape(-1)


def contents_table(folder: Path) -> str:
    """Return a Markdown table of the linears in the blocks of a model, and one line about all.

    Args:
        folder: See `read_matrices`, also for the errors.
    """
    matrices, num_bytes = read_matrices(folder)
    linears = [m for m in matrices if _IN_BLOCK.search(m.name)]
    lines = [
        "| linear | levels | group size | bits per weight | zeros | stored as | bytes |",
        "|---|---:|---:|---:|---:|---|---:|",
    ]
    kinds = defaultdict(list)
    for m in linears:
        kinds[m.kind].append(m)
        numbers = f"{8 * m.nbytes / m.size:.3f} | {m.zeros / m.size:.1%} | {m.stored} | {m.nbytes}"
        levels = len(m.levels) if m.levels else "dense"
        lines.append(f"| {m.name} | {levels} | {m.group_size or '-'} | {numbers} |")
    parts = []
    for kind, group in kinds.items():
        zeros = sum(m.zeros for m in group) / sum(m.size for m in group)
        parts.append(
            f"{len(group)} linears: {kind}" + f", {zeros:.0%} zeros" * bool(group[0].levels)
        )
    parts += [f"{m.name} {m.kind}" for m in matrices if m not in linears]
    return "\n".join([*lines, "", f"{'; '.join(parts)}; {num_bytes / 1e6:.1f} MB"])
