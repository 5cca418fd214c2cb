"""The linears of a window in training, and the blocks that they stand in."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from hestia_tune.blocks import BlockCall, hidden_of
from hestia_tune.methods.base import fused
from hestia_tune.modules import QuantizedLinear, quantized_linears

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
    """What is trained of a quantized linear, and what it computes with, as leaves of the graph.

    Attributes:
        effective: by name, what stands for the linear's own: E, and the bias of a method that
            ``adds_bias``.
    """

    def __init__(self, layer: QuantizedLinear, name: str, compiled: bool):
        self.layer, self.name, self.method = layer, name, layer.method
        self._compiled = compiled
        self.weight = layer.weight.detach()
        self.parameters = [
            value.detach().requires_grad_(key in self.method.trained_parameters)
            for key, value in zip(
                self.method.parameter_names, layer.method_parameters(), strict=True
            )
        ]
        self.weight.requires_grad_()
        self.effective: dict[str, torch.Tensor] = {}

    def _formula(self, name: str) -> Callable[..., Any]:
        return fused(self.method.key(), name) if self._compiled else getattr(self.method, name)

    @torch.no_grad()
    def refresh(self, dtype: torch.dtype, *, hard: bool = False) -> None:
        """Makes E, rounded once, a leaf that collects a gradient; or the hard weight."""
        fake, latent = self.layer.weight_fake_quantizer, self.weight.detach()
        if hard:
            pressure = torch.ones_like(fake.pressure)
            effective = self.method.hard(latent, self.parameters)
        else:
            pressure, formula = fake.pressure, self._formula("effective_weight")
            effective = formula(latent, fake.tau, pressure, self.parameters)
        self.effective = {"weight": effective.to(dtype).requires_grad_(not hard)}
        if self.method.adds_bias:
            added = self.method.bias(latent, pressure)
            self.effective["added_bias"] = added.requires_grad_(not hard)

    @torch.no_grad()
    def pull_back(self) -> None:
        """The gradients of what is trained, from that of E and of the bias, which go."""
        fake, latent = self.layer.weight_fake_quantizer, self.weight.detach()
        grads = {key: value.grad for key, value in self.effective.items()}
        self.effective, grad = {}, grads["weight"]
        assert grad is not None
        formula = self._formula("vjp")
        grad, *others = formula(grad.float(), latent, fake.tau, fake.pressure, self.parameters)
        if self.method.adds_bias:
            grad = grad + self.method.bias_vjp(grads["added_bias"], latent, fake.pressure)
        self.weight.grad = grad
        for value, other in zip(self.parameters, others, strict=True):
            if value.requires_grad:
                value.grad = other
