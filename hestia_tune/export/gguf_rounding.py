"""What llama.cpp's rounding of activations does to a model: may a weight be of type TQ2_0?

Its CPU kernels round the activations that meet a block type to 8 bits of the largest in a run: of
32 for Q4_0 and Q2_0, of `RUN` for TQ2_0, where one outlier coarsens 255 others. That depends on the
model and the layer, so it is measured, on the hard model and some text: per layer the error of the
rounded input relative to the input, as the mean over tokens. Gaussian inputs have 0.7%.
"""

from collections.abc import Mapping

import torch
from torch import nn

RUN = 256
# The largest mean error of a layer's inputs with which "auto" takes TQ2_0.
LIMIT = 0.01


@torch.no_grad()
def activation_rounding(
    model: nn.Module, layers: Mapping[str, str], tokens: torch.Tensor
) -> dict[str, float]:
    """Name of a weight -> relative error of its inputs, rounded in runs of 256.

    Args:
        model: hard, ready for inference.
        layers: name of a linear whose in_features are a multiple of 256 -> name of its weight in
            the file that is converted.
        tokens: (1, length), some text.
    """
    errors, handles = {}, []

    def measure(name):
        def hook(module, args):
            x = args[0].double().unflatten(-1, (-1, RUN))  # (..., tokens, runs, 256)
            step = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny) / 127
            error = ((x / step).round() * step - x).flatten(-2).norm(dim=-1)
            size = x.flatten(-2).norm(dim=-1).clamp(min=torch.finfo(x.dtype).tiny)
            errors[name] = (error / size).mean().item()

        return hook

    try:
        for layer, name in layers.items():
            handles.append(model.get_submodule(layer).register_forward_pre_hook(measure(name)))
        model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return errors
