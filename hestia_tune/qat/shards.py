"""Quantize the shard instead of the gathered weight: QAT under FSDP2 at two passes a step.

Every rank turns its rows of the float32 latent weight into rows of the effective weight, and rounds
them once, to the compute dtype. FSDP2 gathers these rows, so the linear is a plain linear. FSDP2
reduces the gradient of the effective weight, in float32. The Jacobian depends only on the latent
weight. So the gradient is pulled back once per optimizer step, after all micro-batches.

    quantize_shards(model)          before ``fully_shard``, on the prepared model
    shards = Shards(model, dtype)
    shards.refresh()                when latents, temperature or pressure have changed
    ... forward, backward ...
    shards.pull_back()              before clipping: ``weight.grad`` becomes the latents' gradient

Cost in time: two passes over the shard a step (forward and pull-back), divided by the ranks. It
does not depend on accumulation, or on how often FSDP2 gathers. Cost in memory: the effective rows,
which are kept from one `refresh` to the next, 2 bytes a weight and rank in bfloat16. Computing them
again in each gather would save these bytes. It would cost a pass per gather, two a micro-batch with
``reshard_after_forward``.

If scales span ranks, they are sums over the ranks (one all-reduce of a few numbers a layer). A
method that pairs rows exchanges them (`hestia_tune.qat.exchange`).

A simpler design would give FSDP2 the effective rows as ordinary parameters in the compute dtype,
and keep the latents beside it. FSDP2 (torch 2.13) stands in its way twice: it rounds a reduced
gradient to the dtype of the parameter, whatever ``reduce_dtype`` is, so gradients would be summed
over micro-batches in bfloat16; and the parameters of a group must have one dtype, so norms and
biases would need copies of their own too. One process needs no FSDP2 (`hestia_tune.qat.leaves`).

With FSDP2's CPU offloading, latents and gradients are on the CPU, and so is tau. The formulas run
there. Only the effective rows are copied to the GPU, from pinned memory, in every gather.
"""

import functools
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hestia_tune.distributed import of_all_ranks
from hestia_tune.errors import InputError
from hestia_tune.methods.method import require_finite
from hestia_tune.qat.buckets import Bucket, buckets_of
from hestia_tune.qat.latent_shard import LatentShard
from hestia_tune.qat.linear import (
    QuantizedLayer,
    full_tensor,
    local_rows,
    plain_shard,
    quantized_linears,
    require_own_weights,
    shard_like,
)


def quantize_shards(model: nn.Module) -> None:
    """Turn the latent weights of a prepared model into `LatentShard`.

    Call it before ``fully_shard``. A trainer that shards the model itself can call it afterwards,
    before the first forward. State dicts hold plain tensors, which share memory with the shards.

    Raises:
        InputError: If a module that is not quantized shares a latent weight. FSDP2 gathers one
            weight, which cannot be both the effective and the latent weight. The same error is
            raised if the model is sharded already in a way that is not supported.
    """
    layers = quantized_linears(model)
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    for name, layer in layers.items():
        if is_sharded and (problem := _problem(layer)):
            raise InputError(f"{name} cannot be quantized on its shard: {problem}")
    require_own_weights(model, layers)
    shards = {
        id(weight): _latent_parameter(weight, key)
        for weight, key in {layer.weight: layer.place[1] for layer in layers.values()}.items()
    }
    for layer in layers.values():
        module, key = layer.place
        setattr(module, key, shards[id(layer.weight)])
        vars(module)["effective_rows"] = {}
        module.register_state_dict_post_hook(functools.partial(_save_plain, key=key))
        layer.expect_effective()  # FSDP2 treats the extras like any other parameters.


def _problem(layer: QuantizedLayer) -> str:
    """Return why the shard of a layer cannot be quantized, or an empty string."""
    if not isinstance(layer.weight, DTensor):
        return "FSDP2 does not shard its weight; do not ignore the module"
    if layer.weight.device_mesh.ndim > 1:
        return "the mesh has more than one dimension; shard over all ranks, without replicas"
    adds = " and ".join(f"a {name}" for name in layer.method.extra_names)
    return f"the method adds {adds}; call quantize_shards before fully_shard" if adds else ""


def _latent_parameter(weight: nn.Parameter, key: str) -> nn.Parameter:
    """Return a parameter with the same rows as `LatentShard`. A sharded one keeps its identity."""
    shard = LatentShard(local_rows(weight).detach(), key)
    if not isinstance(weight, DTensor):
        return nn.Parameter(shard, weight.requires_grad)
    weight._local_tensor = shard  # FSDP2 reads it again before the first forward.
    return weight


def _save_plain(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *, key: str
) -> None:
    """Replace the shard in a state dict by a plain one, which any program can save and read."""
    state[f"{prefix}{key}"] = plain_shard(state[f"{prefix}{key}"])


class Shards:
    """Effective weights of a model whose latents are sharded by FSDP2, on any number of ranks.

    Args:
        model: A model with `LatentShard` weights.
        dtype: The dtype of the products.
        compiled: Whether to run the formulas as fused kernels, unless scales span ranks.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, *, compiled: bool = False):
        self._model, self._dtype, self._compiled = model, dtype, compiled
        self._layers = [*quantized_linears(model).values()]

    @functools.cached_property
    def _buckets(self) -> list[Bucket]:
        return buckets_of(self._layers, compiled=self._compiled)  # FSDP2 has sharded them by now

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the effective rows of every layer from its latents, rounded once. Collective.

        FSDP2 first drops the rows that it has gathered and kept: they hide the latents. Call it
        before a forward whenever latents, temperature or pressure have changed.
        """
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        quantized: dict[int, dict[str, Tensor]] = {}  # by weight, because linears may share one
        for bucket in self._buckets:
            for layer, rows in zip(bucket.layers, bucket.quantize(self._dtype), strict=True):
                if local_rows(layer.weight).is_pinned():  # by CPU offloading
                    rows["weight"] = rows["weight"].pin_memory()
                quantized[id(layer.weight)] = rows
        for layer in self._layers:
            effective, (module, key) = quantized[id(layer.weight)], layer.place
            vars(module)["effective_rows"][key] = effective["weight"]
            for key in layer.extra_keys:
                local_rows(getattr(layer, key)).copy_(effective[key])

    def accumulate(self) -> None:
        """Do nothing after a micro-batch: FSDP2 has reduced its gradients, in float32."""

    @torch.no_grad()
    def pull_back(self, scale: Tensor | None = None) -> None:
        """Turn the gradient of every effective weight into the latents' gradients. Collective.

        Call it once per optimizer step, after the last backward and before clipping. Temperature,
        pressure and latents must be the same as in the forward.

        Args:
            scale: Factor of all gradients of the model, 0-D. None: 1.
        """
        grads = [local_rows(p.grad) for p in self._model.parameters() if p.grad is not None]
        if scale is not None and grads:
            torch._foreach_mul_(grads, scale.to(grads[0].device))
        for bucket in self._buckets:
            found = [_local_grads(layer) for layer in bucket.layers]
            for layer, grads, own in zip(
                bucket.layers, found, bucket.pull_back(found), strict=True
            ):
                if own is None:
                    continue
                grads["weight"].copy_(own[0])
                for parameter, value in zip(layer.method_parameters(), own[1:], strict=True):
                    if parameter.requires_grad:
                        parameter.grad = shard_like(value, parameter)
        for layer in self._layers:
            for parameter in layer.extra_parameters().values():
                parameter.grad = None  # It follows from the latent weight.


def _local_grads(layer: QuantizedLayer) -> dict[str, Tensor]:
    """Return this rank's gradients of a layer's effective weight and extras, by name."""
    gathered = {key: getattr(layer, key) for key in ("weight", *layer.extra_keys)}
    return {key: local_rows(p.grad) for key, p in gathered.items() if p.grad is not None}


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
        for key in (*layer.method.parameter_names, *layer.extra_keys)
    }
    for name, value in cast(dict[str, Tensor], get_model_state_dict(model)).items():
        if name in own:
            continue
        layer = layers.pop(name.removesuffix(".weight"), None)
        latent, parameters = (full_tensor(value), ()) if layer is None else layer.whole_latents()
        with of_all_ranks():
            require_finite(name, latent, *parameters)
        if not dist.is_initialized() or dist.get_rank() == 0:
            hard = latent if layer is None else layer.method.hard(latent, parameters)
            state[name] = hard.to(torch.bfloat16).cpu().view(value.shape)
            for key, extra in ({} if layer is None else layer.hard_extras(latent)).items():
                state[f"{name.removesuffix('weight')}{key}"] = extra.to(torch.bfloat16).cpu()
    if layers:
        raise RuntimeError(f"quantized weights are missing from the state dict: {[*layers]}")
    return state
