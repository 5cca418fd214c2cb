"""Round the embedding and the output head to whole-number codes of 4, 5 or 8 bits.

A third of a small model's file is its embedding. `hestia_tune.models.folder.ModelFolder` rounds it
while it is read, after the training, for every file format in the same way. A weight is a code
times the scale of its group of 32 weights, the block of the GGUF types Q4_0, Q5_0 and Q8_0:

    choice  codes        scale of a group
    int4    -8 to 7      near -w/8 of the largest w (`hestia_tune.methods.INT4Method`)
    int5    -16 to 15    near max|w|/15: of three numbers, the one with the least squared error
    int8    -127 to 127  the least power of two that is not below max|w|/127

Every product is a bfloat16 number, so every format that holds bfloat16 holds the rounded weights.
"""

import torch
from torch import Tensor

from hestia_tune.errors import InputError
from hestia_tune.methods import INT4Method
from hestia_tune.methods.straight_through import best_scale

GROUP = 32
# Bits of a weight with its scale of 16 bits.
EMBEDDING_BITS = {"int4": 4.5, "int5": 5.5, "int8": 8.5}
_LEAST_SCALE = 2.0**-14  # of float16's normal range, which GGUF needs


def check_width(name: str, width: int) -> None:
    """Raise InputError if the rows of an embedding, ``width`` weights long, have a rest."""
    if width % GROUP:
        raise InputError(
            f"bits.embedding needs rows of a multiple of {GROUP} weights; {name} has rows of "
            f"{width}; leave bits.embedding out"
        )


def embedding_codes(weight: Tensor, choice: str) -> tuple[Tensor, Tensor]:
    """Return the codes of an embedding and the scales of its groups.

    A second rounding does not change a rounded embedding.

    Args:
        weight: The embedding (rows, width).
        choice: "int4", "int5" or "int8".

    Returns:
        The codes, int8 (rows, width), and the scales, bfloat16 (rows, width / 32).
    """
    weight = weight.float()
    blocks = weight.unflatten(-1, (-1, GROUP))
    if choice == "int4":
        _, scale, code = INT4Method(group_size=GROUP).quantized(weight)
    elif choice == "int5":
        scale = _scale_of_5_bits(blocks)
        code = _codes_of_5_bits(blocks, scale)
    else:
        # x = m * 2^e with m in [1/2, 1), so 2^e is the least power of two above x.
        largest = blocks.abs().amax(-1, keepdim=True).clamp(min=127 * _LEAST_SCALE)
        fraction, exponent = torch.frexp(largest / 127)
        scale = torch.ldexp(torch.ones_like(fraction), exponent - (fraction == 0.5).int())
        code = (blocks / scale).round()
    return code.flatten(-2).to(torch.int8), scale.squeeze(-1).to(torch.bfloat16)


def _codes_of_5_bits(blocks: Tensor, scale: Tensor) -> Tensor:
    return (blocks / scale).round().clamp(-16, 15)


def _scale_of_5_bits(blocks: Tensor) -> Tensor:
    """Return the scale of each group with the least squared error of three; shape (..., 1).

    The three scales have 4 significant bits, so every product is a bfloat16 number. The first is
    the largest such number up to max|w|/14. The other two are the numbers below it, and the last
    one is at most max|w|/16. So the largest magnitude of the codes in a group is 14, 15 or 16, and
    a second rounding tries the scale of the first rounding.
    """
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=14 * 1.25 * _LEAST_SCALE)
    bits = (largest / 14).view(torch.int32) >> 20
    scales = [((bits - step) << 20).view(torch.float32) for step in range(3)]
    return best_scale(blocks, scales, lambda scale: _codes_of_5_bits(blocks, scale))


def round_embedding(weight: Tensor, choice: str) -> Tensor:
    """Return the rounded embedding in the shape and dtype of ``weight``; see `embedding_codes`."""
    codes, scales = embedding_codes(weight, choice)
    return (codes.unflatten(-1, (-1, GROUP)) * scales.float()[..., None]).view_as(weight).to(weight)
