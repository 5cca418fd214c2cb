"""Round the embedding and the output head to whole-number codes of 4 or 8 bits.

A third of a small model's file is its embedding. `hestia_tune.models.folder.ModelFolder` rounds it
while it is read, after the training, for every file format in the same way. A weight is a code
times the scale of its group of 32 weights, the block of the GGUF types Q4_0 and Q8_0:

    choice  codes        scale of a group
    int4    -8 to 7      near -w/8 of the largest w (`hestia_tune.methods.INT4Method`)
    int8    -127 to 127  the least power of two that is not below max|w|/127

Every product is a bfloat16 number, so every format that holds bfloat16 holds the rounded weights.
"""

import torch
from torch import Tensor

from hestia_tune.errors import InputError
from hestia_tune.methods import INT4Method

GROUP = 32
# Bits of a weight with its scale of 16 bits.
EMBEDDING_BITS = {"int4": 4.5, "int8": 8.5}
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

    The codes and scales of a rounded embedding are the same as those of its source.

    Args:
        weight: The embedding (rows, width).
        choice: "int4" or "int8".

    Returns:
        The codes, int8 (rows, width), and the scales, bfloat16 (rows, width / 32).
    """
    if choice == "int4":
        _, scale, code = INT4Method(group_size=GROUP).quantized(weight.float())
    else:
        blocks = weight.float().unflatten(-1, (-1, GROUP))
        # x = m * 2^e with m in [1/2, 1), so 2^e is the least power of two above x.
        largest = blocks.abs().amax(-1, keepdim=True).clamp(min=127 * _LEAST_SCALE)
        fraction, exponent = torch.frexp(largest / 127)
        scale = torch.ldexp(torch.ones_like(fraction), exponent - (fraction == 0.5).int())
        code = (blocks / scale).round()
    return code.flatten(-2).to(torch.int8), scale.squeeze(-1).to(torch.bfloat16)


def round_embedding(weight: Tensor, choice: str) -> Tensor:
    """Return the rounded embedding in the shape and dtype of ``weight``; see `embedding_codes`."""
    codes, scales = embedding_codes(weight, choice)
    return (codes.unflatten(-1, (-1, GROUP)) * scales.float()[..., None]).view_as(weight).to(weight)
