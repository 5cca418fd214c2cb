"""Activation checkpointing, FSDP2 and weights, on a prepared model on the meta device."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torchtune import training

from hestia_tune.blocks import find_blocks
from hestia_tune.config.run import RunConfig
from hestia_tune.errors import InputError
from hestia_tune.models.build import build_buffers
from hestia_tune.qat.linear import quantized_linears


def compile_blocks(model: nn.Module) -> None:
    """Compiles each block, in place, by torchtune's backend."""
    for block in find_blocks(model).values():
        block.compile(backend=os.environ.get("TORCH_COMPILE_BACKEND", "inductor"))


def apply_activation_checkpointing(model: nn.Module) -> None:
    """Recompute the activations of each block in the backward pass, as torchtune does."""
    classes = {type(block) for block in find_blocks(model).values()}
    training.set_activation_checkpointing(model, auto_wrap_policy=classes)


def shard(
    model: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype, config: RunConfig
) -> None:
    """FSDP2 on every block and on the whole, in place, by the options of a run.

    Parameters stay float32; forward and backward see them in ``compute_dtype`` (of the quantized
    linears, the effective weight); gradients are reduced in float32.

    Raises:
        InputError: if the model has no blocks.
    """
    options: Any = {"mesh": mesh, "reshard_after_forward": config.fsdp_reshard_after_forward}
    if compute_dtype != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32
        )
    if config.fsdp_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    blocks = find_blocks(model)
    parts = [module for name, module in model.named_modules() if name in blocks]
    if not parts:
        raise InputError("the model has no blocks to shard (no list of modules); use another model")
    for module in reversed(parts):
        fully_shard(module, **options)
    fully_shard(model, **options)


def materialize(
    model: nn.Module,
    state: Mapping[str, torch.Tensor],
    device: torch.device,
    cpu_offload: bool,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Creates the buffers on ``device`` and loads the weights that the first process read.

    Args:
        state: the full state dict on the first process, an empty one on the others.
        dtype: of the parameters; that of latent weights is float32.
    """
    model.to_empty(device="cpu" if cpu_offload else device)
    build_buffers(model, device)
    latents = {name: value.to(dtype) for name, value in state.items()}
    for name, layer in quantized_linears(model).items():
        layer.weight_fake_quantizer.reset_buffers(device)
        if latents:
            initial = layer.method.initial_parameters(latents[f"{name}.weight"])
            for key, value in zip(layer.method.parameter_names, initial, strict=True):
                latents.setdefault(f"{name}.{key}", value)  # a reconstruction brings its own
            for key in layer.derived_names:
                latents[f"{name}.{key}"] = torch.zeros(layer.out_features)
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, strict=True, cpu_offload=cpu_offload
    )
    set_model_state_dict(model, latents, options=options)
    training.validate_no_params_on_meta_device(model)
