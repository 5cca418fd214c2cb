"""Packed weights in torchtune's own recipes: a component for their ``quantizer`` key."""

from collections.abc import Sequence

import torch
from torch import nn
from torchtune.training import quantization

from hestia_tune.methods import Method
from hestia_tune.selection import select_linears
from hestia_tune.tensors import pack


class PackedWeights:
    """torchtune's ``quantizer`` for its own recipes on packed checkpoints, such as generate.

    ``quantize(model)`` puts empty packed weights in place of the dense ones, which are then loaded
    from the checkpoint. Linears of a shape that the method cannot take stay dense, as in training.

    Args:
        method: the key of the checkpoint's method, such as "ternary, group_size=128".
        include, exclude: the layers, as for training; see `hestia_tune.HestiaQATQuantizer`.
    """

    def __init__(
        self,
        method: str,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
    ):
        self._method = Method.from_key(method)
        self._include, self._exclude = include, exclude or ()

    def quantize(self, model: nn.Module) -> nn.Module:
        """Swaps the weights in place; returns ``model``."""
        for name, linear in select_linears(model, self._include, self._exclude).items():
            try:
                self._method.check_layer(linear.in_features, linear.out_features, name)
            except ValueError:
                continue
            empty = pack(self._method, torch.zeros_like(linear.weight.detach()))
            linear.weight = nn.Parameter(empty, requires_grad=False)
        return model


quantization._quantizer_to_mode[PackedWeights] = "hestia"
