"""A method, the checks that methods share, and the autograd functions that apply a method.

A method is a stateless frozen dataclass. It maps a latent weight to an effective weight at a given
temperature and pressure, and pulls a gradient back through this map in closed form. It never sees
a step, a module or a schedule. The class is all that a method consists of: the component that YAML
names, and the config for torchao's ``quantize_``, follow from it (`hestia_tune.qat.prepare`).

`effective_weight` is the differentiable map of a method. Plain autograd would save about ten
tensors of the weight's size. The closed form saves only the weight.

`quantized_linear` goes one further. `F.linear` would save the effective weight for the gradient of
its input. That would be a second copy of the model, and FSDP could not free it after the forward
either. The function here saves its input, as any linear does, and the latent weight. It recomputes
the effective weight in backward. The price is one more pass over the weight, which is small beside
the three matrix products of a linear.

`torch.compile` needs more. The compiler would recognize the recomputation as a common
subexpression of the forward, and would save its result after all. So in a compiled region three
steps are opaque operators (`hestia::...`): the product, the gradient of the input, and the
pull-back to the latent weight. They run the same formulas, compiled into fused kernels. Operators
take no Python objects, so they take the key of the method.
"""

import contextlib
import dataclasses
import functools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal, cast, get_args, get_origin, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor

from hestia_tune.errors import InputError, InputTypeError, NotFiniteError, require_number

Scalar = float | Tensor
# A function that sums a tensor over the ranks. Each rank holds a part of one weight.
SumOverRanks = Callable[[Tensor], Tensor]


# Temperatures that `search_temperature` tries.
SEARCH_RANGE = (1e-3, 4.0)


class Method(ABC):
    """Map latent weights to low-bit weights, with a relaxation that has a temperature.

    Subclasses are frozen keyword-only dataclasses. They implement the methods below on 2-D weights
    (out_features, in_features). ``tau`` and ``pressure`` arrive as 0-D tensors.

    Raises:
        InputTypeError: If an option has a wrong type.
        InputError: If an option has a wrong value.
    """

    # The name in keys, and the name of the component in `hestia_tune`: that of the class without
    # "Method" by default. Methods with the same component share its options.
    name: ClassVar[str]
    component: ClassVar[str]
    # The attributes below describe a method. A subclass may turn the attributes without ClassVar
    # into properties, because they may depend on the options.

    # Whether torch.compile sees `effective_weight` as one operator. A compiler that sees inside may
    # save tensors that should be recomputed. That is cheap for formulas with few intermediates.
    is_one_operator: ClassVar[bool] = False
    # Whether the hard weight determines codes and scales. Otherwise the latents are needed.
    codes_follow_from_hard: ClassVar[bool] = True
    # Whether the method pairs row i with row i + out_features / 2. Shards must then hold both.
    pairs_rows: ClassVar[bool] = False
    # Whether the method reads a temperature, and so a schedule of the temperature.
    has_temperature: ClassVar[bool] = True
    # Names of a linear's other parameters to which the method adds a vector (`extras`).
    extra_names: ClassVar[tuple[str, ...]] = ()
    # The codes of a weight, which is a code times the scale of its group. Packed tensors and files
    # follow from them. Empty: weights are no such products, so no packed tensor holds them.
    code_values: tuple[complex, ...] = ()
    # Whether a scale covers several rows. Parts of a weight then need `SumOverRanks`.
    scales_span_rows: bool = False
    # The names in `parameter_names` that are trained.
    trained_parameters: tuple[str, ...] = ()
    _by_name: ClassVar[dict[str, type["Method"]]] = {}
    # The values of every field of a Literal type. torch.compile cannot read them off the type.
    _words: ClassVar[dict[str, tuple]] = {}

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "name" in vars(cls):
            Method._by_name[cls.name] = cls
            if "component" not in vars(cls):
                cls.component = cls.__name__.removesuffix("Method")
        hints = get_type_hints(cls).items()
        cls._words = {name: get_args(hint) for name, hint in hints if get_origin(hint) is Literal}

    def __post_init__(self):
        """Raise InputError if a field of a Literal type has a value that the type does not list."""
        for name, words in self._words.items():
            if (value := getattr(self, name)) not in words:
                rule = " or ".join(map(json.dumps, words))
                raise InputError(f"{name} must be {rule}; got {value!r}")

    def key(self) -> str:
        """Return the method's name and fields, for example "ternary, group_size=128".

        `from_key` reads the key. The key leaves out a field with ``metadata={"optional": True}``
        if the field has its default.
        """
        shown = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(cast(Any, self))  # Subclasses are dataclasses.
            if not (field.metadata.get("optional") and getattr(self, field.name) == field.default)
        ]
        return ", ".join([self.name, *shown])

    @staticmethod
    def from_key(key: str) -> "Method":
        """Return the method with this `key`. Option values are numbers or words."""
        name, *options = key.split(", ")
        pairs = (text.split("=") for text in options)
        return Method._by_name[name](**{option: _parsed(value) for option, value in pairs})

    @staticmethod
    def of_component(component: str) -> tuple[type["Method"], ...]:
        """Return the methods whose component has this name."""
        return tuple(cls for cls in Method._by_name.values() if cls.component == component)

    @classmethod
    def words(cls) -> dict[str, tuple]:
        """Return the values of every option that has a Literal type, by name."""
        return cls._words

    @property
    def needs_training(self) -> bool:
        """Whether only trained models can be converted.

        The hard model then has `extras` beside its hard weights.
        """
        return bool(self.extra_names)

    @property
    def has_zero(self) -> bool:
        """Whether code 0 is the weight 0. For powers of i, code 0 is the weight 1."""
        return 0 in self.code_values

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The names of the parameters that a layer holds beside its weight, in order."""
        return self.trained_parameters

    def initial_parameters(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return the initial parameters for a pretrained weight.

        The parameters are float32. Their first axis is the axis of the weight's rows.
        """
        return ()

    @abstractmethod
    def effective_weight(
        self,
        weight: Tensor,
        tau: Tensor,
        pressure: Tensor,
        parameters: Sequence[Tensor] = (),
        total: SumOverRanks | None = None,
    ) -> Tensor:
        """Return (1 - p)·W + p·H(W; tau) (Eq. 9), in the shape and dtype of ``weight``.

        Args:
            weight: The latent weight (out_features, in_features), or some of its rows.
            tau: The temperature, 0-D. 0 gives the hard weight.
            pressure: The pressure p, 0-D.
            parameters: The parameters in the order of `parameter_names`, for the same rows.
            total: Sums a tensor over all parts of the weight, if ``weight`` is a part. A method
                never calls it if its scales lie within rows.
        """

    @abstractmethod
    def vjp(
        self,
        grad: Tensor,
        weight: Tensor,
        tau: Tensor,
        pressure: Tensor,
        parameters: Sequence[Tensor] = (),
        total: SumOverRanks | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the latent weight and of all ``parameters``.

        The gradient of a parameter that is not trained is zero. ``grad`` is the gradient of the
        effective weight. `effective_weight` describes the other arguments.
        """

    @abstractmethod
    def hard(
        self, weight: Tensor, parameters: Sequence[Tensor] = (), total: SumOverRanks | None = None
    ) -> Tensor:
        """Return the deployable weight Q(W) (Eq. 2), of the same shape and dtype.

        It equals the effective weight at tau 0 and pressure 1, unless ``weight`` is hard already.
        A hard weight does not change if ``parameters`` are its `initial_parameters`, except for
        Fairy2i, DLT with an offset, and TWN with ``delta=0``. NaN gives NaN.
        """

    @abstractmethod
    def codes(self, weight: Tensor, parameters: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
        """Return integer codes shaped like ``weight``, and the bfloat16 scales that multiply them.

        `Fairy2iMethod.codes` has a layout of its own.
        """

    def extras(
        self, weight: Tensor, pressure: Tensor, total: SumOverRanks | None = None
    ) -> tuple[Tensor, ...]:
        """Return the vectors (rows,) that the method adds, in the order of `extra_names`.

        `effective_weight` describes the arguments. The hard model has the vectors at pressure 1.
        """
        return ()

    def extras_vjp(
        self,
        grads: Sequence[Tensor],
        weight: Tensor,
        pressure: Tensor,
        total: SumOverRanks | None = None,
    ) -> Tensor:
        """Return the gradient of the latent weight, given the gradients of all `extras`."""
        raise NotImplementedError

    def fit_temperature(self, weights: Iterable[Tensor]) -> float:
        """Return the tau that minimizes the mean squared relaxation error over all ``weights``.

        The search evaluates every weight about 40 times. A method may override it with a
        faster search.

        Args:
            weights: The latent weights (out_features, in_features). The CPU holds all of them at
                once. Each is evaluated on its own device.

        Raises:
            InputError: If the weights are not finite, or all zero.
        """
        held = [
            ([value.cpu() for value in (w.detach(), *self.initial_parameters(w))], w.device)
            for w in weights
        ]

        def error(tau: float) -> float:
            total = 0.0
            for values, device in held:
                latent, *parameters = (value.to(device) for value in values)
                at, one = (torch.tensor(value, device=device) for value in (tau, 1.0))
                difference = latent - self.effective_weight(latent, at, one, parameters)
                total += float(difference.square().sum(dtype=torch.float64))
            return total

        # Each round narrows the bracket around the best of 11 points 5-fold.
        return search_temperature(lambda taus: [error(tau) for tau in taus], rounds=4, points=11)

    @abstractmethod
    def check_layer(self, in_features: int, out_features: int, name: str) -> None:
        """Raise InputError with the layer's name if a weight of this shape cannot be quantized."""


def _parsed(value: str) -> int | float | str:
    """Return an option of a key as a number, or as a word if it is not a number."""
    with contextlib.suppress(ValueError):
        return json.loads(value)
    return value


def compute_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which formulas run: float64 for a float64 weight, otherwise float32."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def require_float(weight: Tensor) -> None:
    """Raise InputTypeError unless ``weight`` is a floating-point tensor."""
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        kind = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise InputTypeError(f"weight must be a floating-point tensor; got {kind}")


def require_finite(name: str, *tensors: Tensor) -> None:
    """Raise NotFiniteError if a latent weight or a learned parameter is not finite.

    Args:
        name: Name of the layer or of the weight, for the error.
        *tensors: The latent weight and the method's parameters. Meta tensors are not checked.
    """
    if not all(value.is_meta or value.isfinite().all() for value in tensors):
        raise NotFiniteError(
            f"{name} has NaN or infinity in its latent weight or learned parameters; a hard model "
            "must be finite; go back to an earlier checkpoint, and lower the learning rate"
        )


def require_matrix(weight: Tensor) -> None:
    """Raise InputError unless ``weight`` has two dimensions."""
    if weight.dim() != 2:
        raise InputError(
            f"weight must have the shape (out_features, in_features); got {tuple(weight.shape)}"
        )


def check_count(
    rule: str, value: int | str, words: tuple[str, ...] = (), most: float = math.inf
) -> None:
    """Check an option that is a positive int up to ``most``, or one of ``words``.

    Args:
        rule: The beginning of the errors, for example "num_stages must be an int from 1 to 4".
        value: The value of the option.
        words: The allowed strings.
        most: The largest allowed int.

    Raises:
        InputTypeError: If ``value`` is neither an int nor a string.
        InputError: If the int is out of range, or the string is another word.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InputTypeError(f"{rule}; got {value!r} of type {type(value).__name__}")
    if value not in words and (isinstance(value, str) or not 1 <= value <= most):
        raise InputError(f"{rule}; got {value!r}")


def search_temperature(
    errors: Callable[[Sequence[float]], Sequence[float]], *, rounds: int, points: int
) -> float:
    """Return the tau in `SEARCH_RANGE` with the least error.

    The search narrows a bracket of log tau. In each round it evaluates a grid, and shrinks the
    bracket to the neighbors of the best point.

    Args:
        errors: Maps temperatures to the relaxation error at each.
        rounds: Number of rounds.
        points: Number of points of a grid.

    Raises:
        InputError: If the errors are not finite, or all zero.
    """
    low, high = (math.log(bound) for bound in SEARCH_RANGE)
    for round_number in range(rounds):
        grid = [low + (high - low) * k / (points - 1) for k in range(points)]
        values = [float(error) for error in errors([math.exp(log_tau) for log_tau in grid])]
        # Weights that are ternary already may have no error inside a later bracket.
        if round_number == 0 and not (max(values) > 0 and all(map(math.isfinite, values))):
            raise InputError(
                "tau_init auto needs finite weights that are not all zero; give tau_init a number"
            )
        best = values.index(min(values))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, points - 1)]
    return math.exp((low + high) / 2)


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
    return _no_aliases(fused(key, formula)(*tensors, parameters), tensors)


@_formula_operator.register_fake
def _(key, formula, tensors, parameters):
    return _no_aliases(getattr(Method.from_key(key), formula)(*tensors, parameters), tensors)


def _no_aliases(result: Tensor | Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the results as a list, with copies of those that are inputs.

    An operator may not return an input. The gradient of a straight-through method is one.
    """
    given = {id(tensor) for tensor in inputs}
    results = [result] if isinstance(result, Tensor) else result
    return [value.clone() if id(value) in given else value for value in results]


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
    """Return the differentiable effective weight (Eq. 9) of ``method``.

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
    """Return ``F.linear`` with the effective weight (Eq. 9) in place of the latent weight.

    Args:
        x: The input (..., in_features). Products are computed in its dtype, or in autocast's.
        weight: The latent weight (out_features, in_features). It is quantized in its own dtype,
            and the result is rounded once.
        bias: The bias (out_features,), or None.
        tau: The temperature, a 0-D tensor, so that a new value does not trigger recompilation.
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
