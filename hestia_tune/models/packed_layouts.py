"""Reads the packed weights of two layouts of other programs, without these programs.

compressed-tensors, ``pack-quantized`` (vLLM, transformers):

    NAME.weight_packed   int32 (out_features, words): code + 2^(bits - 1)
    NAME.weight_scale    (out_features, groups)
    NAME.weight_shape    (2,): out_features, in_features

    weight = scale * code

MLX, ``affine``. config.json has its bits and group_size under ``quantization``:

    NAME.weight          uint32 (out_features, words)
    NAME.scales          (out_features, groups)
    NAME.biases          (out_features, groups)

    weight = scale * code + bias

Two more layouts have float8 weights with scales, which are multiplied in the same way. The model
then is what transformers loads on a CPU:

    fp8 (DeepSeek, Qwen)         NAME.weight_scale_inv (block rows, block columns)
    compressed-tensors,          NAME.weight_scale (out_features, 1), or one number
    ``float-quantized``

The first two put 32 / bits codes into a word, the first code into the lowest bits. Their codes have
2, 4 or 8 bits here. A product is computed in float32 and rounded to the dtype of the scales, as
these programs do. For ternary codes it is exact. Float8 weights become bfloat16.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hestia_tune.errors import InputError
from hestia_tune.tensors.bitpack import unpack_codes

_BITS = (2, 4, 8)


def is_float8(dtype: torch.dtype) -> bool:
    """Return whether a dtype is floating point with 8 bits, with which torch cannot compute."""
    return dtype.is_floating_point and dtype.itemsize == 1


def _words(width: int, bits: int) -> int:
    """Return how many words of 32 bits hold a row of codes."""
    return -(-width * bits // 32)


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedWeight:
    """Hold a weight as a file holds it.

    Attributes:
        layout: Name of the layout, for example "MLX".
        shape: (out_features, in_features).
        bits: Bits per code: 2, 4 or 8.
        codes: The words, (out_features, words), with 32 bits each.
        scale: The scales, (out_features, groups).
        bias: What is added to each group, (out_features, groups). None: the codes are signed.

    Raises:
        InputError: If the parts do not fit together, or a code has another number of bits than 2,
            4 or 8.
    """

    layout: str
    shape: torch.Size
    bits: int
    codes: Tensor
    scale: Tensor
    bias: Tensor | None = None

    def __post_init__(self):
        shapes = [tuple(part.shape) for part in self._parts()]
        rows, width = (*self.shape, 0, 0)[:2]
        fits = all(len(shape) == 2 and shape[0] == rows for shape in shapes) and width > 0
        fits = fits and self.codes.element_size() == 4 and self.bits in _BITS
        fits = fits and shapes[0][1] == _words(width, self.bits)
        if not fits or shapes[-1] != shapes[1] or not shapes[1][1] or width % shapes[1][1]:
            raise InputError(
                f"{self.layout} weights must have codes of 2, 4 or 8 bits in words of 32, and equal"
                f" groups; got the shapes {shapes} and {self.bits} bits for a weight "
                f"{tuple(self.shape)}; get it again, or give the model with dense weights"
            )

    def _parts(self) -> list[Tensor]:
        return [part for part in (self.codes, self.scale, self.bias) if part is not None]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the dense weight."""
        return self.scale.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self._parts())

    def dequantize(self) -> Tensor:
        """Return the dense weight in the dtype of the scales."""
        zero = 2 ** (self.bits - 1) if self.bias is None else 0
        codes = unpack_codes(self.codes.view(torch.uint8), self.shape[1], self.bits).float() - zero
        blocks = codes.unflatten(-1, (self.scale.shape[1], -1)) * self.scale.float().unsqueeze(-1)
        if self.bias is not None:
            blocks += self.bias.float().unsqueeze(-1)
        return blocks.flatten(1).to(self.scale.dtype)


@dataclass(frozen=True, eq=False, kw_only=True)
class Float8Weight:
    """Hold a float8 weight with its scales, as a file holds it.

    Attributes:
        layout: Name of the layout, for example "fp8".
        codes: The weight, float8 (out_features, in_features).
        scale: The scales: one number, (out_features, 1), or one for each block of ``block``.
        block: Rows and columns of a block. None: a scale holds for the matrix or for a row.

    Raises:
        InputError: If the scales do not fit the weight.
    """

    layout: str
    codes: Tensor
    scale: Tensor
    block: tuple[int, int] | None = None

    bits = 8
    dtype = torch.bfloat16

    def __post_init__(self):
        found, rows = tuple(self.scale.shape), len(self.codes)
        fitting = [(), (1,), (1, 1), (rows, 1), (rows,)]
        if self.block is not None:
            sides = zip(self.codes.shape, self.block, strict=False)
            fitting = [tuple(-(-side // size) for side, size in sides)]
        if self.codes.dim() != 2 or not is_float8(self.codes.dtype) or found not in fitting:
            raise InputError(
                f"{self.layout} weights must be float8 matrices whose scales have the shape "
                f"{fitting[-1]}; got {self.codes.dtype} {tuple(self.codes.shape)} and scales "
                f"{found}; get it again, or give the model with dense weights"
            )

    @property
    def shape(self) -> torch.Size:
        """Return (out_features, in_features)."""
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return self.codes.nbytes + self.scale.nbytes

    def dequantize(self) -> Tensor:
        """Return the dense weight in bfloat16."""
        (rows, columns), scale = self.codes.shape, self.scale.float()
        if self.block is not None:
            for dim, size in enumerate(self.block):
                scale = scale.repeat_interleave(size, dim)
            scale = scale[:rows, :columns]
        elif scale.dim() == 1 and len(scale) == rows:
            scale = scale.unsqueeze(1)
        return (self.codes.float() * scale).to(self.dtype)


Packed = PackedWeight | Float8Weight
# (quant_method, format) in config.json of the layouts that can be read, besides MLX's.
_LAYOUTS = (
    ("compressed-tensors", "pack-quantized"),
    ("compressed-tensors", "float-quantized"),
    ("fp8", None),
)


def dense_config(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the content of config.json as it is for dense weights.

    Args:
        config: The content of config.json. It is changed.
        folder: Its folder, for the error.

    Raises:
        InputError: If the weights are in a layout that cannot be read.
    """
    config.pop("quantization", None)  # MLX writes both keys
    layout = config.pop("quantization_config", None) or {}
    kind = layout.get("quant_method")
    if kind and (kind, layout.get("format")) not in _LAYOUTS:
        raise InputError(
            f"{folder} is quantized ({kind}); give a folder with dense weights, or in the layout of"
            " MLX, of fp8, or of compressed-tensors (pack-quantized, float-quantized)"
        )
    return config


def find_packed(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> dict[str, Tensor | Packed]:
    """Replace the parts of packed weights by one `PackedWeight` or `Float8Weight` each.

    Args:
        tensors: Name -> tensor of all files of a folder.
        config: The content of config.json.

    Returns:
        Name -> value of each weight. A packed weight has the name of the dense weight.

    Raises:
        InputError: If a packed weight lacks a part, or cannot be read.
    """
    entries: dict[str, Tensor | Packed] = dict(tensors)
    mlx = config.get("quantization")
    mlx = mlx if isinstance(mlx, Mapping) else {}
    others = config.get("quantization_config")
    others = others if isinstance(others, Mapping) else {}
    block = tuple(others.get("weight_block_size") or (128, 128))

    def take(name: str) -> Tensor:
        if name not in tensors:
            raise InputError(f"{name} is missing beside the other parts of its weight")
        del entries[name]
        return tensors[name]

    for name in tensors:
        stem, _, kind = name.rpartition(".weight_scale")
        weight = tensors.get(f"{stem}.weight")
        if kind in ("", "_inv") and weight is not None and is_float8(weight.dtype):
            if not others:
                raise InputError(
                    f"{stem}.weight is float8 with scales, but config.json has no "
                    "quantization_config that says how they multiply; copy the model's config.json"
                )
            parts = {"layout": str(others.get("quant_method")), "codes": weight}
            parts |= {"scale": take(name)}
            by_block = kind == "_inv" and parts["scale"].dim() == 2
            entries[f"{stem}.weight"] = Float8Weight(**parts, block=block if by_block else None)
            continue
        if others.get("quant_method") == "fp8" and name.endswith(".activation_scale"):
            del entries[name]  # of activations, which are not rounded here
            continue
        stem = name.removesuffix("_packed")
        if name.endswith(".weight_packed"):
            if odd := {f"{stem}_zero_point", f"{stem}_g_idx"} & tensors.keys():
                raise InputError(f"{min(odd)}: only symmetric codes in their order can be read")
            shape = torch.Size(take(f"{stem}_shape").flatten().tolist())
            parts: dict[str, Any] = {"codes": take(name), "scale": take(f"{stem}_scale")}
            words = parts["codes"].shape[-1]
            parts["bits"] = next((b for b in _BITS if _words(shape[-1:].numel(), b) == words), 0)
            entries[stem] = PackedWeight(layout="compressed-tensors", shape=shape, **parts)
        elif name.endswith(".scales") and mlx:
            stem = name.removesuffix(".scales")
            own = mlx.get(stem) or mlx  # a layer may have its own group_size and bits
            parts = {"codes": take(f"{stem}.weight"), "scale": take(name)}
            parts |= {"bias": take(f"{stem}.biases"), "bits": own.get("bits", 4)}
            width = parts["scale"].shape[-1] * own.get("group_size", 64)
            shape = torch.Size([len(parts["codes"]), width])
            entries[f"{stem}.weight"] = PackedWeight(layout="MLX", shape=shape, **parts)
    return entries
