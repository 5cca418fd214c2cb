"""Define the quantized linear of Tequila, with the bias that dead weights make.

Without FSDP, the forward computes the bias by an autograd function that saves only the latent
weight. With FSDP, the bias is a parameter (out_features,). FSDP gathers it and reduces its gradient
like any other parameter. `hestia_tune.qat.shards` computes it and pulls its gradient back.
"""

import torch
from torch import nn

from hestia_tune.methods import TequilaMethod
from hestia_tune.qat.linear import QuantizedLinear, full_tensor


class TequilaLinear(QuantizedLinear, method=TequilaMethod):
    """A quantized linear with the bias of `hestia_tune.methods.tequila`."""

    derived_names = ("added_bias",)
    added_bias: nn.Parameter | None

    def derive(self, latent, pressure, total=None):
        return {"added_bias": self.method.bias(latent, pressure, total)}

    def derive_vjp(self, grads, latent, pressure, total=None):
        return self.method.bias_vjp(grads["added_bias"], latent, pressure, total)

    def hard_bias(self, latent):
        added = self.method.bias(latent, torch.ones((), device=latent.device))
        return added if self.bias is None else full_tensor(self.bias) + added

    def forward_bias(self):
        fake, added = self.weight_fake_quantizer, self.added_bias
        if not fake.enabled:
            return self.bias
        if not self.weight_is_effective:
            pressure = torch.ones_like(fake.pressure) if fake.is_hard else fake.pressure
            added = _Bias.apply(self.weight, fake.method, pressure)
        if self.bias is None or added is None:
            return self.bias if added is None else added
        return self.bias + added


class _Bias(torch.autograd.Function):
    """weight, method, pressure -> the bias; saves the weight and the pressure."""

    @staticmethod
    def forward(ctx, weight, method, pressure):
        ctx.method = method
        ctx.save_for_backward(weight, pressure)
        return method.bias(weight, pressure)

    @staticmethod
    def backward(ctx, grad):
        return ctx.method.bias_vjp(grad, *ctx.saved_tensors), None, None
