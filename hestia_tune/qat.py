"""Prepare and convert: swapping quantized linears in and out of any model, the torchao way.

`HestiaConfig` is registered with torchao, so `quantize_(model, HestiaConfig(step="prepare"))` works
like torchao's own configs; `hestia_tune.components` wraps it. Nothing here copies a weight: prepare
shares the parameter (also on the meta device), convert replaces it by the hard weight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchao.core.config import AOBaseConfig
from torchao.quantization.qat.linear import FakeQuantizedLinear
from torchao.quantization.transform_module import register_quantize_module_handler

from hestia_tune.config import require_number
from hestia_tune.quantizers import Quantizer, TernaryQuantizer, quantized_linear
from hestia_tune.quantizers.base import effective_weight
from hestia_tune.quantizers.granularity import GroupSize, validate_group_size
from hestia_tune.selection import clean_fqn
from hestia_tune.tensors import TernaryTensor, to_intx


def full_tensor(value: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that FSDP may have sharded, detached. Collective if it has."""
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


class FakeQuantizer(nn.Module):
    """weight -> effective weight, at the temperature and pressure held here as 0-D buffers.

    The buffers are float32 whatever the model is cast to, not saved in state dicts (they follow
    from the step), and tensors rather than floats, so that a change of value compiles nothing anew.

    Args:
        quantizer: the method.
        tau, pressure: initial values.
        device: where the buffers live.
    """

    def __init__(self, quantizer: Quantizer, *, tau: float, pressure: float, device=None):
        super().__init__()
        self.quantizer = quantizer
        self.enabled = True
        self._initial = (tau, pressure)
        self.register_buffer("tau", torch.empty((), device=device), persistent=False)
        self.register_buffer("pressure", torch.empty((), device=device), persistent=False)
        self.reset_buffers(device)

    def reset_buffers(self, device=None) -> None:
        """(Re)creates the buffers on ``device``: what a model made on the meta device needs."""
        for name, value in zip(("tau", "pressure"), self._initial, strict=True):
            setattr(self, name, torch.tensor(value, dtype=torch.float32, device=device))

    def _apply(self, fn, recurse=True):
        """Follows the model to another device, but not to another dtype."""
        values = {"tau": self.tau, "pressure": self.pressure}
        super()._apply(fn, recurse)
        for name, value in values.items():
            moved = getattr(self, name)
            if moved.dtype != torch.float32:
                setattr(self, name, value.to(moved.device))
        return self

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        if not self.enabled:
            return weight
        return effective_weight(weight, self.tau, self.pressure, self.quantizer)

    def extra_repr(self) -> str:
        return self.quantizer.key()


class QuantizedLinear(FakeQuantizedLinear):
    """A linear whose forward uses the effective weight; see `hestia_tune.quantizers.linear`.

    Made by `from_linear`. The parameter keeps its name ``weight`` and its identity, so state dicts,
    optimizers and tied weights do not notice.
    """

    weight_fake_quantizer: FakeQuantizer

    @classmethod
    def from_linear(
        cls, mod: nn.Linear, quantizer: Quantizer, *, tau: float = 0.3, pressure: float = 1.0
    ) -> "QuantizedLinear":
        """A quantized linear with the parameters of ``mod``; works on the meta device."""
        new = cls(mod.in_features, mod.out_features, mod.bias is not None, device="meta")
        new.weight, new.bias = mod.weight, mod.bias
        new.weight_fake_quantizer = FakeQuantizer(
            quantizer, tau=tau, pressure=pressure, device=mod.weight.device
        )
        return new.train(mod.training)

    def to_linear(self) -> nn.Linear:
        """A plain linear with the same latent parameters."""
        new = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        new.weight, new.bias = self.weight, self.bias
        return new.train(self.training)

    def to_hard_linear(
        self,
        pack: Callable[[torch.Tensor, Quantizer], torch.Tensor] = lambda w, quantizer: (
            quantizer.hard(w)
        ),
    ) -> nn.Linear:
        """A plain linear whose weight is the hard one, in the dtype of the latent weight.

        Args:
            pack: latent weight and its quantizer -> what stands for it, dense or packed.
        """
        new = self.to_linear()
        latent = self.weight.detach()
        hard = pack(full_tensor(latent), self.weight_fake_quantizer.quantizer)
        if isinstance(latent, DTensor):
            hard = distribute_tensor(hard, latent.device_mesh, latent.placements)
        dense = type(hard) in (torch.Tensor, DTensor)
        new.weight = nn.Parameter(hard, requires_grad=dense and self.weight.requires_grad)
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fake = self.weight_fake_quantizer
        if not fake.enabled:
            return F.linear(x, self.weight, self.bias)
        return quantized_linear(x, self.weight, self.bias, fake.tau, fake.pressure, fake.quantizer)


@dataclass(frozen=True, kw_only=True)
class QATConfigBase(AOBaseConfig):
    """What the configs of all methods share.

    Args:
        step: "prepare" swaps quantized linears in, "convert" swaps plain linears with hard
            weights back.
        tau: temperature until a schedule sets another, >= 0; 0 is straight-through.
        pressure: pressure until a schedule sets another, in [0, 1].
    """

    step: Literal["prepare", "convert"] = "prepare"
    tau: float = 0.3
    pressure: float = 1.0

    def __post_init__(self):
        if self.step not in ("prepare", "convert"):
            raise ValueError(f'step must be "prepare" or "convert"; got {self.step!r}')
        require_number("tau", self.tau, 0, 100, "the paper starts at 0.3")
        require_number("pressure", self.pressure, 0, 1, "1 is fully quantized")

    def quantizer(self) -> Quantizer:
        """The method."""
        raise NotImplementedError

    def pack(self, latent: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
        """What stands for a latent weight after "convert"; ``quantizer`` is its layer's own."""
        return quantizer.hard(latent)


@dataclass(frozen=True, kw_only=True)
class HestiaConfig(QATConfigBase):
    """Ternary QAT for ``torchao.quantization.quantize_``.

    Args:
        group_size: weights that share a scale: an int that divides in_features (128 in the
            paper), "channel" or "tensor".
        target: what "convert" makes of a weight: "dense" (gamma times code in its own dtype),
            "ternary" (a packed `hestia_tune.TernaryTensor`) or "intx" (torchao's int2 tensor).
        step, tau, pressure: see `QATConfigBase`.

    Raises:
        TypeError, ValueError: on values that are out of range.

    Note:
        ``quantize_`` by itself takes every linear, the output head too; pass
        ``filter_fn=hestia_tune.is_transformer_linear`` or use `HestiaQATQuantizer`.
    """

    group_size: GroupSize = 128
    target: Literal["dense", "ternary", "intx"] = "dense"

    def __post_init__(self):
        super().__post_init__()
        validate_group_size(self.group_size)
        if self.target not in ("dense", "ternary", "intx"):
            raise ValueError(f'target must be "dense", "ternary" or "intx"; got {self.target!r}')

    def quantizer(self) -> TernaryQuantizer:
        return TernaryQuantizer(group_size=self.group_size)

    def pack(self, latent: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
        if self.target == "dense":
            return super().pack(latent, quantizer)
        codes, scale = quantizer.codes(latent)
        make = to_intx if self.target == "intx" else TernaryTensor.from_codes
        return make(codes, scale, dtype=latent.dtype)


@register_quantize_module_handler(HestiaConfig)
def transform(module: nn.Module, config: QATConfigBase) -> nn.Module:
    """What ``quantize_`` does to a linear: the same for every method."""
    if config.step == "convert":
        return module.to_hard_linear(config.pack) if isinstance(module, QuantizedLinear) else module
    if isinstance(module, QuantizedLinear):
        return module
    quantizer = config.quantizer()
    quantizer.check_layer(module.in_features, module.out_features, str(module))
    return QuantizedLinear.from_linear(module, quantizer, tau=config.tau, pressure=config.pressure)


def quantized_linears(model: nn.Module) -> dict[str, QuantizedLinear]:
    """The quantized linears of a prepared model by fully qualified name, in model order."""
    return {
        clean_fqn(fqn): module
        for fqn, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }
