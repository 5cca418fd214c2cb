"""Quantize the shard, not the gathered weight: QAT under FSDP2 at the cost of two passes a step.

Every rank turns its rows of the float32 latent weight into rows of the effective weight, rounds
them once, to the compute dtype, and that is what FSDP2 gathers: the linear is then a plain linear.
The gradient that FSDP2 reduces, in float32, is that of the effective weight; since the Jacobian
depends on the latent alone, it is pulled back once an optimizer step, after all micro-batches.

    quantize_shards(model)          before ``fully_shard``, on the prepared model
    refresh(model, dtype)           when latents, temperature or pressure have changed
    ... forward, backward ...
    pull_back(layers)               before clipping: ``weight.grad`` becomes the latents' gradient

What it costs: two passes over the shard a step (forward and pull-back), divided by the ranks and
independent of accumulation and of how often FSDP2 gathers; and the effective rows, kept from one
`refresh` to the next, 2 bytes a weight and rank in bfloat16. Making them anew in each gather would
save those bytes and cost a pass per gather, two a micro-batch with ``reshard_after_forward``.

Scales that span ranks are sums over them (one all-reduce of a few numbers a layer). A method that
pairs row i with row i + n/2 (Fairy2i) exchanges rows, so that each rank holds both of a pair:
all-to-all of the shard, 4 bytes a weight there and 2 back in a refresh, 8 there and 4 back in a
pull-back, divided by the ranks; nothing on one rank.

With FSDP2's CPU offloading, rows wait on the CPU and are worked on where tau is.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hestia_tune.methods.base import Total, fused
from hestia_tune.modules import QuantizedLinear, local_rows, quantized_linears, shard_like
from hestia_tune.tensors.latent_shard import LatentShard


def quantize_shards(model: nn.Module) -> None:
    """Makes the latent weights of a prepared model `LatentShard`; call before ``fully_shard``.

    Raises:
        ValueError: if a latent weight is shared with a module that is not quantized: one gathered
            weight cannot be the effective and the latent one.
    """
    layers = quantized_linears(model).values()
    shards = {
        id(weight): nn.Parameter(LatentShard(weight.detach()), weight.requires_grad)
        for weight in {layer.weight for layer in layers}
    }
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) in shards and not isinstance(module, QuantizedLinear):
                raise ValueError(
                    f"{name}.{key} is the weight of a quantized linear too; leave that linear out "
                    "by quantizer.exclude, or untie the two"
                )
    for layer in layers:
        layer.weight = shards[id(layer.weight)]
        layer.weight_is_effective = True
        layer.effective_rows = None
        if layer.method.adds_bias:  # gathered, and its gradient reduced, like any other
            rows = torch.empty(layer.out_features, device=layer.weight.device)
            layer.added_bias = nn.Parameter(rows)


class _Rows:
    """The rows of a layer that this rank holds, and those that it works on.

    Attributes:
        total: sums over the ranks; None if no scale of the method needs them.
    """

    def __init__(self, layer: QuantizedLinear):
        self._layer, weight = layer, layer.weight
        self._group = weight.device_mesh.get_group() if isinstance(weight, DTensor) else None
        self._size = 1 if self._group is None else dist.get_world_size(self._group)
        self._rank = 0 if self._group is None else dist.get_rank(self._group)
        self._exchanges = layer.method.pairs_rows and self._size > 1
        spans_ranks = layer.method.scales_span_rows and self._size > 1
        self.total: Total | None = self._sum if spans_ranks else None

    @functools.cached_property
    def latents(self) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """The rows held of the latent weight, and of the method's parameters, where tau is."""
        device = self._layer.weight_fake_quantizer.tau.device
        latent, *parameters = (local_rows(v).to(device) for v in self._layer.latents())
        return latent, parameters

    def formula(self, name: str, compiled: bool = False) -> Callable:
        """One of the method, as fused kernels unless its scales span ranks."""
        if compiled and self.total is None:
            return fused(self._layer.method.key(), name)
        return functools.partial(getattr(self._layer.method, name), total=self.total)

    def _sum(self, value: torch.Tensor) -> torch.Tensor:
        value = value.contiguous()
        dist.all_reduce(value, group=self._group)
        return value

    def _bounds(self, num_rows: int, rank: int) -> tuple[int, int]:
        """Rows [begin, end) of a rank among ``num_rows``, as FSDP2 deals them."""
        each = -(-num_rows // self._size)
        return min(rank * each, num_rows), min((rank + 1) * each, num_rows)

    def _overlaps(self, rank: int, other: int) -> list[int]:
        """How many rows of the upper and of the lower half ``rank`` holds and ``other`` pairs."""
        num_rows = self._layer.out_features
        begin, end = self._bounds(num_rows, rank)
        first, last = self._bounds(num_rows // 2, other)
        offsets = 0, num_rows // 2
        return [len(range(max(begin, first + o), min(end, last + o))) for o in offsets]

    def to_pairs(self, rows: torch.Tensor) -> torch.Tensor:
        """(rows held, m) -> (2k, m): the upper rows of k pairs, then their lower rows."""
        if not self._exchanges:
            return rows
        begin, _ = self._bounds(self._layer.out_features, self._rank)
        upper = max(0, self._layer.out_features // 2 - begin)
        return self._exchange(rows.tensor_split([upper]), to_pairs=True)

    def from_pairs(self, pairs: torch.Tensor) -> torch.Tensor:
        """The way back of `to_pairs`."""
        return self._exchange(pairs.tensor_split(2), to_pairs=False) if self._exchanges else pairs

    def _exchange(self, halves: Sequence[torch.Tensor], *, to_pairs: bool) -> torch.Tensor:
        """All-to-all of both halves, one below the other."""
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
    """Makes the effective rows of every layer from its latents, rounded once to ``dtype``; FSDP2
    lets go of those that it has gathered and kept.

    Collective. Call it before a forward whenever latents, temperature or pressure have changed.

    Args:
        model: with `LatentShard` weights.
        dtype: of the products.
        compiled: run the formula as fused kernels, unless its scales span ranks.
    """
    made: dict[int, torch.Tensor] = {}  # by weight: linears that share one have one method
    for layer in quantized_linears(model).values():
        fake, rows = layer.weight_fake_quantizer, _Rows(layer)
        if layer.added_bias is not None:
            pressure = torch.ones_like(fake.pressure) if fake.is_hard else fake.pressure
            bias = layer.method.bias(rows.latents[0], pressure, rows.total)
            local_rows(layer.added_bias).copy_(bias)
        if id(layer.weight) not in made:
            latent, parameters = rows.latents
            latent = rows.to_pairs(latent)
            if fake.is_hard:
                effective = rows.formula("hard")(latent, parameters)
            else:
                kernel = rows.formula("effective_weight", compiled)
                effective = kernel(latent, fake.tau, fake.pressure, parameters)
            effective = rows.from_pairs(effective.to(dtype))
            made[id(layer.weight)] = effective.to(local_rows(layer.weight).device)
        layer.effective_rows = made[id(layer.weight)]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def pull_to_codes(optimizer: Optimizer, layers: Iterable[QuantizedLinear], strength: float) -> None:
    """CAGE (arXiv 2510.18784): w <- w - lr·lambda·(w - Q(w)), in place. Collective.

    Call it after an optimizer step. Q is the method's own hard weight, so any method will do; as
    AdamW's decay, it passes by gradients and moments. Costs a hard quantization of the rows that
    this rank holds.

    Args:
        optimizer: whose parameter groups give lr; weights that are in none stay.
        layers: sharded or not.
        strength: lambda; lr·lambda above 1 counts as 1, which ends at the codes. 0 does nothing.
    """
    groups = optimizer.param_groups if strength else []
    rates = {id(p): min(1.0, group["lr"] * strength) for group in groups for p in group["params"]}
    for layer in layers:
        rate = rates.pop(id(layer.weight), None)  # once, if linears share the weight
        if rate is not None:
            rows, own = _Rows(layer), local_rows(layer.weight)
            latent, parameters = rows.latents
            hard = rows.formula("hard")(rows.to_pairs(latent), parameters)
            own.lerp_(rows.from_pairs(hard).to(own.device), float(rate))


@torch.no_grad()
def pull_back(layers: Iterable[QuantizedLinear], *, compiled: bool = False) -> None:
    """Turns the gradient of every effective weight into that of its latents, in place. Collective.

    ``compiled`` as in `refresh`.

    Call it once an optimizer step, after the last backward and before clipping, with temperature,
    pressure and latents as in the forward.
    """
    seen: set[int] = set()
    for layer in layers:
        if layer.weight.grad is None or id(layer.weight) in seen:
            continue
        seen.add(id(layer.weight))
        fake, rows = layer.weight_fake_quantizer, _Rows(layer)
        grad, (latent, parameters) = local_rows(layer.weight.grad), rows.latents
        inputs = rows.to_pairs(grad.to(latent.device)), rows.to_pairs(latent)
        vjp = rows.formula("vjp", compiled)
        pulled, *others = vjp(*inputs, fake.tau, fake.pressure, parameters)
        if layer.added_bias is not None and layer.added_bias.grad is not None:
            grad_bias = local_rows(layer.added_bias.grad).to(latent.device)
            pulled = pulled + layer.method.bias_vjp(grad_bias, latent, fake.pressure, rows.total)
            layer.added_bias.grad = None  # it follows from the latent weight
        grad.copy_(rows.from_pairs(pulled))
        for parameter, own in zip(layer.method_parameters(), others, strict=True):
            if parameter.requires_grad:
                parameter.grad = shard_like(own.to(parameter.device), parameter)
