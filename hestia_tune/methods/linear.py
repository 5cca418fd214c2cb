"""Multiply by the effective weight in one autograd function that never keeps it.

`F.linear` would save the effective weight for the gradient of its input. That would be a second
copy of the model, and FSDP could not free it after the forward either. The function here saves its
input, as any linear does, and the latent weight. It recomputes the effective weight in backward.
The price is one more pass over the weight, which is small beside the three matrix products of a
linear.

`torch.compile` needs more. The compiler would recognise the recomputation as a common
subexpression of the forward, and would save its result after all. So in a compiled region three
steps are opaque operators (`hestia::...`): the product, the gradient of the input, and the
pull-back to the latent weight. They run the same formulas, compiled into fused kernels. Operators
take no Python objects, so they take the key of the method.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hestia_tune.methods.base import Method, fused, weight_grad


def _multiply(x, bias, effective, is_backward):
    effective = effective.to(x.dtype)
    if is_backward:
        return x @ effective  # (..., out) x (out, in)
    return F.linear(x, effective, bias)  # (..., in) x (out, in)^T


@torch.library.custom_op("hestia::product", mutates_args=())
def _product_operator(
    key: str,
    x: Tensor,
    bias: Tensor | None,
    latent: list[Tensor],
    parameters: list[Tensor],
    is_backward: bool,
) -> Tensor:
    effective = fused(key, "effective_weight")(*latent, parameters)
    return _multiply(x, bias, effective, is_backward)


@_product_operator.register_fake
def _(key, x, bias, latent, parameters, is_backward):
    effective = Method.from_key(key).effective_weight(*latent, parameters)
    return _multiply(x, bias, effective, is_backward)


def _product(method: Method, x, bias, latent, parameters, *, is_backward: bool = False) -> Tensor:
    """Return the product with the effective weight, by one operator in a compiled region.

    Args:
        method: The method of the weight.
        x: The input (..., in_features). In backward, the gradient (..., out_features) of the
            output.
        bias: The bias (out_features,), or None.
        latent: The latent weight, tau and pressure.
        parameters: The method's parameters.
        is_backward: Whether to return the gradient of the input.
    """
    if torch.compiler.is_compiling():
        inputs = list(latent), list(parameters)
        return _product_operator(method.key(), x, bias, *inputs, is_backward)
    return _multiply(x, bias, method.effective_weight(*latent, parameters), is_backward)


class _QuantizedLinear(torch.autograd.Function):
    """y = x·W_eff^T + bias; saves ``x``, the latent weight, the scalars and the parameters."""

    @staticmethod
    def forward(ctx, x, method, bias, weight, tau, pressure, *parameters):
        ctx.method, ctx.has_bias = method, bias is not None
        saved_x = x if weight.requires_grad else None
        ctx.save_for_backward(saved_x, weight, tau, pressure, *parameters)
        return _product(method, x, bias, (weight, tau, pressure), parameters)

    @staticmethod
    def backward(ctx, grad):
        x, weight, tau, pressure, *parameters = ctx.saved_tensors
        needs_x, _, needs_bias, needs_weight, *_ = ctx.needs_input_grad
        latent = weight, tau, pressure
        grad_x = grad_bias = None
        grads = [None] * (1 + len(parameters))
        if needs_x:
            grad_x = _product(ctx.method, grad, None, latent, parameters, is_backward=True)
        grad_NO = grad.reshape(-1, grad.shape[-1])
        if needs_weight:
            grad_eff = grad_NO.t() @ x.reshape(-1, x.shape[-1])  # (out, N) x (N, in)
            grads = weight_grad(ctx.method, grad_eff, latent, parameters)
        if ctx.has_bias and needs_bias:
            grad_bias = grad_NO.sum(0)
        return grad_x, None, grad_bias, grads[0], None, None, *grads[1:]


def quantized_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tau: Tensor,
    pressure: Tensor,
    method: Method,
    parameters: Sequence[Tensor] = (),
) -> Tensor:
    """Return ``F.linear`` with the effective weight (Eq. 7) in place of the latent weight.

    Args:
        x: The input (..., in_features). Its dtype, or autocast's dtype, is the products' dtype.
        weight: The latent weight (out_features, in_features). It is quantized in its own dtype,
            and the result is rounded once.
        bias: The bias (out_features,), or None.
        tau: The temperature, a 0-D tensor, so that a new value compiles nothing again.
        pressure: The pressure, a 0-D tensor for the same reason.
        method: The method of the weight.
        parameters: The parameters in the order of `Method.parameter_names`.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
        with torch.autocast(x.device.type, enabled=False):
            return quantized_linear(x, weight, bias, tau, pressure, method, parameters)
    bias = None if bias is None else bias.to(x.dtype)
    return _QuantizedLinear.apply(x, method, bias, weight, tau, pressure, *parameters)
