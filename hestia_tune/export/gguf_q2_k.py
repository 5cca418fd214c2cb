"""Packs weights in ggml's type Q2_K, which every llama.cpp runs: exact codes, rounded scales.

A block is 256 weights of one row in 16 runs of 16. It has two float16 numbers, d and dmin, and each
run has two integers, s and m, from 0 to 15. A weight is d * s * field - dmin * m, where the field
is 0 to 3. Here m = s, and dmin is d, or 1.5 * d with four levels, so a weight is d * s * (field -
1) or d * s * (field - 1.5). The codes are therefore exact. The scale of a run is rounded to the
nearest d * s, and d is chosen for the least squared error of the block's scales.

Blocks with one scale are rounded only as float16 rounds it. If the scales of a block differ, the
error is that of the best fraction with numbers up to 15, about one percent.
"""

import numpy as np

RUN = 16  # weights that share s and m
_LARGEST = 15
# The largest relative error of a scale. With more, codes of four levels could not be told apart.
TOLERANCE = 0.25


def pack(codes: np.ndarray, scales: np.ndarray, levels: int) -> np.ndarray:
    """Return the blocks as bytes, uint8 (out_features, blocks of a row, 84).

    Args:
        codes: The codes, int8 (out_features, in_features): -1 to 1, or -3, -1, 1 and 3.
        scales: The scales, float32 (out_features, groups). Each group has a multiple of 16 weights.
        levels: The number of codes. Two codes are a part of three.
    """
    (rows, width), distance = codes.shape, 2 if levels == 4 else 1
    runs = scales.repeat(width // RUN // scales.shape[1], axis=1).reshape(-1, 256 // RUN)
    d, s = _round(distance * runs, levels)
    # Half a block is 32 bytes. Byte i has the weights i, i + 32, i + 64 and i + 96 of the half.
    fields = ((codes + 2 * distance - 1) // distance).astype(np.uint8).reshape(-1, 2, 4, 32)
    packed = np.bitwise_or.reduce(fields << np.arange(0, 8, 2, dtype=np.uint8)[:, None], axis=2)
    d_min = d * np.float32(1.5 if levels == 4 else 1)
    halves = [half.astype("<f2").view(np.uint8) for half in (d, d_min)]
    parts = [s | s << 4, packed.reshape(len(s), 64), *halves]
    return np.concatenate(parts, axis=1).reshape(rows, width // 256, 84)


def _round(scales: np.ndarray, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return d (blocks, 1), float32, and s (blocks, 16), uint8, with d * s near the scales.

    Args:
        scales: The scales (blocks, 16), float32. A scale that is not 0 gets an s of at least 1.
        levels: The number of codes. With four, d gets 9 bits, so that float16 holds 1.5 * d.
    """
    largest = scales.max(1, keepdims=True)
    best = [np.zeros_like(largest), np.zeros_like(scales), np.full_like(largest, np.inf)]
    for k in range(1, _LARGEST + 1):  # s of the largest scale
        unit = np.where(largest > 0, largest, 1) / k
        s = np.clip(np.rint(scales / unit), scales > 0, _LARGEST)
        d = (scales * s).sum(1, keepdims=True) / np.maximum((s * s).sum(1, keepdims=True), 1)
        bits = d.astype(np.float16).view(np.uint16)
        d = ((bits + 2) & 0xFFFC if levels == 4 else bits).view(np.float16).astype(np.float32)
        error = ((d * s - scales) ** 2).sum(1, keepdims=True)
        is_better = error < best[2]
        pairs = zip((d, s, error), best, strict=True)
        best = [np.where(is_better, new, old) for new, old in pairs]
    return best[0], best[1].astype(np.uint8)
