"""Quantize the shard, not the gathered weight: QAT under FSDP2 at the cost of two passes a step.

Every rank turns its rows of the float32 latent weight into rows of the effective weight, rounds
them once, to the compute dtype, and that is what FSDP2 gathers: the linear is then a plain linear.
The gradient that FSDP2 reduces, in float32, is that of the effective weight; since the Jacobian
depends on the latent alone, it is pulled back once an optimizer step, after all micro-batches.

    quantize_shards(model)          before ``fully_shard``, on the prepared model
    refresh(layers)                 when latents, temperature or pressure have changed
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

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hestia_tune.methods.base import Total, fused
from hestia_tune.modules import QuantizedLinear, local_rows
from hestia_tune.tensors.latent_shard import LatentShard


def quantize_shards(model: nn.Module) -> None:
    """Makes the latent weights of a prepared model `LatentShard`; call before ``fully_shard``.

    Raises:
        ValueError: if a latent weight is shared with a module that is not quantized: one gathered
            weight cannot be the effective and the latent one.
    """
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    shards: dict[int, nn.Parameter] = {}
    for layer in layers:
        weight = layer.weight
        if id(weight) not in shards:
            shards[id(weight)] = nn.Parameter(LatentShard(weight.detach()), weight.requires_grad)
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
    """The rows of a weight that this rank holds, and those that it works on."""

    def __init__(self, layer: QuantizedLinear):
        weight = layer.weight
        self.group = weight.device_mesh.get_group() if isinstance(weight, DTensor) else None
        self.size = 1 if self.group is None else dist.get_world_size(self.group)
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self.num_rows = weight.shape[0]
        self.exchanged = layer.method.pairs_rows and self.size > 1
        self.spans_rows = layer.method.scales_span_rows

    def total(self) -> Total | None:
        """Sums over the ranks; None if no scale of the method needs them."""
        if self.size == 1 or not self.spans_rows:
            return None

        def total(value: torch.Tensor) -> torch.Tensor:
            value = value.contiguous()
            dist.all_reduce(value, group=self.group)
            return value

        return total

    def _bounds(self, num_rows: int, rank: int) -> tuple[int, int]:
        """Rows [begin, end) of a rank among ``num_rows``, as FSDP2 deals them."""
        each = -(-num_rows // self.size)
        return min(rank * each, num_rows), min((rank + 1) * each, num_rows)

    def _overlaps(self, rank: int, other: int) -> list[int]:
        """How many rows of the upper and of the lower half ``rank`` holds and ``other`` pairs."""
        half = self.num_rows // 2
        begin, end = self._bounds(self.num_rows, rank)
        first, last = self._bounds(half, other)
        return [
            max(0, min(end, last + offset) - max(begin, first + offset)) for offset in (0, half)
        ]

    def to_pairs(self, rows: torch.Tensor) -> torch.Tensor:
        """(rows held, m) -> (2k, m): the upper rows of k pairs, then their lower rows."""
        if not self.exchanged:
            return rows
        sent = [self._overlaps(self.rank, other) for other in range(self.size)]
        got = [self._overlaps(other, self.rank) for other in range(self.size)]
        halves = []
        begin, _ = self._bounds(self.num_rows, self.rank)
        upper = max(0, min(rows.shape[0], self.num_rows // 2 - begin))  # rows of the upper half
        for half, part in enumerate((rows[:upper], rows[upper:])):
            sizes = [counts[half] for counts in got]
            halves.append(self._all_to_all(part, [counts[half] for counts in sent], sizes))
        return torch.cat(halves)

    def from_pairs(self, pairs: torch.Tensor) -> torch.Tensor:
        """The way back of `to_pairs`."""
        if not self.exchanged:
            return pairs
        sent = [self._overlaps(other, self.rank) for other in range(self.size)]
        got = [self._overlaps(self.rank, other) for other in range(self.size)]
        halves = [
            self._all_to_all(
                part, [counts[half] for counts in sent], [counts[half] for counts in got]
            )
            for half, part in enumerate(pairs.chunk(2) if len(pairs) else (pairs, pairs))
        ]
        return torch.cat(halves)

    def _all_to_all(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self.group)
        return out


@torch.no_grad()
def refresh(
    layers: Iterable[QuantizedLinear], dtype: torch.dtype, *, compiled: bool = False
) -> None:
    """Makes the effective rows of every layer from its latents, rounded once to ``dtype``.

    Collective. Call it before a forward whenever latents, temperature or pressure have changed, and
    see that FSDP2 gathers anew (`reshard`).

    Args:
        layers: with `LatentShard` weights.
        dtype: of the products.
        compiled: run the formula as fused kernels, unless its scales span ranks.
    """
    made: dict[int, torch.Tensor] = {}  # by weight: linears that share one have one method
    for layer in layers:
        if layer.added_bias is not None:
            _refresh_bias(layer)
        if (shared := made.get(id(layer.weight))) is not None:
            layer.effective_rows = shared
            continue
        fake, rows = layer.weight_fake_quantizer, _Rows(layer)
        latent, *parameters = (local_rows(v).to(fake.tau.device) for v in layer.latents())
        latent, inputs, total = rows.to_pairs(latent), (fake.tau, fake.pressure), rows.total()
        if fake.is_hard:
            effective = layer.method.hard(latent, parameters, total)
        elif compiled and total is None:
            kernel = fused(layer.method.key(), "effective_weight")
            effective = kernel(latent, *inputs, parameters)
        else:
            effective = layer.method.effective_weight(latent, *inputs, parameters, total)
        effective = rows.from_pairs(effective.to(dtype))
        made[id(layer.weight)] = effective.to(local_rows(layer.weight).device)
        layer.effective_rows = made[id(layer.weight)]


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
            rows, device = _Rows(layer), layer.weight_fake_quantizer.tau.device
            latent, *parameters = (local_rows(value).to(device) for value in layer.latents())
            hard = layer.method.hard(rows.to_pairs(latent), parameters, rows.total())
            own = local_rows(layer.weight)
            own.lerp_(rows.from_pairs(hard).to(own.device), float(rate))


def _refresh_bias(layer: QuantizedLinear) -> None:
    fake, total = layer.weight_fake_quantizer, _Rows(layer).total()
    pressure = torch.ones_like(fake.pressure) if fake.is_hard else fake.pressure
    latent = local_rows(layer.weight).to(fake.tau.device)
    local_rows(layer.added_bias).copy_(layer.method.bias(latent, pressure, total))


def reshard(model: nn.Module) -> None:
    """Lets go of what FSDP2 has gathered and kept, so that the next forward gathers anew."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


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
        grad = local_rows(layer.weight.grad)
        latent, *parameters = (local_rows(v).to(fake.tau.device) for v in layer.latents())
        total = rows.total()
        fuses = compiled and total is None
        vjp = fused(layer.method.key(), "vjp") if fuses else layer.method.vjp
        inputs = rows.to_pairs(grad.to(fake.tau.device)), rows.to_pairs(latent)
        others = () if fuses else (total,)
        pulled, *others = vjp(*inputs, fake.tau, fake.pressure, parameters, *others)
        if layer.added_bias is not None and layer.added_bias.grad is not None:
            grad_bias = local_rows(layer.added_bias.grad).to(fake.tau.device)
            pulled = pulled + layer.method.bias_vjp(grad_bias, latent, fake.pressure, total)
            layer.added_bias.grad = None  # it follows from the latent weight
        grad.copy_(rows.from_pairs(pulled))
        _set_gradients(layer.method_parameters(), others)


def _set_gradients(parameters: Sequence[nn.Parameter], grads: Sequence[torch.Tensor]) -> None:
    for parameter, grad in zip(parameters, grads, strict=True):
        if not parameter.requires_grad:
            continue
        grad = grad.to(parameter.device)
        if isinstance(parameter, DTensor):
            spec = parameter.device_mesh, parameter.placements
            grad = DTensor.from_local(
                grad, *spec, run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
        parameter.grad = grad
