"""Packed weights in safetensors files.

torchao has a safetensors format of its own, but only for the tensors in a list that is private to
its prototype; joining it would mean writing into that module. The layout here is plain enough to be
read without this package:

    a packed weight NAME is two entries:
        NAME.qdata    uint8, its codes in one of the two packings of `bitpack`: ternary ones
                      plus 1, in {0, 1, 2}; powers of i as they are, in {0, 1, 2, 3}
        NAME.scale    bfloat16, multiplies the codes of a block
    any other tensor is stored under its name as it is
    the header's metadata has the key "hestia_tune", a JSON document:
        {"format_version": 1, "packed": {NAME: {"shape": [out_features, in_features],
         "block_size": [rows, columns], "dtype": "bfloat16", "packing": "2bit" or "base3"}}}
    a complex weight has "kind": "fairy2i" there, which a ternary one lacks, and no "block_size":
    its parts have the shapes that `fairy2i_tensor` documents

Powers of i fill 2 bits and are always stored so. For ternary codes base 3 takes a fifth less (0.216
bytes a weight at group size 128) and more time to read; in memory a tensor has 2-bit codes either
way. Files are written under a temporary name, then renamed.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hestia_tune.tensors.bitpack import pack2, pack_base3, unpack_base3
from hestia_tune.tensors.fairy2i_tensor import Fairy2iTensor
from hestia_tune.tensors.ternary_tensor import TernaryTensor

FORMAT_VERSION = 1
METADATA_KEY = "hestia_tune"
PACKINGS = ("2bit", "base3")
KIND_FAIRY2I = "fairy2i"
_PARTS = TernaryTensor.tensor_data_names  # those of a Fairy2iTensor as well
PackedTensor = TernaryTensor | Fairy2iTensor


def save_safetensors(
    state_dict: Mapping[str, torch.Tensor],
    path: str | Path,
    metadata: Mapping[str, str] | None = None,
    *,
    packing: Literal["2bit", "base3"] = "2bit",
) -> None:
    """Writes plain tensors, TernaryTensors and Fairy2iTensors to one safetensors file.

    Args:
        state_dict: name -> tensor. Tensors that share memory are each written out.
        path: of the file; one that exists is replaced when the new one is complete.
        metadata: more entries of the header.
        packing: of the ternary codes in the file.

    Raises:
        TypeError: on another kind of tensor, such as a DTensor, or the transpose of a packed one.
        ValueError: on another packing, two entries of one name, or a reserved key of ``metadata``.
        OSError: if the file cannot be written; nothing is left of it.
    """
    if packing not in PACKINGS:
        raise ValueError(f"packing must be one of {', '.join(PACKINGS)}; got {packing!r}")
    if METADATA_KEY in (metadata or {}):
        raise ValueError(f"the metadata key {METADATA_KEY!r} is the format's own; use another")
    entries, packed = {}, {}
    for name, tensor in state_dict.items():
        tensor = tensor.detach()
        new = {name: tensor}
        if isinstance(tensor, PackedTensor) and not tensor.is_transposed:
            packed[name], qdata = _layout_of(tensor, packing)
            new = {f"{name}.qdata": qdata, f"{name}.scale": tensor.scale}
        elif type(tensor) is not torch.Tensor:
            raise TypeError(
                f"{name} must be a plain tensor or a TernaryTensor or Fairy2iTensor that is not "
                f"transposed; got {type(tensor).__name__}; gather or transpose it first"
            )
        for key, value in new.items():
            if key in entries:
                raise ValueError(f"two tensors would be stored as {key}; rename one")
            entries[key] = value
    document = {"format_version": FORMAT_VERSION, "packed": packed}
    header = {"format": "pt"} | dict(metadata or {}) | {METADATA_KEY: json.dumps(document)}
    _write(_unshared(entries), Path(path), header)


def _layout_of(tensor: PackedTensor, packing: str) -> tuple[dict, torch.Tensor]:
    """A packed weight's entry in the header, and its codes as they are stored."""
    layout = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    if isinstance(tensor, Fairy2iTensor):
        return layout | {"kind": KIND_FAIRY2I, "packing": "2bit"}, tensor.qdata
    qdata = tensor.qdata if packing == "2bit" else pack_base3(tensor.codes() + 1)
    return layout | {"block_size": list(tensor.block_size), "packing": packing}, qdata


def _unshared(entries: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous tensors, no two in the same memory, as safetensors wants them."""
    seen: set[int] = set()
    result = {}
    for name, tensor in entries.items():
        value = tensor.contiguous()
        if value.untyped_storage().data_ptr() in seen:
            value = value.clone()
        seen.add(value.untyped_storage().data_ptr())
        result[name] = value
    return result


def _write(entries: dict[str, torch.Tensor], path: Path, header: dict[str, str]) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        save_file(entries, temporary, metadata=header)
        os.replace(temporary, path)
    except (SafetensorError, OSError) as error:
        raise OSError(f"cannot write {path}: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def load_safetensors(
    path: str | Path, device: str | torch.device = "cpu"
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Reads what `save_safetensors` wrote.

    Returns:
        The state dict in the file's order, packed weights as TernaryTensors and
        Fairy2iTensors; and the header's other metadata.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no safetensors file, not written by `save_safetensors`, of a later
            format version, or its parts do not fit together; the message names the tensor.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the file that was written")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            header = dict(file.metadata() or {})
            packed = _packed_of(header.pop(METADATA_KEY, None))
            entries = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        state_dict = {}
        for name, layout in packed.items():
            state_dict[name] = _restore(name, layout, entries)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as packed weights: {error}") from None
    header.pop("format", None)
    return entries | state_dict, header


def _packed_of(text: str | None) -> dict[str, dict]:
    if text is None:
        raise ValueError(f"its metadata has no {METADATA_KEY!r}; it was written by something else")
    document = json.loads(text)
    version = document.get("format_version") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(f"format_version must be {FORMAT_VERSION}; got {version!r}")
    if not isinstance(document.get("packed"), dict):
        raise ValueError("its list of packed weights is missing")
    return document["packed"]


def _restore(name: str, layout: dict, entries: dict[str, torch.Tensor]) -> PackedTensor:
    """The packed weight ``name``; takes its parts out of ``entries``."""
    if not isinstance(layout, dict):
        raise ValueError(f"{name}: its layout must be a mapping; got {layout!r}")
    try:
        qdata, scale = (entries.pop(f"{name}.{part}") for part in _PARTS)
        kind, packing = layout.get("kind"), layout["packing"]
        shape, dtype = layout["shape"], getattr(torch, layout["dtype"])
        if kind not in (None, KIND_FAIRY2I):
            raise ValueError(f"unknown kind {kind!r}; a later version wrote it")
        if packing not in (PACKINGS if kind is None else PACKINGS[:1]):
            raise ValueError(f"unknown packing {packing!r}")
        if kind == KIND_FAIRY2I:
            return Fairy2iTensor(qdata, scale, shape, dtype)
        if packing == "base3":
            fits = qdata <= 242
            qdata = pack2(unpack_base3(qdata, shape[-1]))
        else:
            # No field has both bits set.
            fits = (qdata & qdata >> 1 & 0b01010101) == 0
        if not fits.all():
            raise ValueError("no ternary codes but others are in it; the file is damaged")
        return TernaryTensor(qdata, scale, layout["block_size"], shape, dtype)
    except KeyError as error:
        raise ValueError(f"{name} lacks {error}") from None
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{name}: {error}") from None
