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

Both put 32 / bits codes into a word, the first code into the lowest bits. Codes have 2, 4 or 8 bits
here. A product is computed in float32 and rounded to the dtype of the scales, as these programs do.
For ternary codes it is exact.
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
    if kind and (kind, layout.get("format")) != ("compressed-tensors", "pack-quantized"):
        raise InputError(
            f"{folder} is quantized ({kind}); give a folder with dense weights, or in the layout of"
            " MLX or of compressed-tensors (pack-quantized)"
        )
    return config


def find_packed(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> dict[str, Tensor | PackedWeight]:
    """Replace the parts of packed weights by one `PackedWeight` each.

    Args:
        tensors: Name -> tensor of all files of a folder.
        config: The content of config.json.

    Returns:
        Name -> value of each weight. A packed weight has the name of the dense weight.

    Raises:
        InputError: If a packed weight lacks a part, or cannot be read.
    """
    entries: dict[str, Tensor | PackedWeight] = dict(tensors)
    mlx = config.get("quantization")
    mlx = mlx if isinstance(mlx, Mapping) else {}

    def take(name: str) -> Tensor:
        if name not in tensors:
            raise InputError(f"{name} is missing beside the other parts of its weight")
        del entries[name]
        return tensors[name]

    for name in tensors:
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
