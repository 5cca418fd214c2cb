"""Packing of ternary codes into the block types of GGUF, and the exact way back.

Our own packing, because a runtime's quantizer would choose scales of its own; here the trained
scale goes into the file as it is. A block is a run of weights of one row with one fp16 scale:

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

Everything is a pure function on numpy arrays, one row of an array per block; nothing here needs
the gguf package.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hestia_tune.methods.granularity import GroupSize, block_view

FP16_MIN_NORMAL, FP16_MAX = 2.0**-14, 65504.0


def _bits(values: np.ndarray, width: int) -> np.ndarray:
    """ORs (n, bytes, per_byte) small unsigned values into bytes, the first in the lowest bits."""
    packed = np.zeros(values.shape[:-1], np.uint8)
    for index in range(values.shape[-1]):
        packed |= values[..., index].astype(np.uint8) << np.uint8(width * index)
    return packed


def _unbits(packed: np.ndarray, width: int) -> np.ndarray:
    """The inverse of `_bits`: (..., bytes) to (..., bytes, 8 / width)."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    return (packed[..., None] >> shifts) & np.uint8(2**width - 1)


def _pack_q2_0(codes: np.ndarray) -> np.ndarray:
    """Byte i holds code + 1 of the weights 4i to 4i + 3."""
    return _bits((codes + 1).reshape(len(codes), -1, 4), 2)


def _unpack_q2_0(data: np.ndarray) -> np.ndarray:
    return _unbits(data, 2).reshape(len(data), -1).astype(np.int8) - 1


def _pack_q4_0(codes: np.ndarray) -> np.ndarray:
    """Byte i holds code + 8 of the weights i and i + 16."""
    return _bits((codes + 8).reshape(len(codes), 2, 16).transpose(0, 2, 1), 4)


def _unpack_q4_0(data: np.ndarray) -> np.ndarray:
    return _unbits(data, 4).transpose(0, 2, 1).reshape(len(data), -1).astype(np.int8) - 8


def _pack_tq2_0(codes: np.ndarray) -> np.ndarray:
    """Byte i of either half of 128 weights holds code + 1 of its weights i, 32+i, 64+i, 96+i."""
    halves = (codes + 1).reshape(len(codes), 2, 4, 32)
    return _bits(halves.transpose(0, 1, 3, 2), 2).reshape(len(codes), 64)


def _unpack_tq2_0(data: np.ndarray) -> np.ndarray:
    halves = _unbits(data.reshape(len(data), 2, 32), 2)
    return halves.transpose(0, 1, 3, 2).reshape(len(data), -1).astype(np.int8) - 1


# TQ1_0: runs of (bytes, trits per byte); trit t of byte i in a run is weight t * bytes + i of it.
_TQ1_0_RUNS = ((32, 5), (16, 5), (4, 4))
_POWERS = np.array([81, 27, 9, 3, 1], np.uint16)


def _pack_tq1_0(codes: np.ndarray) -> np.ndarray:
    """Five trits a byte, the first the most significant, as a fraction of 243 in 256ths.

    The byte is the number scaled by 256/243 and rounded up, so that readers get a trit from a
    multiplication by 3 and the overflow.
    """
    parts, start = [], 0
    for width, trits in _TQ1_0_RUNS:
        run = (codes[:, start : start + width * trits] + 1).astype(np.uint16)
        number = np.einsum("ntw,t->nw", run.reshape(-1, trits, width), _POWERS[:trits])
        parts.append((number.astype(np.uint32) * 256 + 242) // 243)
        start += width * trits
    return np.concatenate(parts, 1).astype(np.uint8)


def _unpack_tq1_0(data: np.ndarray) -> np.ndarray:
    parts, start = [], 0
    for width, trits in _TQ1_0_RUNS:
        number = (data[:, start : start + width].astype(np.uint32) * 243) >> 8
        run = (number[:, None, :] // _POWERS[:trits, None]) % 3
        parts.append(run.reshape(len(data), -1))
        start += width
    return np.concatenate(parts, 1).astype(np.int8) - 1


@dataclass(frozen=True, kw_only=True)
class BlockType:
    """One block type of ggml.

    Attributes:
        name, ggml_id: the type of the tensor in the file.
        file_type: value of ``general.file_type`` for a model made mostly of it.
        block: weights that share a block; num_bytes: its size.
        scale_first: whether the scale stands before the codes.
    """

    name: str
    ggml_id: int
    file_type: int
    block: int
    num_bytes: int
    scale_first: bool
    pack_codes: Callable[[np.ndarray], np.ndarray]
    unpack_codes: Callable[[np.ndarray], np.ndarray]

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / self.block

    def fits(self, in_features: int, group_size: GroupSize) -> bool:
        """Whether blocks tile the rows and none straddles two groups."""
        group = in_features if isinstance(group_size, str) else group_size
        return in_features % self.block == 0 and group % self.block == 0

    def pack(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Blocks as bytes.

        Args:
            codes: int8 (n, block) in {-1, 0, 1}.
            scales: float16 (n,).

        Returns:
            uint8 (n, num_bytes).
        """
        parts = [scales.astype("<f2", copy=False)[:, None].view(np.uint8), self.pack_codes(codes)]
        return np.concatenate(parts if self.scale_first else parts[::-1], 1)

    def unpack(self, data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The inverse of `pack`: int8 codes (n, block) and float16 scales (n,)."""
        cut = 2 if self.scale_first else self.num_bytes - 2
        first, second = data[:, :cut], data[:, cut:]
        scales, codes = (first, second) if self.scale_first else (second, first)
        return self.unpack_codes(codes), np.ascontiguousarray(scales).view("<f2")[:, 0]


def _block_type(name, ggml_id, file_type, block, num_bytes, scale_first, pack, unpack) -> BlockType:
    return BlockType(
        name=name,
        ggml_id=ggml_id,
        file_type=file_type,
        block=block,
        num_bytes=num_bytes,
        scale_first=scale_first,
        pack_codes=pack,
        unpack_codes=unpack,
    )


# Smallest first.
BLOCK_TYPES = {
    block_type.name: block_type
    for block_type in (
        _block_type("TQ1_0", 34, 36, 256, 54, False, _pack_tq1_0, _unpack_tq1_0),
        _block_type("TQ2_0", 35, 37, 256, 66, False, _pack_tq2_0, _unpack_tq2_0),
        _block_type("Q2_0", 42, 41, 64, 18, True, _pack_q2_0, _unpack_q2_0),
        _block_type("Q4_0", 2, 2, 32, 18, True, _pack_q4_0, _unpack_q4_0),
    )
}


def choose_block_type(
    preferences: tuple[str, ...], in_features: int, group_size: GroupSize, name: str
) -> BlockType:
    """The first of ``preferences`` that holds such groups exactly.

    Raises:
        ValueError: if none does; lists the block types that can and what each needs.
    """
    for candidate in preferences:
        if BLOCK_TYPES[candidate].fits(in_features, group_size):
            return BLOCK_TYPES[candidate]
    able = [t.name for t in BLOCK_TYPES.values() if t.fits(in_features, group_size)]
    needs = ", ".join(f"{t.name} multiples of {t.block}" for t in BLOCK_TYPES.values())
    remedy = "no GGUF block type holds it; leave it out of quantized, to be stored densely"
    if able:
        remedy = f"use block_type {' or '.join(able)}"
    raise ValueError(
        f"group_size {group_size} of {name} (in_features {in_features}) does not fit "
        f"{' or '.join(preferences)}: a block may not straddle two scales, and in_features and an "
        f"int group_size must both be multiples of the block ({needs}); {remedy}"
    )


def split_ternary(
    weight: torch.Tensor, group_size: GroupSize, name: str = "the weight"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a dense hard weight, exactly: weight == codes * scale.

    The scale of a group is its largest magnitude; a group of zeros has scale 0.

    Args:
        weight: (out_features, in_features), floating point, every group scale * {-1, 0, 1}.
        group_size: a positive int, "channel" or "tensor".
        name: the layer in error messages.

    Returns:
        codes: int8, (out_features, in_features).
        scales: float32, (out_features, in_features / group_size), (out_features, 1) for
            "channel", (1, 1) for "tensor".

    Raises:
        ValueError: if a group is not ternary or not finite; names the first such group.
    """
    blocks = block_view(weight, group_size)
    magnitude = blocks.abs()
    scale = magnitude.amax(-1, keepdim=True)
    bad = ((magnitude != 0) & (magnitude != scale)).any(-1) | ~scale.isfinite().squeeze(-1)
    if bad.any():
        row, group = bad.nonzero()[0].tolist()
        values = magnitude[row, group].unique().tolist()
        raise ValueError(
            f"a quantized weight must be scale * {{-1, 0, 1}} in every group; {name} has the "
            f"magnitudes {values[:4]} in group {group} of row {row} (group_size {group_size}); "
            "quantize it first, or pass the group_size that it was quantized with"
        )
    codes = blocks.sign().to(torch.int8).view(weight.shape)
    return codes, scale.squeeze(-1).float()


def to_fp16_scales(scales: torch.Tensor, name: str) -> torch.Tensor:
    """float32 scales (rows, groups) as float16, every value kept.

    Raises:
        ValueError: naming layer, group and scale, if one is neither 0 nor exact in fp16's normal
            range.
    """
    half = scales.to(torch.float16)
    in_range = (scales >= FP16_MIN_NORMAL) & (scales <= FP16_MAX)
    bad = (scales != 0) & ~(in_range & (half.float() == scales))
    if bad.any():
        row, group = bad.nonzero()[0].tolist()
        value = scales[row, group].item()
        raise ValueError(
            f"a GGUF scale is a float16 of the normal range ({FP16_MIN_NORMAL:.3g} to "
            f"{FP16_MAX:g}); group {group} of row {row} of {name} has the scale {value:.9g}, which "
            "would not come back as it is; leave that layer out of quantized, to be stored densely"
        )
    return half


def block_scales(scales: torch.Tensor, shape: torch.Size, block: int) -> torch.Tensor:
    """Scales (rows, groups) repeated for every block: (out_features, in_features / block)."""
    out_features, per_row = shape[0], shape[1] // block
    if scales.shape[0] > 1 or out_features == 1:
        return scales.repeat_interleave(per_row // scales.shape[1], 1)
    return scales.expand(out_features, per_row)
