"""Quantize the shard instead of the gathered weight: QAT under FSDP2 at two passes a step.

Every rank turns its rows of the float32 latent weight into rows of the effective weight, and rounds
them once, to the compute dtype. FSDP2 gathers these rows, so the linear is a plain linear. FSDP2
reduces the gradient of the effective weight, in float32. The Jacobian depends only on the latent
weight. So the gradient is pulled back once per optimizer step, after all micro-batches.

    quantize_shards(model)          before ``fully_shard``, on the prepared model
    refresh(model, dtype)           when latents, temperature or pressure have changed
    ... forward, backward ...
    pull_back(layers)               before clipping: ``weight.grad`` becomes the latents' gradient

Cost in time: two passes over the shard a step (forward and pull-back), divided by the ranks. It
does not depend on accumulation, or on how often FSDP2 gathers. Cost in memory: the effective rows,
which are kept from one `refresh` to the next, 2 bytes a weight and rank in bfloat16. Computing them
again in each gather would save these bytes. It would cost a pass per gather, two a micro-batch with
``reshard_after_forward``.

If scales span ranks, they are sums over the ranks (one all-reduce of a few numbers a layer). A
method that pairs rows exchanges them (`hestia_tune.qat.exchange`).

With FSDP2's CPU offloading, latents and gradients are on the CPU, and so is tau. The formulas run
there. Only the effective rows are copied to the GPU, from pinned memory, in every gather.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hestia_tune.distributed import of_all_ranks
from hestia_tune.errors import InputError
from hestia_tune.methods.method import SumOverRanks, fused, require_finite
from hestia_tune.qat.exchange import PairedRows
from hestia_tune.qat.latent_shard import LatentShard
from hestia_tune.qat.linear import (
    QuantizedLayer,
    full_tensor,
    local_rows,
    plain_shard,
    quantized_linears,
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
    shards = {
        id(weight): _latent_parameter(weight, key)
        for weight, key in {layer.weight: layer.place[1] for layer in layers.values()}.items()
    }
    places = {(id(module), key) for module, key in (layer.place for layer in layers.values())}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) in shards and (id(module), key) not in places:
                raise InputError(
                    f"{name}.{key} is the weight of a quantized linear too; leave that linear out "
                    "by quantizer.exclude, or untie the two"
                )
    for layer in layers.values():
        module, key = layer.place
        setattr(module, key, shards[id(layer.weight)])
        vars(module)["effective_rows"] = {}
        module.register_state_dict_post_hook(functools.partial(_save_plain, key=key))
        layer.weight_is_effective = True
        for key in layer.extra_keys:  # FSDP2 treats it like any other parameter.
            rows = torch.empty(len(layer.weight), device=layer.weight.device)
            layer.register_parameter(key, nn.Parameter(rows))


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


class LatentRows:
    """Hold the rows of a quantized linear that are on this process.

    Only this class turns latents into effective rows, and pulls gradients back to the latents. It
    works under FSDP2 on any number of ranks, in one process, and in reconstruction.

    Args:
        layer: The linear; its latents are plain or sharded by FSDP2.
        compiled: Whether to run the formulas as fused kernels, unless scales span ranks.

    Attributes:
        total: A function that sums over the ranks; None if no scale of the method needs sums.
    """

    def __init__(self, layer: QuantizedLayer, *, compiled: bool = False):
        self._layer, self._compiled, weight = layer, compiled, layer.weight
        self._group = weight.device_mesh.get_group() if isinstance(weight, DTensor) else None
        is_shared = self._group is not None and dist.get_world_size(self._group) > 1
        self._paired = None
        if self._group is not None and is_shared and layer.method.pairs_rows:
            self._paired = PairedRows(len(weight), self._group)
        spans_ranks = layer.method.scales_span_rows and is_shared
        self.total: SumOverRanks | None = self._sum if spans_ranks else None

    def latents(self) -> tuple[Tensor, Sequence[Tensor]]:
        """Return this process's latent rows and parameters.

        The rows of a stack are the rows of one matrix below the rows of another.
        """
        latent, *parameters = map(local_rows, self._layer.latents())
        return latent.flatten(0, -2), parameters

    @torch.no_grad()
    def quantize(self, dtype: torch.dtype, *, is_hard: bool) -> dict[str, Tensor]:
        """Return the effective rows as "weight", and the extras by their keys. Collective.

        Args:
            dtype: The dtype of the products. The rows are rounded to it once.
            is_hard: Whether to return the hard rows for every temperature and pressure.
        """
        fake, (latent, parameters) = self._layer.weight_fake_quantizer, self.latents()
        rows = latent if self._paired is None else self._paired.to_pairs(latent)
        if is_hard:
            pressure = torch.ones_like(fake.pressure)
            effective = self._layer.method.hard(rows, parameters, self.total)
        else:
            pressure = fake.pressure
            effective = self._formula("effective_weight")(rows, fake.tau, pressure, parameters)
        extras = self._layer.method.extras(latent, pressure, self.total)
        rows = effective.to(dtype)
        rows = rows if self._paired is None else self._paired.from_pairs(rows)
        weight = rows.view_as(local_rows(self._layer.weight))
        return {"weight": weight, **dict(zip(self._layer.extra_keys, extras, strict=True))}

    @torch.no_grad()
    def pull_back(self, grads: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the gradients of the latent weight and of the method's parameters. Collective.

        Args:
            grads: The gradients of the tensors that `quantize` returned, by name.
        """
        fake, (latent, parameters) = self._layer.weight_fake_quantizer, self.latents()
        grad, rows = grads["weight"], latent
        grad_rows = grad.flatten(0, -2)
        if self._paired is not None:
            grad_rows, rows = self._paired.to_pairs(grad_rows), self._paired.to_pairs(rows)
        inputs = grad_rows, rows, fake.tau, fake.pressure, parameters
        pulled, *others = self._formula("vjp")(*inputs)
        if extras := [grads[key] for key in self._layer.extra_keys if key in grads]:
            added = self._layer.method.extras_vjp(extras, latent, fake.pressure, self.total)
            pulled = pulled + added
        pulled = pulled if self._paired is None else self._paired.from_pairs(pulled)
        return [pulled.view_as(grad), *others]

    def _formula(self, name: str) -> Callable[..., Any]:
        """Return a formula of the method, as fused kernels unless its scales span ranks."""
        if self._compiled and self.total is None:
            return fused(self._layer.method.key(), name)
        return functools.partial(getattr(self._layer.method, name), total=self.total)

    def _sum(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks."""
        value = value.contiguous()
        dist.all_reduce(value, group=self._group)
        return value


@torch.no_grad()
def refresh(model: nn.Module, dtype: torch.dtype, *, compiled: bool = False) -> None:
    """Compute the effective rows of every layer from its latents, rounded once to ``dtype``.

    FSDP2 then drops the rows that it has gathered and kept. The call is collective. Call it before
    a forward whenever latents, temperature or pressure have changed.

    Args:
        model: A model with `LatentShard` weights.
        dtype: The dtype of the products.
        compiled: Whether to run the formulas as fused kernels, unless scales span ranks.
    """
    quantized: dict[int, dict[str, Tensor]] = {}  # by weight, because linears may share one
    for layer in quantized_linears(model).values():
        if id(layer.weight) not in quantized:
            rows, fake = LatentRows(layer, compiled=compiled), layer.weight_fake_quantizer
            effective = rows.quantize(dtype, is_hard=fake.is_hard)
            if local_rows(layer.weight).is_pinned():  # by CPU offloading
                effective["weight"] = effective["weight"].pin_memory()
            quantized[id(layer.weight)] = effective
        effective = quantized[id(layer.weight)]
        module, key = layer.place
        vars(module)["effective_rows"][key] = effective["weight"]
        for key in layer.extra_keys:
            local_rows(getattr(layer, key)).copy_(effective[key])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def pull_back(layers: Iterable[QuantizedLayer], *, compiled: bool = False) -> None:
    """Turn the gradient of every effective weight into the latents' gradients. Collective.

    It works in place. Call it once per optimizer step, after the last backward and before clipping.
    Temperature, pressure and latents must be the same as in the forward. `refresh` describes
    ``compiled``.
    """
    seen: set[int] = set()
    for layer in layers:
        if layer.weight.grad is None or id(layer.weight) in seen:
            continue
        seen.add(id(layer.weight))
        gathered = {key: getattr(layer, key) for key in ("weight", *layer.extra_keys)}
        grads = {name: local_rows(p.grad) for name, p in gathered.items() if p.grad is not None}
        pulled, *others = LatentRows(layer, compiled=compiled).pull_back(grads)
        grads["weight"].copy_(pulled)
        for key in layer.extra_keys:  # They follow from the latent weight.
            getattr(layer, key).grad = None
        for parameter, own in zip(layer.method_parameters(), others, strict=True):
            if parameter.requires_grad:
                parameter.grad = shard_like(own, parameter)


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
        if dist.get_rank() == 0:
            hard = latent if layer is None else layer.method.hard(latent, parameters)
            state[name] = hard.to(torch.bfloat16).cpu().view(value.shape)
            for key, extra in ({} if layer is None else layer.hard_extras(latent)).items():
                state[f"{name.removesuffix('weight')}{key}"] = extra.to(torch.bfloat16).cpu()
    if layers:
        raise RuntimeError(f"quantized weights are missing from the state dict: {[*layers]}")
    return state
