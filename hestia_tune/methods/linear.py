"""The quantized linear: one autograd function that never keeps an effective weight.

`F.linear` would save the effective weight for the gradient of its input: a second copy of the
model, which FSDP could not free after the forward either. The function here saves its input (as any
linear does) and the latent weight, and recomputes the effective weight in backward. The price is
one more pass over the weight, small beside the three matrix products of a linear.

Under `torch.compile` that is not enough: the compiler would find the recomputation to be a common
subexpression of the forward and save its result after all. So in a compiled region the three steps
are opaque operators (`hestia::...`), which run the same formulas, themselves compiled into fused
kernels. Operators take no Python objects, so a method travels as its key. Eager mode calls the
formulas directly.
"""

import torch
import torch.nn.functional as F

from hestia_tune.methods.base import Method, fused, weight_grad_op


def _linear(x, weight, bias, tau, pressure, effective_weight):
    return F.linear(x, effective_weight(weight, tau, pressure).to(x.dtype), bias)


def _input_grad(grad, weight, tau, pressure, effective_weight):
    return grad @ effective_weight(weight, tau, pressure).to(grad.dtype)


@torch.library.custom_op("hestia::linear", mutates_args=())
def _linear_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tau: torch.Tensor,
    pressure: torch.Tensor,
    key: str,
) -> torch.Tensor:
    return _linear(x, weight, bias, tau, pressure, fused(key, "effective_weight"))


@_linear_op.register_fake
def _(x, weight, bias, tau, pressure, key):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("hestia::input_grad", mutates_args=())
def _input_grad_op(
    grad: torch.Tensor, weight: torch.Tensor, tau: torch.Tensor, pressure: torch.Tensor, key: str
) -> torch.Tensor:
    return _input_grad(grad, weight, tau, pressure, fused(key, "effective_weight"))


@_input_grad_op.register_fake
def _(grad, weight, tau, pressure, key):
    return grad.new_empty((*grad.shape[:-1], weight.shape[1]))


class _QuantizedLinear(torch.autograd.Function):
    """x·W_eff^T + bias; saves ``x``, ``weight`` and two scalars."""

    @staticmethod
    def forward(x, weight, bias, tau, pressure, method):
        if torch.compiler.is_compiling():
            return _linear_op(x, weight, bias, tau, pressure, method.key())
        return _linear(x, weight, bias, tau, pressure, method.effective_weight)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, bias, tau, pressure, ctx.method = inputs
        ctx.has_bias = bias is not None
        weight_needs_grad = ctx.needs_input_grad[1]
        ctx.save_for_backward(x if weight_needs_grad else None, weight, tau, pressure)

    @staticmethod
    def backward(ctx, grad):
        x, weight, tau, pressure = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        method, compiling = ctx.method, torch.compiler.is_compiling()
        scalars = (tau, pressure)
        grad_x = grad_weight = grad_bias = None
        if needs_x and compiling:
            grad_x = _input_grad_op(grad, weight, *scalars, method.key())
        elif needs_x:
            grad_x = _input_grad(grad, weight, *scalars, method.effective_weight)
        grad_NO = grad.reshape(-1, grad.shape[-1])
        if needs_weight:
            grad_eff = grad_NO.t() @ x.reshape(-1, x.shape[-1])
            if compiling:
                grad_weight = weight_grad_op(grad_eff, weight, *scalars, method.key())
            else:
                grad_weight = method.vjp(grad_eff, weight, *scalars)
        if ctx.has_bias and needs_bias:
            grad_bias = grad_NO.sum(0)
        return grad_x, grad_weight, grad_bias, None, None, None


def quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tau: torch.Tensor,
    pressure: torch.Tensor,
    method: Method,
) -> torch.Tensor:
    """``F.linear`` with the effective weight (Eq. 7) in place of the latent one.

    Args:
        x: (..., in_features); its dtype (or autocast's) is the dtype of the products.
        weight: (out_features, in_features) latent weight.
        bias: (out_features,) or None.
        tau, pressure: 0-D tensors, so that a change of value compiles nothing anew.
        method: the method.
    """
    autocast = torch.is_autocast_enabled(x.device.type)
    if autocast:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    bias = None if bias is None else bias.to(x.dtype)
    if not autocast:
        return _QuantizedLinear.apply(x, weight, bias, tau, pressure, method)
    with torch.autocast(x.device.type, enabled=False):
        return _QuantizedLinear.apply(x, weight, bias, tau, pressure, method)
