"""What a window trains: its quantized linears, the call of its blocks, and its optimizer."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from hestia_tune.blocks import BlockCall, hidden_of
from hestia_tune.config import ReconstructionConfig
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


_WARMUP_STEPS = 10


class WindowOptimizer:
    """AdamW without decay, of gradients clipped to norm 1; the rates warm up in ten steps and fall
    linearly to 0.

    Args:
        blocks: of the window, whose norms and biases are trained if ``settings.norm_lr`` is not 0;
            what else is not ternary, such as routers, stays as it is.
        layers: their quantized linears.
        settings: the rates.
        num_steps: of the window.

    Attributes:
        trained: latent weights, the method's parameters, norms and biases.
        step: number of steps taken.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        layers: Sequence[TrainedLayer],
        settings: ReconstructionConfig,
        num_steps: int,
    ):
        own = {id(value) for x in layers for value in x.layer.latents()}
        parameters = (p for block in blocks for p in block.parameters() if id(p) not in own)
        others = [p.requires_grad_(settings.norm_lr > 0) for p in parameters if p.dim() < 2]
        rates = (
            (settings.lr, [x.weight for x in layers]),
            (settings.parameter_lr, [p for x in layers for p in x.parameters]),
            (settings.norm_lr, others),
        )
        trained = [(lr, [p for p in some if p.requires_grad]) for lr, some in rates]
        groups = [{"params": some, "lr": lr, "peak": lr} for lr, some in trained if some]
        self._adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.trained = [p for group in groups for p in group["params"]]
        self.step, self._num_steps = 0, num_steps

    def take_step(self) -> None:
        """A step by the gradients, which are then gone."""
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        rate = min(1.0, (self.step + 1) / _WARMUP_STEPS) * (1.0 - self.step / self._num_steps)
        for group in self._adamw.param_groups:
            group["lr"] = group["peak"] * rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Step, moments, and the values of all that is trained."""
        values = [value.detach() for value in self.trained]
        return {"step": self.step, "trained": values, "adamw": self._adamw.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        self.step = state["step"]
        self._adamw.load_state_dict(state["adamw"])
        for value, kept in zip(self.trained, state["trained"], strict=True):
            value.copy_(kept)
