"""Finds out what weights are: their codes, their groups, and in a model folder their bytes.

`find_hard` finds the layers of a pretrained model that are hard already. Training and conversion
continue from the codes of these layers (`hestia_tune.methods.hard_weights`). They need groups that
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

from torch import Tensor
from torchao.utils import TorchAOBaseTensor

from hestia_tune.distributed import progress_bar
from hestia_tune.errors import InputError, warn_once
from hestia_tune.files import inside, read_json, read_state
from hestia_tune.methods import GroupMethod, Method
from hestia_tune.methods.granularity import GroupSize
from hestia_tune.methods.hard_weights import find_codes, find_group_size, is_hard
from hestia_tune.models.folder import DESCRIPTION_FILE, SafetensorsFolder
from hestia_tune.models.packed_layouts import Packed

_IN_BLOCK = re.compile(r"(^|\.)\d+\.")
# Number of codes -> what a weight with so many codes is called.
KINDS = {2: "binary", 3: "ternary", 4: "four levels", 16: "4-bit integers"}


def find_hard(
    weights: Iterable[tuple[str, Tensor]], methods: Mapping[str, Method]
) -> dict[str, GroupSize]:
    """Return name -> group size of every layer that is hard already, in the codes of its method.

    Args:
        weights: Name and weight of every quantized layer.
        methods: Name -> method. Without groups (Fairy2i), no layer is hard already.

    Returns:
        The group sizes. If bfloat16 rounds a scale, there is a warning.

    Raises:
        InputError: If the method's group size would change a layer. The message names the layer,
            its group size and a group size that fits all layers of this method.
    """
    found: dict[str, GroupSize] = {}
    widths, wrong, change = {}, [], 0.0
    for name, weight in weights:
        method = methods[name]
        if not isinstance(method, GroupMethod):
            continue
        size = find_group_size(weight, method.levels)
        fits = is_hard(weight, method.group_size, method.levels)
        if size or fits:
            found[name], widths[name] = size or method.group_size, weight.shape[1]
            wrong += [] if fits else [name]
            scales, rounded = weight.float().abs(), weight.bfloat16().float().abs()
            change = max(change, float((rounded / scales - 1).nan_to_num(0).abs().max()))
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
    if change:
        warn_once(f"scales of the pretrained model are rounded to bfloat16, by up to {change:.2%}")
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
        stored: How the files hold it, for example "bfloat16" or "2 bits of MLX".
        nbytes: Its bytes in the files.
        width: in_features.
        size: The number of its weights.
        zeros: The number of its weights that are 0.
        levels: The number of its codes: 2, 3, 4 or 16. None: it is dense.
        group_size: The number of weights that share a scale. None: it is dense.
    """

    name: str
    stored: str
    nbytes: int
    width: int
    size: int
    zeros: int
    levels: int | None = None
    group_size: GroupSize | None = None

    @property
    def kind(self) -> str:
        """Return the codes and groups, or the dtype, in words."""
        if self.levels is None or self.group_size is None:
            return f"dense {self.stored}"
        return f"{KINDS[self.levels]} {groups_text([self.group_size])}"


def read_matrices(folder: Path) -> tuple[list[Matrix], int]:
    """Return what every matrix of a folder is, by name, and the bytes of all tensors.

    Args:
        folder: A folder with safetensors, dense or packed by compressed-tensors or MLX; or a packed
            folder that hestia_convert wrote for torchtune.

    Raises:
        InputError: If the folder has no such weights, or if they are damaged.
    """
    file, matrices, num_bytes = folder / DESCRIPTION_FILE, [], 0
    packed = read_json(file).get("weights") if file.is_file() else None
    tensors: dict[str, Any] = (
        read_state(inside(folder, packed)) if packed else SafetensorsFolder(folder).tensors
    )
    for name, value in progress_bar(tensors.items(), desc=f"reading {folder.name}", unit="tensor"):
        stored, nbytes = str(value.dtype).removeprefix("torch."), value.nbytes
        if isinstance(value, TorchAOBaseTensor):
            stored = type(value).__name__
            nbytes = sum(getattr(value, part).nbytes for part in value.tensor_data_names)
        elif isinstance(value, Packed):
            stored = f"{value.bits} bits of {value.layout}, {stored}"
        num_bytes += nbytes
        if len(value.shape) != 2:
            continue
        if not value.dtype.is_floating_point:
            raise InputError(f"{name} in {folder} is {stored} and no weight; give another folder")
        dense = value.dequantize()
        levels, group_size = find_codes(dense)
        matrices.append(
            Matrix(
                name=name.removesuffix(".weight"),
                stored=stored,
                nbytes=nbytes,
                width=dense.shape[1],
                size=dense.numel(),
                zeros=int((dense == 0).sum()),
                levels=levels,
                group_size=group_size,
            )
        )
    sizes = {m.name: m.group_size for m in matrices if m.group_size}
    alike = named_alike(sizes, {m.name: m.width for m in matrices})
    matrices.sort(key=lambda m: re.sub(r"\d+", lambda number: number[0].zfill(9), m.name))
    return [replace(m, group_size=alike.get(m.name)) for m in matrices], num_bytes


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
        lines.append(f"| {m.name} | {m.levels or 'dense'} | {m.group_size or '-'} | {numbers} |")
    parts = []
    for kind, group in kinds.items():
        zeros = sum(m.zeros for m in group) / sum(m.size for m in group)
        parts.append(
            f"{len(group)} linears: {kind}" + f", {zeros:.0%} zeros" * bool(group[0].levels)
        )
    parts += [f"{m.name} {m.kind}" for m in matrices if m not in linears]
    return "\n".join([*lines, "", f"{'; '.join(parts)}; {num_bytes / 1e6:.1f} MB"])
