"""Packed weights in torchtune's own recipes: components for their ``quantizer`` key."""

from collections.abc import Sequence

import torch
from torch import nn
from torchtune.training import quantization

from hestia_tune.methods.fairy2i import Granularity
from hestia_tune.methods.granularity import GroupSize
from hestia_tune.selection import select_linears
from hestia_tune.tensors import Fairy2iTensor, TernaryTensor


class PackedWeights:
    """torchtune's ``quantizer`` for its own recipes on packed checkpoints, such as generate.

    ``quantize(model)`` puts empty packed weights in place of the dense ones, which are then loaded
    from the checkpoint.

    Args:
        group_size: of the checkpoint.
        include, exclude: the layers, as for training; see `hestia_tune.HestiaQATQuantizer`.
    """

    def __init__(
        self,
        group_size: GroupSize = 128,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
    ):
        self._group_size = group_size
        self._include, self._exclude = include, exclude or ()

    def _empty(self, weight: torch.Tensor) -> torch.Tensor:
        return TernaryTensor.from_hp(torch.zeros_like(weight), group_size=self._group_size)

    def quantize(self, model: nn.Module) -> nn.Module:
        """Swaps the weights in place; returns ``model``."""
        for linear in select_linears(model, self._include, self._exclude).values():
            empty = self._empty(linear.weight.detach())
            linear.weight = nn.Parameter(empty, requires_grad=False)
        return model


class PackedFairy2iWeights(PackedWeights):
    """`PackedWeights` for complex codes.

    Args:
        num_stages, granularity: of the checkpoint.
        include, exclude: the layers, as for training.
    """

    def __init__(
        self,
        num_stages: int = 2,
        granularity: Granularity = "tensor",
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
    ):
        self._options = {"num_stages": num_stages, "granularity": granularity}
        self._include, self._exclude = include, exclude or ()

    def _empty(self, weight: torch.Tensor) -> torch.Tensor:
        return Fairy2iTensor.from_hp(torch.zeros_like(weight), **self._options)


quantization._quantizer_to_mode[PackedFairy2iWeights] = "hestia"
quantization._quantizer_to_mode[PackedWeights] = "hestia"
