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
method that pairs row i with row i + n/2 (Fairy2i) exchanges rows, so that each rank holds both rows
of a pair. The exchange is an all-to-all of the shard. It sends 4 bytes a weight there and 2 back in
a refresh, 8 there and 4 back in a pull-back, divided by the ranks. One rank exchanges nothing.

With FSDP2's CPU offloading, latents and gradients are on the CPU, and so is tau. The formulas run
there. Only the effective rows are copied to the GPU, from pinned memory, in every gather.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hestia_tune.errors import InputError
from hestia_tune.methods.autograd import fused
from hestia_tune.methods.base import SumOverRanks
from hestia_tune.qat.latent_shard import LatentShard
from hestia_tune.qat.linear import (
    QuantizedLayer,
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
        module.effective_rows = {}
        module.register_state_dict_post_hook(functools.partial(_save_plain, key=key))
        layer.weight_is_effective = True
        for name in layer.derived_names:  # FSDP2 treats it like any other parameter.
            rows = torch.empty(len(layer.weight), device=layer.weight.device)
            layer.register_parameter(name, nn.Parameter(rows))


def _problem(layer: QuantizedLayer) -> str:
    """Return why the shard of a layer cannot be quantized, or an empty string."""
    if not isinstance(layer.weight, DTensor):
        return "FSDP2 does not shard its weight; do not ignore the module"
    if layer.weight.device_mesh.ndim > 1:
        return "the mesh has more than one dimension; shard over all ranks, without replicas"
    return (
        "the method adds a bias; call quantize_shards before fully_shard"
        if layer.derived_names
        else ""
    )


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
        self._size = 1 if self._group is None else dist.get_world_size(self._group)
        self._rank = 0 if self._group is None else dist.get_rank(self._group)
        self._exchanges = layer.method.pairs_rows and self._size > 1
        spans_ranks = layer.method.scales_span_rows and self._size > 1
        self.total: SumOverRanks | None = self._sum if spans_ranks else None

    def latents(self) -> tuple[Tensor, Sequence[Tensor]]:
        """Return this process's latent rows and parameters.

        The rows of experts are the rows of one expert below the rows of another.
        """
        latent, *parameters = map(local_rows, self._layer.latents())
        return latent.flatten(0, -2), parameters

    @torch.no_grad()
    def quantize(self, dtype: torch.dtype, *, is_hard: bool) -> dict[str, Tensor]:
        """Return the effective rows as "weight", and the derived parameters. Collective.

        Args:
            dtype: The dtype of the products. The rows are rounded to it once.
            is_hard: Whether to return the hard rows for every temperature and pressure.
        """
        fake, (latent, parameters) = self._layer.weight_fake_quantizer, self.latents()
        rows = self._to_pairs(latent)
        if is_hard:
            pressure = torch.ones_like(fake.pressure)
            effective = self._layer.method.hard(rows, parameters, self.total)
        else:
            pressure = fake.pressure
            effective = self._formula("effective_weight")(rows, fake.tau, pressure, parameters)
        derived = self._layer.derive(latent, pressure, self.total)
        rows = self._from_pairs(effective.to(dtype))
        return {"weight": rows.view_as(local_rows(self._layer.weight)), **derived}

    @torch.no_grad()
    def pull_back(self, grads: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the gradients of the latent weight and of the method's parameters. Collective.

        Args:
            grads: The gradients of the tensors that `quantize` returned, by name.
        """
        fake, (latent, parameters) = self._layer.weight_fake_quantizer, self.latents()
        derived, grad = dict(grads), grads["weight"]
        del derived["weight"]
        inputs = self._to_pairs(grad.flatten(0, -2)), self._to_pairs(latent)
        pulled, *others = self._formula("vjp")(*inputs, fake.tau, fake.pressure, parameters)
        if derived:
            pulled = pulled + self._layer.derive_vjp(derived, latent, fake.pressure, self.total)
        return [self._from_pairs(pulled).view_as(grad), *others]

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

    def _bounds(self, num_rows: int, rank: int) -> tuple[int, int]:
        """Return begin and end of a rank's rows among ``num_rows``, as FSDP2 shards them."""
        each = -(-num_rows // self._size)
        return min(rank * each, num_rows), min((rank + 1) * each, num_rows)

    def _overlaps(self, rank: int, other: int) -> list[int]:
        """Return how many upper and how many lower rows ``rank`` holds and ``other`` pairs."""
        num_rows = len(self._layer.weight)
        begin, end = self._bounds(num_rows, rank)
        first, last = self._bounds(num_rows // 2, other)
        offsets = 0, num_rows // 2
        return [len(range(max(begin, first + o), min(end, last + o))) for o in offsets]

    def _to_pairs(self, rows: Tensor) -> Tensor:
        """Return (2k, m) for the held rows: the upper rows of k pairs, then their lower rows."""
        if not self._exchanges:
            return rows
        begin, _ = self._bounds(len(self._layer.weight), self._rank)
        upper = max(0, len(self._layer.weight) // 2 - begin)
        return self._exchange(rows.tensor_split([upper]), to_pairs=True)

    def _from_pairs(self, pairs: Tensor) -> Tensor:
        """Return the held rows for the pairs; undo `_to_pairs`."""
        return self._exchange(pairs.tensor_split(2), to_pairs=False) if self._exchanges else pairs

    def _exchange(self, halves: Sequence[Tensor], *, to_pairs: bool) -> Tensor:
        """Exchange both halves by all-to-all, and return one below the other."""
        sent = [self._overlaps(self._rank, other) for other in range(self._size)]
        received = [self._overlaps(other, self._rank) for other in range(self._size)]
        if not to_pairs:
            sent, received = received, sent
        parts = []
        for half, rows in enumerate(halves):
            sizes = [[counts[half] for counts in each] for each in (received, sent)]
            parts.append(rows.new_empty((sum(sizes[0]), *rows.shape[1:])))
            dist.all_to_all_single(parts[-1], rows.contiguous(), *sizes, group=self._group)
        return torch.cat(parts)


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
        module.effective_rows[key] = effective["weight"]
        for name in layer.derived_names:
            local_rows(getattr(layer, name)).copy_(effective[name])
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
        gathered = {name: getattr(layer, name) for name in ("weight", *layer.derived_names)}
        grads = {name: local_rows(p.grad) for name, p in gathered.items() if p.grad is not None}
        pulled, *others = LatentRows(layer, compiled=compiled).pull_back(grads)
        grads["weight"].copy_(pulled)
        for name in layer.derived_names:  # They follow from the latent weight.
            getattr(layer, name).grad = None
        for parameter, own in zip(layer.method_parameters(), others, strict=True):
            if parameter.requires_grad:
                parameter.grad = shard_like(own, parameter)
