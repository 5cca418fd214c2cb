"""Gather the weights of a hard model from latent weights that may be sharded."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from hestia_tune.distributed import of_all_ranks
from hestia_tune.methods.base import require_finite
from hestia_tune.qat.linear import full_tensor, quantized_linears


def hard_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the hard model's state dict in bfloat16 on the CPU of the first rank. Collective.

    The other ranks get an empty dict. The parameters are gathered one at a time. The method makes
    the hard weight from the float32 latent weight, as in the forward pass.

    Raises:
        NotFiniteError: On every rank, if a weight or a learned parameter has NaN or infinity.
            The message names the weight.
    """
    layers, state = quantized_linears(model), {}
    own = {
        f"{name}.{key}"
        for name, layer in layers.items()
        for key in (*layer.method.parameter_names, *layer.derived_names)
    }
    for name, value in get_model_state_dict(model).items():
        if name in own:
            continue
        layer = layers.pop(name.removesuffix(".weight"), None)
        latent, parameters = (full_tensor(value), ()) if layer is None else layer.whole_latents()
        with of_all_ranks():
            require_finite(name, latent, *parameters)
        if dist.get_rank() == 0:
            hard = latent if layer is None else layer.method.hard(latent, parameters)
            state[name] = hard.to(torch.bfloat16).cpu().view(value.shape)
            if layer is not None and (bias := layer.hard_bias(latent)) is not None:
                state[f"{name.removesuffix('weight')}bias"] = bias.to(torch.bfloat16).cpu()
    if layers:
        raise RuntimeError(f"quantized weights are missing from the state dict: {[*layers]}")
    return state
