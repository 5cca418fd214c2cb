"""The optimizer of a window: its rates, its schedule, and where it stands."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hestia_tune.config import ReconstructionConfig
from hestia_tune.reconstruction.layers import TrainedLayer

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
