"""The quantized linear: one autograd function that never keeps an effective weight.

`F.linear` would save the effective weight for the gradient of its input: a second copy of the
model, which FSDP could not free after the forward either. The function here saves its input (as any
linear does) and the latent weight, and recomputes the effective weight in backward. The price is
one more pass over the weight, small beside the three matrix products of a linear.

Under `torch.compile` that is not enough: the compiler would find the recomputation to be a common
subexpression of the forward and save its result after all. So in a compiled region the three steps
are opaque operators (`hestia::...`), which run the same formulas, themselves compiled into fused
kernels. Operators take no Python objects, so a method travels as its key.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hestia_tune.methods.base import Method, fused, weight_grad


def _multiply(x, effective, bias):  # (..., in) x (out, in)^T
    return F.linear(x, effective.to(x.dtype), bias)


def _multiply_back(grad, effective):  # (..., out) x (out, in)
    return grad @ effective.to(grad.dtype)


@torch.library.custom_op("hestia::linear", mutates_args=())
def _linear_operator(
    x: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    tau: Tensor,
    pressure: Tensor,
    parameters: list[Tensor],
    key: str,
) -> Tensor:
    return _multiply(x, fused(key, "effective_weight")(weight, tau, pressure, parameters), bias)


@_linear_operator.register_fake
def _(x, bias, weight, tau, pressure, parameters, key):
    effective = Method.from_key(key).effective_weight(weight, tau, pressure, parameters)
    return _multiply(x, effective, bias)


@torch.library.custom_op("hestia::input_grad", mutates_args=())
def _input_grad_operator(
    grad: Tensor, weight: Tensor, tau: Tensor, pressure: Tensor, parameters: list[Tensor], key: str
) -> Tensor:
    return _multiply_back(grad, fused(key, "effective_weight")(weight, tau, pressure, parameters))


@_input_grad_operator.register_fake
def _(grad, weight, tau, pressure, parameters, key):
    effective = Method.from_key(key).effective_weight(weight, tau, pressure, parameters)
    return _multiply_back(grad, effective)


def _linear(method: Method, x, bias, *latent) -> torch.Tensor:
    """Return the product with the effective weight, by one operator in a compiled region."""
    if torch.compiler.is_compiling():
        return _linear_operator(x, bias, *latent, method.key())
    return _multiply(x, method.effective_weight(*latent), bias)


def _input_grad(method: Method, grad, *latent) -> torch.Tensor:
    """Return the gradient of the input, by one operator in a compiled region."""
    if torch.compiler.is_compiling():
        return _input_grad_operator(grad, *latent, method.key())
    return _multiply_back(grad, method.effective_weight(*latent))


class _QuantizedLinear(torch.autograd.Function):
    """y = x·W_eff^T + bias; saves ``x``, the latent weight, the scalars and the parameters."""

    @staticmethod
    def forward(ctx, x, method, bias, weight, tau, pressure, *parameters):
        ctx.method, ctx.has_bias = method, bias is not None
        kept = x if weight.requires_grad else None
        ctx.save_for_backward(kept, weight, tau, pressure, *parameters)
        return _linear(method, x, bias, weight, tau, pressure, list(parameters))

    @staticmethod
    def backward(ctx, grad):
        x, weight, tau, pressure, *parameters = ctx.saved_tensors
        needs_x, _, needs_bias, needs_weight, *_ = ctx.needs_input_grad
        latent = (weight, tau, pressure, parameters)
        grad_x = grad_bias = None
        grads = [None] * (1 + len(parameters))
        if needs_x:
            grad_x = _input_grad(ctx.method, grad, *latent)
        grad_NO = grad.reshape(-1, grad.shape[-1])
        if needs_weight:
            grad_eff = grad_NO.t() @ x.reshape(-1, x.shape[-1])  # (out, N) x (N, in)
            grads = weight_grad(ctx.method, grad_eff, *latent)
        if ctx.has_bias and needs_bias:
            grad_bias = grad_NO.sum(0)
        return grad_x, None, grad_bias, grads[0], None, None, *grads[1:]


def quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tau: torch.Tensor,
    pressure: torch.Tensor,
    method: Method,
    parameters: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """``F.linear`` with the effective weight (Eq. 7) in place of the latent one.

    Args:
        x: (..., in_features); its dtype (or autocast's) is the dtype of the products.
        weight: (out_features, in_features) latent weight; quantized as it is, then rounded once.
        bias: (out_features,) or None.
        tau, pressure: 0-D tensors, so that a change of value compiles nothing anew.
        method: the method.
        parameters: of the method, as `Method.parameter_names`.
    """
    autocast = torch.is_autocast_enabled(x.device.type)
    if autocast:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    bias = None if bias is None else bias.to(x.dtype)
    arguments = (x, method, bias, weight, tau, pressure, *parameters)
    if not autocast:
        return _QuantizedLinear.apply(*arguments)
    with torch.autocast(x.device.type, enabled=False):
        return _QuantizedLinear.apply(*arguments)
