"""Packing of codes of 1 or 2 bits into bytes, along the last axis, padded with zeros to bytes.

With 2 bits, byte j holds codes 4j, 4j+1, 4j+2, 4j+3 in bits 0-1, 2-3, 4-5, 6-7 (little end first),
with 1 bit codes 8j to 8j+7: any group of 4 or 8 columns is whole bytes, and a code is a shift and a
mask away. Plain elementwise operations: they run on any device, the meta device included, and fuse
under ``torch.compile``.
"""

import functools

import torch
import torch.nn.functional as F


def packed_width(width: int, bits: int = 2) -> int:
    """Bytes that ``width`` codes need."""
    return -(-width * bits // 8)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs codes of some bits, 8 / bits to a byte.

    Args:
        codes: (..., width), any integer dtype, values that ``bits`` hold (not checked).
        bits: a divisor of 8.

    Returns:
        uint8 (..., ceil(width · bits / 8)).
    """
    each, num_bytes = 8 // bits, packed_width(codes.shape[-1], bits)
    codes = F.pad(codes.to(torch.uint8), (0, each * num_bytes - codes.shape[-1]))
    fields = codes.unflatten(-1, (num_bytes, each)).unbind(-1)
    return functools.reduce(torch.bitwise_or, [f << i * bits for i, f in enumerate(fields)])


def unpack_codes(packed: torch.Tensor, width: int, bits: int) -> torch.Tensor:
    """The ``width`` codes that `pack_codes` packed: uint8 (..., width)."""
    codes = torch.stack([packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)], dim=-1)
    return codes.flatten(-2)[..., :width]


# Of 2 bits.
pack2 = functools.partial(pack_codes, bits=2)
unpack2 = functools.partial(unpack_codes, bits=2)
