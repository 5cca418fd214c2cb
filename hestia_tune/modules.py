"""The modules that are swapped in for linears: `QuantizedLinear` and what it holds."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchao.quantization.qat.linear import FakeQuantizedLinear

from hestia_tune.methods.base import Method, effective_weight
from hestia_tune.methods.linear import quantized_linear
from hestia_tune.selection import clean_fqn


def full_tensor(value: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that FSDP may have sharded, detached. Collective if it has."""
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


class FakeQuantizer(nn.Module):
    """weight -> effective weight, at the temperature and pressure held here as 0-D buffers.

    The buffers are float32 whatever the model is cast to, not saved in state dicts (they follow
    from the step), and tensors rather than floats, so that a change of value compiles nothing anew.

    Args:
        method: the method.
        tau, pressure: initial values.
        device: where the buffers live.
    """

    tau: torch.Tensor
    pressure: torch.Tensor

    def __init__(self, method: Method, *, tau: float, pressure: float, device=None):
        super().__init__()
        self.method = method
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
        return effective_weight(weight, self.tau, self.pressure, self.method)

    def extra_repr(self) -> str:
        return self.method.key()


class QuantizedLinear(FakeQuantizedLinear):
    """A linear whose forward uses the effective weight; see `hestia_tune.methods.linear`.

    Made by `from_linear`. The parameter keeps its name ``weight`` and its identity, so state dicts,
    optimizers and tied weights do not notice.
    """

    weight_fake_quantizer: FakeQuantizer

    @classmethod
    def from_linear(
        cls, mod: nn.Linear, method: Method, *, tau: float = 0.3, pressure: float = 1.0
    ) -> "QuantizedLinear":
        """A quantized linear with the parameters of ``mod``; works on the meta device."""
        new = cls(mod.in_features, mod.out_features, mod.bias is not None, device="meta")
        new.weight, new.bias = mod.weight, mod.bias
        new.weight_fake_quantizer = FakeQuantizer(
            method, tau=tau, pressure=pressure, device=mod.weight.device
        )
        return new.train(mod.training)

    def to_linear(self) -> nn.Linear:
        """A plain linear with the same latent parameters."""
        new = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        new.weight, new.bias = self.weight, self.bias
        return new.train(self.training)

    def to_hard_linear(
        self,
        pack: Callable[[Method, torch.Tensor], torch.Tensor] = Method.hard,
    ) -> nn.Linear:
        """A plain linear whose weight is the hard one, in the dtype of the latent weight.

        Args:
            pack: method and latent weight -> what stands for it, dense or packed.
        """
        new = self.to_linear()
        latent = self.weight.detach()
        hard = pack(self.weight_fake_quantizer.method, full_tensor(latent))
        if isinstance(latent, DTensor):
            hard = distribute_tensor(hard, latent.device_mesh, latent.placements)
        dense = type(hard) in (torch.Tensor, DTensor)
        new.weight = nn.Parameter(hard, requires_grad=dense and self.weight.requires_grad)
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fake = self.weight_fake_quantizer
        if not fake.enabled:
            return F.linear(x, self.weight, self.bias)
        return quantized_linear(x, self.weight, self.bias, fake.tau, fake.pressure, fake.method)


def quantized_linears(model: nn.Module) -> dict[str, QuantizedLinear]:
    """The quantized linears of a prepared model by fully qualified name, in model order."""
    return {
        clean_fqn(fqn): module
        for fqn, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }
