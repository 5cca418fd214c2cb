"""The linears of a window in training, and the blocks that they stand in."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from hestia_tune.blocks import BlockCall, hidden_of
from hestia_tune.qat.linear import QuantizedLinear, quantized_linears
from hestia_tune.qat.shards import LatentRows

_PLAIN = (bool, int, float, str, type(None))


def alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules compute the same function of their parameters, buffers and inputs."""

    def facts(module: nn.Module) -> Iterator[Any]:
        for name, part in module.named_modules():
            plain = {k: v for k, v in vars(part).items() if isinstance(v, _PLAIN)}
            plain.pop("layer_idx", None)  # transformers' key into caches, of which there are none
            yield name, type(part), plain
        yield from ((name, p.shape) for name, p in module.named_parameters())

    return [*facts(one)] == [*facts(other)]


@contextlib.contextmanager
def plain_linears(block: nn.Module) -> Iterator[None]:
    """Quantized linears take the weight that they are handed as it is."""
    linears = quantized_linears(block).values()
    for module in linears:
        module.weight_is_effective = True
    yield
    for module in linears:
        module.weight_is_effective = False


def call_block(
    template: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    states: torch.Tensor,
    inputs: BlockCall,
) -> torch.Tensor:
    """The function of ``template`` with the parameters and buffers of a block that is alike."""
    return hidden_of(
        functional_call(template, dict(tensors), (states, *inputs.args), inputs.kwargs)
    )


class TrainedLayer:
    """A quantized linear in training: what is trained, and what it computes with, as leaves.

    Attributes:
        effective: Name -> what the linear computes with: E as "weight", and what it derives.
    """

    def __init__(self, layer: QuantizedLinear, name: str, compiled: bool):
        self.layer, self.name, method = layer, name, layer.method
        self._rows = LatentRows(layer, compiled=compiled)
        self.weight = layer.weight.detach().requires_grad_()
        self.parameters = [
            value.detach().requires_grad_(key in method.trained_parameters)
            for key, value in zip(method.parameter_names, layer.method_parameters(), strict=True)
        ]
        self.effective: dict[str, torch.Tensor] = {}

    def refresh(self, dtype: torch.dtype, *, hard: bool = False) -> None:
        """Make E, rounded once, a leaf that collects a gradient; or the hard weight."""
        made = self._rows.quantize(dtype, is_hard=hard)
        self.effective = {name: value.requires_grad_(not hard) for name, value in made.items()}

    def pull_back(self) -> None:
        """Set the gradients of what is trained, from those of the leaves, which go."""
        grads = {name: value.grad.float() for name, value in self.effective.items()}
        self.effective = {}
        self.weight.grad, *others = self._rows.pull_back(grads)
        for value, other in zip(self.parameters, others, strict=True):
            if value.requires_grad:
                value.grad = other
