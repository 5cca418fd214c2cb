"""Quantize many layers by one call: buckets of layers with the same method and width of group.

A step of training turns every latent weight into an effective weight, and pulls every gradient
back. A call per layer costs the host 20 to 100 microseconds twice a step, whatever the size of the
layer, and a small model on a GPU waits for the host. A scale covers one group and nothing else, so
a bucket lays the groups of its layers below each other, (groups, group_size), with a temperature
for each group, and the formulas run once.

In one process the latents of a bucket lie in one tensor (`Bucket.lay_out`). FSDP2 has a storage for
each shard, so there a bucket copies the latents that it concatenates. A pass over 16 MB takes a GPU
about as long as the host needs to launch it, so a layer of `BUCKET_WEIGHTS` weights or more gains
nothing from company: it is alone, and is not copied. Also alone are layers whose scales span rows,
whose method pairs rows, or whose method has extras.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hestia_tune.methods.groups import GroupMethod, group_width
from hestia_tune.methods.method import SumOverRanks, fused
from hestia_tune.qat.exchange import PairedRows
from hestia_tune.qat.linear import QuantizedLayer, local_rows

BUCKET_WEIGHTS = 2**22  # 16 MB of float32 latents


class LatentRows:
    """The rows of a quantized linear that are on this process.

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
            effective = self.formula("effective_weight")(rows, fake.tau, pressure, parameters)
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
        pulled, *others = self.formula("vjp")(*inputs)
        if extras := [grads[key] for key in self._layer.extra_keys if key in grads]:
            added = self._layer.method.extras_vjp(extras, latent, fake.pressure, self.total)
            pulled = pulled + added
        pulled = pulled if self._paired is None else self._paired.from_pairs(pulled)
        return [pulled.view_as(grad), *others]

    def formula(self, name: str) -> Callable[..., Any]:
        """Return a formula of the method, as fused kernels unless its scales span ranks."""
        if self._compiled and self.total is None:
            return fused(self._layer.method.key(), name)
        return functools.partial(getattr(self._layer.method, name), total=self.total)

    def _sum(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks."""
        value = value.contiguous()
        dist.all_reduce(value, group=self._group)
        return value


class _Joint:
    """Tensors whose memory is moved into one storage, one after the other.

    They keep their identity and values.

    Args:
        values: Contiguous tensors.
        width: The length of a row.

    Attributes:
        rows: All values, (rows, width).
    """

    def __init__(self, values: Sequence[Tensor], width: int):
        self._values = values
        self.rows = _concatenated(values, width)
        parts = self.rows.view(-1).split([value.numel() for value in values])
        for value, part in zip(values, parts, strict=True):
            value.data = part.view(value.shape)
        has_memory = type(self.rows) is Tensor  # not a FakeTensor of an estimate
        self._places = [value.data_ptr() for value in values] if has_memory else None

    def is_intact(self) -> bool:
        """Return whether the tensors still have this memory; `move` gives them another."""
        places = self._places
        return places is None or [value.data_ptr() for value in self._values] == places


def _concatenated(values: Iterable[Tensor], width: int) -> Tensor:
    """Return this process's part of tensors, (rows, width)."""
    return torch.cat([local_rows(value).reshape(-1, width) for value in values])


class Bucket:
    """Layers that one call quantizes, or a layer that is alone.

    Args:
        layers: Layers of one method and one width of group, or a single layer.
        compiled: Whether to run the formulas as fused kernels, unless scales span ranks.

    Attributes:
        layers: The given layers.
    """

    def __init__(self, layers: Sequence[QuantizedLayer], *, compiled: bool = False):
        self.layers = [*layers]
        self._method = layers[0].method
        self._alone = [LatentRows(layer, compiled=compiled) for layer in layers]
        self._shapes = [[local_rows(v).shape for v in layer.latents()] for layer in layers]
        self._counts: list[int] = []  # of groups, by layer
        self._joint: list[_Joint] = []  # temperatures, weights, and each parameter of the method
        if len(layers) > 1:
            self._widths = [_width(layers[0])] + [1] * len(self._method.parameter_names)
            self._counts = [shape[0].numel() // self._widths[0] for shape in self._shapes]
            # The layer of every group.
            owner = torch.arange(len(layers)).repeat_interleave(
                torch.tensor(self._counts), output_size=sum(self._counts)
            )
            self._owner = owner.to(layers[0].weight_fake_quantizer.tau.device)

    def lay_out(self) -> None:
        """Move the latents of all layers into one tensor, and their temperatures into another.

        After that, only `pull_back` concatenates anything: the gradients. The parameters keep their
        identity and values. Call it in one process, when the latents are on their device.
        """
        if len(self.layers) > 1:
            taus = [layer.weight_fake_quantizer.tau for layer in self.layers]
            columns = zip(*(layer.latents() for layer in self.layers), strict=True)
            self._joint = [_Joint(taus, 1), *map(_Joint, columns, self._widths)]

    @torch.no_grad()
    def quantize(self, dtype: torch.dtype, *, hard: bool | None = None) -> list[dict[str, Tensor]]:
        """Return for each layer what `LatentRows.quantize` returns. Collective.

        The results may share memory.

        Args:
            dtype: The dtype of the products. The rows are rounded to it once.
            hard: Whether to return the hard rows. None: as the quantizer of each layer says.
        """
        effective = self.effective_rows(hard=hard)
        if effective is None:
            fakes = [layer.weight_fake_quantizer for layer in self.layers]
            is_hard = [fake.is_hard if hard is None else hard for fake in fakes]
            return [
                rows.quantize(dtype, is_hard=each)
                for rows, each in zip(self._alone, is_hard, strict=True)
            ]
        parts = zip(effective.to(dtype).split(self._counts), self._shapes, strict=True)
        return [{"weight": part.view(shape)} for part, (shape, *_) in parts]

    @torch.no_grad()
    def effective_rows(self, *, hard: bool | None = None) -> Tensor | None:
        """Return the effective weights of all layers, one after the other, (groups, group_size).

        They are not rounded yet. None: the layer is alone, or only some of the layers are hard.

        Args:
            hard: Whether to return the hard weights. None: as the quantizer of each layer says.
        """
        if len(self.layers) == 1:
            return None
        if hard is None:
            modes = {layer.weight_fake_quantizer.is_hard for layer in self.layers}
            if len(modes) > 1:
                return None
            (hard,) = modes
        weight, tau, pressure, parameters = self._joined()
        if hard:
            return self._method.hard(weight, parameters)
        return self._alone[0].formula("effective_weight")(weight, tau, pressure, parameters)

    @torch.no_grad()
    def pull_back(self, grads: Sequence[Mapping[str, Tensor]]) -> list[list[Tensor] | None]:
        """Return for each layer what `LatentRows.pull_back` returns. Collective.

        Args:
            grads: For each layer, the gradients of the tensors that `quantize` returned, by name.
                Without a "weight", the result is None.
        """
        if len(self.layers) == 1 or not all("weight" in grad for grad in grads):
            return [
                rows.pull_back(grad) if "weight" in grad else None
                for rows, grad in zip(self._alone, grads, strict=True)
            ]
        weight, tau, pressure, parameters = self._joined()
        whole = torch.cat([grad["weight"].reshape(-1, weight.shape[1]) for grad in grads])
        pulled = self._alone[0].formula("vjp")(whole, weight, tau, pressure, parameters)
        by_layer = zip(*(each.split(self._counts) for each in pulled), strict=True)
        return [
            [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
            for parts, shapes in zip(by_layer, self._shapes, strict=True)
        ]

    def _joined(self) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Return the latents (groups, group_size), tau (groups, 1, 1), pressure and parameters.

        A parameter has one value for each group, (groups, 1).
        """
        pressure = self.layers[0].weight_fake_quantizer.pressure
        if self._joint and all(joint.is_intact() for joint in self._joint):
            tau, weight, *parameters = (joint.rows for joint in self._joint)
        else:
            tau = torch.stack([layer.weight_fake_quantizer.tau for layer in self.layers])
            columns = zip(*(layer.latents() for layer in self.layers), strict=True)
            weight, *parameters = map(_concatenated, columns, self._widths)
        return weight, tau[self._owner].view(-1, 1, 1), pressure, parameters


def lies_in_groups(layer: QuantizedLayer) -> bool:
    """Return whether a group of consecutive weights determines all that its weights become."""
    method = layer.method
    is_group = isinstance(method, GroupMethod) and not method.scales_span_rows
    return is_group and not method.extra_names


def _width(layer: QuantizedLayer) -> int:
    """Return how many weights share a scale, for a layer that `lies_in_groups`."""
    return group_width(cast(GroupMethod, layer.method).group_size, layer.weight.shape[-1])


def buckets_of(layers: Iterable[QuantizedLayer], *, compiled: bool = False) -> list[Bucket]:
    """Return the buckets of the layers of a model. Layers that share a weight are there once.

    Args:
        layers: The layers, with their weights on the device.
        compiled: See `Bucket`.
    """
    single, kinds = [], {}
    for layer in {id(layer.weight): layer for layer in layers}.values():
        weight = local_rows(layer.weight)
        if not lies_in_groups(layer) or weight.numel() >= BUCKET_WEIGHTS:
            single.append([layer])
            continue
        kind = (
            layer.method,
            _width(layer),
            weight.device,
            weight.dtype,
            layer.weight.requires_grad,
        )
        groups = kinds.setdefault(kind, [[]])
        held = sum(local_rows(other.weight).numel() for other in groups[-1])
        if held + weight.numel() > BUCKET_WEIGHTS:
            groups.append([])
        groups[-1].append(layer)
    groups = [*single, *(group for found in kinds.values() for group in found)]
    return [Bucket(group, compiled=compiled) for group in groups]
