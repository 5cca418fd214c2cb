"""Compute effective weights and their products by autograd functions that keep no weight.

`effective_weight` is the differentiable map of a method. Plain autograd would save about ten
tensors of the weight's size. The closed form saves only the weight.

`quantized_linear` goes one further. `F.linear` would save the effective weight for the gradient of
its input. That would be a second copy of the model, and FSDP could not free it after the forward
either. The function here saves its input, as any linear does, and the latent weight. It recomputes
the effective weight in backward. The price is one more pass over the weight, which is small beside
the three matrix products of a linear.

`torch.compile` needs more. The compiler would recognise the recomputation as a common
subexpression of the forward, and would save its result after all. So in a compiled region three
steps are opaque operators (`hestia::...`): the product, the gradient of the input, and the
pull-back to the latent weight. They run the same formulas, compiled into fused kernels. Operators
take no Python objects, so they take the key of the method.
"""

import functools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hestia_tune.errors import InputTypeError, require_number
from hestia_tune.methods.base import Method, Scalar, compute_dtype, require_float


def as_scalar(value: Scalar, name: str, weight: Tensor) -> Tensor:
    """Return ``tau`` or ``pressure`` as a 0-D tensor.

    A Python number is checked. A tensor is not, because reading its value would wait for the
    device.

    Raises:
        InputTypeError: If ``value`` is neither a number nor a 0-D tensor.
        InputError: If a number is outside [0, inf) for tau or [0, 1] for pressure.
    """
    if isinstance(value, Tensor):
        if value.dim() != 0:
            raise InputTypeError(
                f"{name} must be a float or a 0-D tensor; got shape {tuple(value.shape)}"
            )
        return value
    require_number(name, value, 0.0, 1.0 if name == "pressure" else math.inf, "or a 0-D tensor")
    return torch.tensor(value, dtype=compute_dtype(weight), device=weight.device)


@functools.cache
def fused(key: str, formula: str):
    """Return a formula of a method as fused kernels, one set for weights of every shape.

    Shapes are symbols, but the method's options are constants. With a symbol as the group size,
    Inductor makes a second pass over the weight on CUDA, or fails with the error `CantSplit`.

    The same kernel does not round its result to bfloat16. On a CPU that rounding made the kernel
    3.6 times slower.
    """
    compiled = torch.compile(getattr(Method.from_key(key), formula), dynamic=True)

    def call(*arguments):
        with torch._dynamo.config.patch(specialize_int=True):
            return compiled(*arguments)

    return call


@torch.library.custom_op("hestia::formula", mutates_args=())
def _formula_operator(
    key: str, formula: str, tensors: list[Tensor], parameters: list[Tensor]
) -> list[Tensor]:
    return _as_list(fused(key, formula)(*tensors, parameters))


@_formula_operator.register_fake
def _(key, formula, tensors, parameters):
    return _as_list(getattr(Method.from_key(key), formula)(*tensors, parameters))


def _as_list(result: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def weight_grad(
    method: Method,
    grad: Tensor,
    latent: tuple[Tensor, Tensor, Tensor],
    parameters: Sequence[Tensor],
) -> Sequence[Tensor]:
    """Return the gradients of the latent weight and of the parameters (`Method.vjp`).

    A compiled region calls one operator for them.

    Args:
        method: The method of the weight.
        grad: The gradient of the effective weight.
        latent: The latent weight, tau and pressure.
        parameters: The method's parameters.
    """
    if torch.compiler.is_compiling():
        return _formula_operator(method.key(), "vjp", [grad, *latent], list(parameters))
    return method.vjp(grad, *latent, parameters)


class _EffectiveWeight(torch.autograd.Function):
    """weight, tau, pressure, parameters -> effective weight; saves its inputs and nothing else."""

    @staticmethod
    def forward(ctx, weight, method, tau, pressure, *parameters):
        ctx.method = method
        ctx.save_for_backward(weight, tau, pressure, *parameters)
        if method.is_one_operator and torch.compiler.is_compiling():
            inputs = [weight, tau, pressure], list(parameters)
            return _formula_operator(method.key(), "effective_weight", *inputs)[0]
        return method.effective_weight(weight, tau, pressure, parameters)

    @staticmethod
    def backward(ctx, grad):
        weight, tau, pressure, *parameters = ctx.saved_tensors
        latent = weight, tau, pressure
        if ctx.method.is_one_operator:
            grads = weight_grad(ctx.method, grad, latent, parameters)
        else:
            grads = ctx.method.vjp(grad, *latent, parameters)
        return grads[0], None, None, None, *grads[1:]


class _Extras(torch.autograd.Function):
    """weight, pressure -> the method's `extras`; saves its inputs and nothing else."""

    @staticmethod
    def forward(ctx, weight, method, pressure):
        ctx.method = method
        ctx.save_for_backward(weight, pressure)
        return method.extras(weight, pressure)

    @staticmethod
    def backward(ctx, *grads):
        return ctx.method.extras_vjp(grads, *ctx.saved_tensors), None, None


def extras(weight: Tensor, pressure: Tensor, method: Method) -> tuple[Tensor, ...]:
    """Return the differentiable `Method.extras` of a latent weight."""
    return _Extras.apply(weight, method, pressure)


def effective_weight(
    weight: Tensor, tau: Scalar, pressure: Scalar, method: Method, parameters: Sequence[Tensor] = ()
) -> Tensor:
    """Return the differentiable effective weight (Eq. 7) of ``method``.

    `as_scalar` says which values ``tau`` and ``pressure`` may have.
    """
    require_float(weight)
    tau = as_scalar(tau, "tau", weight)
    pressure = as_scalar(pressure, "pressure", weight)
    return _EffectiveWeight.apply(weight, method, tau, pressure, *parameters)


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
    weight, tau, pressure = latent
    effective = Method.from_key(key).effective_weight(weight, tau, pressure, parameters)
    return _multiply(x, bias, effective, is_backward)


def _product(
    method: Method,
    x: Tensor,
    bias: Tensor | None,
    latent: tuple[Tensor, Tensor, Tensor],
    parameters: Sequence[Tensor],
    *,
    is_backward: bool = False,
) -> Tensor:
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
