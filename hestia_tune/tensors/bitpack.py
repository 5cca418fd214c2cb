"""Pack codes of 1, 2 or 4 bits into bytes, along the last axis, padded with zeros to whole bytes.

With 2 bits, byte j holds codes 4j, 4j+1, 4j+2, 4j+3 in bits 0-1, 2-3, 4-5, 6-7 (little end first).
With 1 bit, it holds codes 8j to 8j+7, with 4 bits codes 2j and 2j+1. So any group of 8 columns is
whole bytes, and a shift and a mask read a code. All operations are elementwise. They run on any
device, the meta device included, and fuse under ``torch.compile``.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor


def packed_width(width: int, bits: int = 2) -> int:
    """Return how many bytes ``width`` codes need."""
    return -(-width * bits // 8)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes, 8 / bits to a byte.

    Args:
        codes: The codes (..., width), in any integer dtype. Values must fit into ``bits``; this is
            not checked.
        bits: Bits per code, a divisor of 8.

    Returns:
        The bytes, uint8 (..., ceil(width · bits / 8)).
    """
    each, num_bytes = 8 // bits, packed_width(codes.shape[-1], bits)
    codes = F.pad(codes.to(torch.uint8), (0, each * num_bytes - codes.shape[-1]))
    fields = codes.unflatten(-1, (num_bytes, each)).unbind(-1)
    return functools.reduce(torch.bitwise_or, [f << i * bits for i, f in enumerate(fields)])


def unpack_codes(packed: Tensor, width: int, bits: int) -> Tensor:
    """Return the ``width`` codes that `pack_codes` packed, uint8 (..., width)."""
    codes = torch.stack([packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)], dim=-1)
    return codes.flatten(-2)[..., :width]


# Packing with 2 bits per code.
pack2 = functools.partial(pack_codes, bits=2)
unpack2 = functools.partial(unpack_codes, bits=2)
