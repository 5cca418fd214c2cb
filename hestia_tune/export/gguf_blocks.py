"""The tensor types of a GGUF file: packing of ternary codes, and the exact way back.

The gguf package packs and unpacks, but for two types. Its Q4_0 chooses scales of its own, and it
does not know Q2_0 (in 0.19); both are packed here. A block is a run of weights of one row with one
fp16 scale, and the trained scale goes into it as it is:

    type    block  bytes  bits per weight  holds exactly
    TQ1_0     256     54           1.6875  groups that are multiples of 256; whole rows likewise
    TQ2_0     256     66           2.0625  the same
    Q2_0       64     18           2.25    multiples of 64
    Q4_0       32     18           4.5     multiples of 32

"Whole rows" are the granularities "channel" and "tensor": the scale is repeated in every block,
so only the row length has to be a multiple of the block. fp16 holds every bfloat16 scale of its
normal range (11 significant bits against 8); a scale outside it is an error, never rounded.
The layouts are those of ggml's ``ggml-common.h``; type 42 (Q2_0, block of 64) is llama.cpp's own
since build b9916 of July 2026, some forks use the same number for a block of 128.
"""

from dataclasses import dataclass

import numpy as np
import torch

from hestia_tune.export.source import is_exact
from hestia_tune.methods.granularity import GroupSize


@dataclass(frozen=True)
class TensorType:
    """One type of ggml.

    Attributes:
        name, ggml_id: the type of the tensor in the file.
        file_type: value of ``general.file_type`` for a model made mostly of it.
        block: weights that share a block, 1 for floats; num_bytes: its size.
    """

    name: str
    ggml_id: int
    file_type: int
    block: int
    num_bytes: int

    def fits(self, in_features: int, group_size: GroupSize) -> bool:
        """Whether blocks tile the rows and none straddles two groups."""
        group = in_features if isinstance(group_size, str) else group_size
        return in_features % self.block == 0 and group % self.block == 0

    def size_of(self, weights: int) -> int:
        """Bytes of so many weights."""
        return weights // self.block * self.num_bytes

    def pack(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Blocks as bytes: uint8 (rows, in_features / block, num_bytes).

        Args:
            codes: int8 (rows, in_features) in {-1, 0, 1}.
            scales: float16 (rows, groups), each group of whole blocks.
        """
        blocks_in_row = codes.shape[1] // self.block
        scales = scales.repeat(blocks_in_row // scales.shape[1], axis=1)
        shape = (*scales.shape, self.num_bytes)
        scales = scales.astype("<f2")[..., None].view(np.uint8)
        if self.name.startswith("TQ"):
            import gguf

            kind = gguf.GGMLQuantizationType(self.ggml_id)
            blocks = gguf.quants.quantize(codes.astype(np.float32), kind).reshape(shape)
            blocks[..., -2:] = scales
            return blocks
        if self.name == "Q2_0":  # byte i holds code + 1 of the weights 4i to 4i + 3
            fields, width = (codes + 1).reshape(*shape[:2], 16, 4), 2
        else:  # Q4_0: byte i holds code + 8 of the weights i and i + 16
            fields, width = (codes + 8).reshape(*shape[:2], 2, 16).swapaxes(-1, -2), 4
        shifts = np.arange(0, 8, width, dtype=np.uint8)
        packed = np.bitwise_or.reduce(fields.astype(np.uint8) << shifts, axis=-1)
        return np.concatenate([scales, packed], axis=-1)

    def unpack(self, data: np.ndarray) -> np.ndarray:
        """Weights, float32, from the bytes of their blocks; one-dimensional both."""
        if self.name != "Q2_0":
            import gguf

            return gguf.quants.dequantize(data, gguf.GGMLQuantizationType(self.ggml_id))
        blocks = data.reshape(-1, self.num_bytes)
        scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
        fields = (blocks[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & np.uint8(3)
        codes = fields.reshape(len(blocks), self.block).astype(np.int8) - 1
        return (codes * scales).reshape(-1)


# Smallest first.
BLOCK_TYPES = {
    "TQ1_0": TensorType("TQ1_0", 34, 36, 256, 54),
    "TQ2_0": TensorType("TQ2_0", 35, 37, 256, 66),
    "Q2_0": TensorType("Q2_0", 42, 41, 64, 18),
    "Q4_0": TensorType("Q4_0", 2, 2, 32, 18),
}
# In the order in which they are tried.
_DENSE_TYPES = {
    torch.float16: TensorType("F16", 1, 1, 1, 2),
    torch.bfloat16: TensorType("BF16", 30, 32, 1, 2),
    torch.float32: TensorType("F32", 0, 0, 1, 4),
}


def choose_block_type(
    preferences: tuple[str, ...], in_features: int, group_size: GroupSize, name: str
) -> TensorType:
    """The first of ``preferences`` that holds such groups exactly; ValueError if none does."""
    able = [t.name for t in BLOCK_TYPES.values() if t.fits(in_features, group_size)]
    for candidate in preferences:
        if candidate in able:
            return BLOCK_TYPES[candidate]
    remedy = "no GGUF block type holds it; leave it out of quantized, to be stored densely"
    if able:
        remedy = f"use block_type {' or '.join(able)}"
    raise ValueError(
        f"a block of {' or '.join(preferences)} would straddle rows or scales of {name} "
        f"(in_features {in_features}, group_size {group_size}); {remedy}"
    )


def choose_dense_type(tensor: torch.Tensor, name: str) -> tuple[torch.dtype, TensorType]:
    """The first floating type that holds a tensor; ValueError, naming it, if none does."""
    for dtype, kind in _DENSE_TYPES.items():
        if is_exact(tensor, dtype) and (tensor.dim() > 1 or kind.name == "F32"):
            return dtype, kind
    raise ValueError(f"GGUF export holds up to float32; {name} has more digits")


def to_fp16_scales(scales: torch.Tensor, name: str) -> torch.Tensor:
    """Scales (rows, groups) as float16, every value kept.

    Raises:
        ValueError: naming layer, group and scale, if one is neither 0 nor exact in fp16's normal
            range.
    """
    half, smallest = scales.to(torch.float16), torch.finfo(torch.float16).smallest_normal
    bad = (half.to(scales.dtype) != scales) | ((scales != 0) & (scales < smallest))
    if bad.any():
        row, group = bad.nonzero()[0].tolist()
        raise ValueError(
            f"a GGUF scale is a float16 of the normal range; group {group} of row {row} of {name} "
            f"has the scale {scales[row, group].item():.9g}, which would not come back as it is; "
            "leave that layer out of quantized, to be stored densely"
        )
    return half
