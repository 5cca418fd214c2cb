"""Packing of codes of 2 bits into bytes, along the last axis, padded with zeros to whole bytes.

Byte j holds codes 4j, 4j+1, 4j+2, 4j+3 in bits 0-1, 2-3, 4-5, 6-7 (little end first): any group of
4 columns is whole bytes, and a code is a shift and a mask away. Plain elementwise operations: they
run on any device, the meta device included, and fuse under ``torch.compile``.
"""

import torch
import torch.nn.functional as F

CODES_PER_BYTE = 4


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
    bytes_needed = packed_width(codes.shape[-1])
    codes = F.pad(codes.to(torch.uint8), (0, CODES_PER_BYTE * bytes_needed - codes.shape[-1]))
    quads = codes.unflatten(-1, (bytes_needed, CODES_PER_BYTE))
    return quads[..., 0] | quads[..., 1] << 2 | quads[..., 2] << 4 | quads[..., 3] << 6


def unpack2(packed: torch.Tensor, width: int) -> torch.Tensor:
    """The ``width`` codes that `pack2` packed: uint8 (..., width), values 0..3."""
    codes = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    return codes.flatten(-2)[..., :width]
