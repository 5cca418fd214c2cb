"""Packing of codes of 2 bits into bytes, along the last axis, padded with zeros to whole bytes.

Byte j holds codes 4j, 4j+1, 4j+2, 4j+3 in bits 0-1, 2-3, 4-5, 6-7 (little end first): any group of
4 columns is whole bytes, and a code is a shift and a mask away. Plain elementwise operations: they
run on any device, the meta device included, and fuse under ``torch.compile``.
"""

import functools

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


def unpack2_centred(packed: torch.Tensor, width: int) -> torch.Tensor:
    """`unpack2` minus one, in bfloat16. On the CPU by a table of four values a byte, which takes a
    quarter of the time of elementwise operations; a compiler fuses those."""
    if packed.device.type != "cpu" or torch.compiler.is_compiling():
        return unpack2(packed, width).to(torch.bfloat16) - 1
    quads = _centred_quads().index_select(0, packed.int().flatten())
    return quads.view(torch.bfloat16).view(*packed.shape[:-1], -1)[..., :width]


@functools.cache
def _centred_quads() -> torch.Tensor:
    """The four bfloat16 values of every byte, 256 times, as one int64 each."""
    every = torch.arange(256, dtype=torch.uint8)[:, None]
    return (unpack2(every, CODES_PER_BYTE).to(torch.bfloat16) - 1).view(torch.int64).flatten()
