"""Packing of small unsigned codes into bytes.

Two layouts, both along the last axis, which is padded with zeros to a whole number of bytes:

    2 bits   byte j holds codes 4j, 4j+1, 4j+2, 4j+3 in bits 0-1, 2-3, 4-5, 6-7 (little end first)
    base 3   byte j holds codes 5j, ..., 5j+4 as sum of code·3^i, at most 242 (little end first)

The first is what tensors compute from: any group of 4 columns is whole bytes, and a code is a shift
and a mask away. The second saves a fifth (1.6 bits a code, the bound being log2(3) = 1.585) but
needs divisions, so it is for files only. Both are plain elementwise tensor operations: they run on
any device, the meta device included, and fuse under ``torch.compile``.
"""

import torch
import torch.nn.functional as F

CODES_PER_BYTE = 4
TRITS_PER_BYTE = 5
_POWERS_OF_3 = (1, 3, 9, 27, 81)


def packed_width(width: int) -> int:
    """Bytes that `pack2` needs for ``width`` codes."""
    return -(-width // CODES_PER_BYTE)


def pack2(codes: torch.Tensor) -> torch.Tensor:
    """Packs codes 0..3, four to a byte.

    Args:
        codes: (..., width), any integer dtype, values 0..3 (not checked).

    Returns:
        uint8 (..., ceil(width / 4)).
    """
    quads = _in_chunks(codes, CODES_PER_BYTE)
    return quads[..., 0] | quads[..., 1] << 2 | quads[..., 2] << 4 | quads[..., 3] << 6


def unpack2(packed: torch.Tensor, width: int) -> torch.Tensor:
    """The ``width`` codes that `pack2` packed: uint8 (..., width), values 0..3."""
    codes = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    return codes.flatten(-2)[..., :width]


def pack_base3(codes: torch.Tensor) -> torch.Tensor:
    """Packs codes 0..2, five to a byte.

    Args:
        codes: (..., width), any integer dtype, values 0..2 (not checked).

    Returns:
        uint8 (..., ceil(width / 5)), values 0..242.
    """
    trits = _in_chunks(codes, TRITS_PER_BYTE)
    packed = trits[..., 0].clone()
    for position in range(1, TRITS_PER_BYTE):
        packed += trits[..., position] * _POWERS_OF_3[position]
    return packed


def unpack_base3(packed: torch.Tensor, width: int) -> torch.Tensor:
    """The ``width`` codes that `pack_base3` packed: uint8 (..., width), values 0..2."""
    trits = [packed.div(power, rounding_mode="floor") % 3 for power in _POWERS_OF_3]
    return torch.stack(trits, dim=-1).flatten(-2)[..., :width]


def _in_chunks(codes: torch.Tensor, size: int) -> torch.Tensor:
    """(..., width) -> uint8 (..., ceil(width / size), size), padded with zeros."""
    codes = F.pad(codes.to(torch.uint8), (0, -codes.shape[-1] % size))
    return codes.unflatten(-1, (codes.shape[-1] // size, size))
