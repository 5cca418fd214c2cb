"""Writing a hard model as a dense Hugging Face folder in bfloat16, which everything loads.

Every ternary weight is gamma * {-1, 0, 1} with a bfloat16 gamma, so bfloat16 holds it exactly; it
takes 16 bits per weight all the same. Either the folder is a hard model already, and it is checked
that it is one and that bfloat16 loses nothing; or (``quantize=True``) its linears are made hard on
the way by the training's own rule, without any training: naive ternarization, the baseline that
the training has to beat, and the input of the other exports.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hestia_tune.config import nearest
from hestia_tune.export.folder import (
    Entry,
    check_target,
    read_config,
    read_description,
    write_folder,
)
from hestia_tune.export.gguf_blocks import split_ternary
from hestia_tune.export.source import SafetensorsFolder, row_chunks
from hestia_tune.functional import hard_ternary
from hestia_tune.methods.granularity import GroupSize, check_divides, validate_group_size

_COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def write_huggingface(
    folder: str | Path,
    target: str | Path,
    *,
    quantized: Mapping[str, GroupSize],
    quantize: bool = False,
    compute_dtype: torch.dtype = torch.bfloat16,
    overwrite: bool = False,
    description: Mapping[str, Any] | None = None,
    shard_bytes: int = 5_000_000_000,
) -> dict[str, Any]:
    """Writes a Hugging Face model of any architecture as dense bfloat16 safetensors.

    Args:
        folder: Hugging Face folder: config.json, safetensors of any floating dtype, tokenizer.
        target: the folder to write; its parents are made.
        quantized: name in the safetensors -> group_size ("channel" and "tensor" included) of every
            ternary weight.
        quantize: False: ``folder`` is a hard model, and what is written equals it, whatever its
            dtype. True: it is a pretrained or latent model; the weights in ``quantized`` are made
            hard from their value in ``compute_dtype``, as the training's forward pass does, and
            the others are rounded to bfloat16.
        compute_dtype: bfloat16, float16 or float32; read only with ``quantize``.
        overwrite: replace a model folder that is there, once the new one is complete.
        description: content of ``hestia.json``: how the weights were made. None copies that of
            a hard model, if it has one.
        shard_bytes: largest size of one safetensors file, unless one tensor is larger.

    Returns:
        The sizes that `hestia_tune.export.folder.write_folder` lists.

    Raises:
        FileExistsError, FileNotFoundError: the target exists; config, weights or tokenizer do not.
        ValueError: on a name that the folder lacks, a group size that does not fit, without
            ``quantize`` a weight that is not ternary or that bfloat16 would round, an option out
            of range.
        OSError: if the disk is full.
        RuntimeError: if the files read back are not the model. In all cases nothing is left behind,
            and a folder that was to be replaced is still there.
    """
    folder, target = Path(folder), Path(target)
    if compute_dtype not in _COMPUTE_DTYPES:
        raise ValueError(f"compute_dtype must be one of {_COMPUTE_DTYPES}; got {compute_dtype}")
    if shard_bytes <= 0:
        raise ValueError(f"shard_bytes must be positive; got {shard_bytes}")
    if quantize and not quantized:
        raise ValueError("quantize=True needs the names of weights in quantized; got none")
    check_target(folder, target, overwrite)
    config = read_config(folder)
    source = SafetensorsFolder(folder)
    check_quantized(source, quantized)
    rule = partial(_quantized, compute_dtype=compute_dtype) if quantize else _verified
    entries = []
    for name in weight_names(source):
        group_size = quantized.get(name)
        if group_size is not None:
            load = partial(rule, source, name, group_size)
        elif quantize:
            load = partial(_rounded, source, name)
        else:
            load = partial(exact_bfloat16, source, name)
        entries.append(dense_entry(source, name, load, quantized=group_size is not None))
    if description is None and not quantize:
        description = read_description(folder)
    return write_folder(
        folder,
        target,
        entries,
        config=bfloat16_config(config),
        description=description,
        shard_bytes=shard_bytes,
    )


def check_quantized(source: SafetensorsFolder, quantized: Mapping[str, GroupSize]) -> None:
    """Raises ValueError if a name is not in the folder or its shape does not take the groups."""
    for name, group_size in quantized.items():
        validate_group_size(group_size)
        if name not in source.shapes:
            hint = nearest(name, source.shapes)
            raise ValueError(f"quantized names {name}, which the safetensors do not hold{hint}")
        shape = source.shapes[name]
        if len(shape) != 2:
            raise ValueError(
                f"only matrices can be quantized; {name} has the shape {tuple(shape)}; leave it "
                "out of quantized"
            )
        check_divides(group_size, shape[1], name)


def weight_names(source: SafetensorsFolder) -> list[str]:
    """All tensors but the rotary buffers of old checkpoints, which are computed when loading."""
    return [name for name in source.shapes if "rotary_emb." not in name]


def bfloat16_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` of a model whose weights are bfloat16, for any transformers."""
    config = dict(config) | {"torch_dtype": "bfloat16"}
    config.pop("dtype", None)
    return config


def dense_entry(
    source: SafetensorsFolder, name: str, load: Callable[[], torch.Tensor], *, quantized: bool
) -> Entry:
    """A tensor that is written as it is; ``load`` gives it in bfloat16."""
    shape = source.shapes[name]
    return Entry(
        source=name,
        quantized=quantized,
        num_weights=shape.numel(),
        parts={name: (torch.bfloat16, shape)},
        encode=lambda: {name: load()},
        holds=lambda parts: torch.equal(parts[name], load()),
    )


def exact_bfloat16(source: SafetensorsFolder, name: str) -> torch.Tensor:
    """A tensor of a hard model in bfloat16; ValueError if that would round a value."""
    tensor = _read_float(source, name)
    rounded = tensor.to(torch.bfloat16)
    if rounded.dtype != tensor.dtype:
        pairs = zip(row_chunks(tensor), row_chunks(rounded), strict=True)
        if not all((old == new.to(old.dtype)).all() for old, new in pairs):
            raise ValueError(
                f"a hard model is exact in bfloat16; {name} ({tensor.dtype}) is not; save the "
                "model in bfloat16 and evaluate that one, or pass quantize=True for a model that "
                "is not hard yet"
            )
    return rounded


def _read_float(source: SafetensorsFolder, name: str) -> torch.Tensor:
    tensor = source.read(name)
    if not tensor.is_floating_point():
        raise ValueError(f"weights must be floating point; {name} is {tensor.dtype}; remove it")
    return tensor


def _rounded(source: SafetensorsFolder, name: str) -> torch.Tensor:
    return _read_float(source, name).to(torch.bfloat16)


def _verified(source: SafetensorsFolder, name: str, group_size: GroupSize) -> torch.Tensor:
    weight = exact_bfloat16(source, name)
    split_ternary(weight, group_size, name)
    return weight


def _quantized(
    source: SafetensorsFolder, name: str, group_size: GroupSize, *, compute_dtype: torch.dtype
) -> torch.Tensor:
    weight = _read_float(source, name).to(compute_dtype)
    return hard_ternary(weight, group_size=group_size).to(torch.bfloat16)
