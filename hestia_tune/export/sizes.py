"""What the files of a model weigh."""

from collections.abc import Collection, Mapping
from typing import Any

import torch


def sizes(
    shapes: Mapping[str, torch.Size],
    quantized: Collection[str],
    num_bytes: int,
    quantized_bytes: int,
) -> dict[str, Any]:
    """Sizes of what was written of a model.

    Args:
        shapes: of every weight of the model, by name.
        quantized: names of those that are quantized.
        num_bytes: of all files with weights, their headers included.
        quantized_bytes: of the codes and scales.

    Returns:
        bytes, parameters, quantized_parameters, quantized_bits_per_weight (None without any), and
        whole_bits_per_weight = 8 * bytes / parameters, which is 16 in bfloat16.
    """
    parameters = sum(shape.numel() for shape in shapes.values())
    num_quantized = sum(shapes[name].numel() for name in quantized)
    return {
        "bytes": num_bytes,
        "parameters": parameters,
        "quantized_parameters": num_quantized,
        "quantized_bits_per_weight": 8 * quantized_bytes / num_quantized if quantized else None,
        "whole_bits_per_weight": 8 * num_bytes / parameters,
    }
