"""What a method is, and the differentiable effective weight.

A method is a stateless frozen dataclass: it maps a latent weight to an effective weight at a
given temperature and pressure, and pulls a gradient back through that map in closed form. It never
sees a step, a module or a schedule. The closed form is what keeps memory flat: plain autograd would
save about ten tensors of the weight's size, `effective_weight` saves the weight alone.
"""

import contextlib
import dataclasses
import functools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import ClassVar, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from hestia_tune.config import require_number
from hestia_tune.errors import InputError, InputTypeError, NotFiniteError
from hestia_tune.methods.temperature import search_temperature

Scalar = float | torch.Tensor
# Sums a tensor over the parts of one weight that several processes hold.
SumOverRanks = Callable[[torch.Tensor], torch.Tensor]


class Method(ABC):
    """A map from latent weights to low-bit weights, with a relaxation that has a temperature.

    Subclasses are frozen keyword-only dataclasses, which raise TypeError or ValueError on a wrong
    option, and implement the methods below on 2-D weights (out_features, in_features). ``tau`` and
    ``pressure`` arrive as 0-D tensors.
    """

    name: ClassVar[str]
    # Facts. Those without ClassVar may depend on the options: a subclass may make them properties.
    # Whether `effective_weight` is one operator to torch.compile. A compiler that sees inside may
    # save what is meant to be recomputed: cheap for formulas whose intermediates are few.
    is_one_operator: ClassVar[bool] = False
    # Whether codes and scales can be read off the hard weight; otherwise the latents are needed.
    codes_follow_from_hard: ClassVar[bool] = True
    # Whether row i belongs together with row i + out_features / 2, so that shards must hold both.
    pairs_rows: ClassVar[bool] = False
    # Whether only trained models can be converted: the hard model has more than hard weights.
    needs_training: ClassVar[bool] = False
    # Packed tensors that hold the codes (`hestia_tune.tensors.pack`), the first by default.
    packed_formats: tuple[str, ...] = ()
    # What hestia_convert can write, the first by default.
    file_formats: tuple[str, ...] = ("torchao",)
    # Whether a scale covers several rows, so that parts of a weight need `SumOverRanks`.
    scales_span_rows: bool = False
    # Those of `parameter_names` that are trained.
    trained_parameters: tuple[str, ...] = ()
    _by_name: ClassVar[dict[str, type["Method"]]] = {}
    _words: ClassVar[dict[str, tuple]] = {}  # of every field that is a Literal

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "name" in vars(cls):
            Method._by_name[cls.name] = cls
        hints = get_type_hints(cls).items()
        cls._words = {name: get_args(hint) for name, hint in hints if get_origin(hint) is Literal}

    def __post_init__(self):
        """Raises ValueError if a field whose type is some words has another value."""
        for name, words in self._words.items():
            if (value := getattr(self, name)) not in words:
                rule = " or ".join(map(json.dumps, words))
                raise InputError(f"{name} must be {rule}; got {value!r}")

    def key(self) -> str:
        """The method and its fields, as in "ternary, group_size=128"; `from_key` reads it.

        A field with ``metadata={"optional": True}`` is left out at its default.
        """
        shown = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if not (field.metadata.get("optional") and getattr(self, field.name) == field.default)
        ]
        return ", ".join([self.name, *shown])

    @staticmethod
    def from_key(key: str) -> "Method":
        """The method whose `key` this is; option values are numbers or words."""
        name, *options = key.split(", ")
        pairs = (text.split("=") for text in options)
        return Method._by_name[name](**{option: _parsed(value) for option, value in pairs})

    @property
    def has_zero(self) -> bool:
        """Whether code 0 is the weight 0 (and not, as for powers of i, the weight 1)."""
        return "ternary" in self.packed_formats

    def check_file_formats(self, names: Iterable[str]) -> None:
        """Raises ValueError if a model of this method cannot be written in one of these formats."""
        for name in names:
            if name not in self.file_formats:
                known = ", ".join(self.file_formats)
                raise InputError(
                    f"a model of {self.key()} is written as {known}; got {name}; set "
                    "convert.formats to one of those"
                )

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the parameters that a layer holds beside its weight, in order."""
        return self.trained_parameters

    def initial_parameters(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Their values for a pretrained weight, float32, rows along the first axis like its own."""
        return ()

    @abstractmethod
    def effective_weight(
        self,
        weight: torch.Tensor,
        tau: torch.Tensor,
        pressure: torch.Tensor,
        parameters: Sequence[torch.Tensor] = (),
        total: SumOverRanks | None = None,
    ) -> torch.Tensor:
        """(1 - p)·W + p·H(W; tau) (Eq. 7), same shape and dtype as ``weight``; tau 0 is hard.

        Args:
            weight: (out_features, in_features) latent weight, or some of its rows.
            tau, pressure: 0-D.
            parameters: as `parameter_names`, the same rows.
            total: if ``weight`` is a part, sums a tensor over all parts. A method whose scales
                cover no more than a row never calls it.
        """

    @abstractmethod
    def vjp(
        self,
        grad: torch.Tensor,
        weight: torch.Tensor,
        tau: torch.Tensor,
        pressure: torch.Tensor,
        parameters: Sequence[torch.Tensor] = (),
        total: SumOverRanks | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of the latent weight and of all ``parameters``, given that of the effective
        weight; zeros for a parameter that is not trained. Arguments as `effective_weight`'s."""

    @abstractmethod
    def hard(
        self,
        weight: torch.Tensor,
        parameters: Sequence[torch.Tensor] = (),
        total: SumOverRanks | None = None,
    ) -> torch.Tensor:
        """Return the deployable weight Q(W) (Eq. 2), of the same shape and dtype.

        It equals the effective weight at tau 0 and pressure 1, unless ``weight`` is hard already.
        A hard weight does not change if ``parameters`` are its `initial_parameters`, except for
        Fairy2i, DLT with an offset, and TWN with ``delta=0``. NaN gives NaN.
        """

    @abstractmethod
    def codes(
        self, weight: torch.Tensor, parameters: Sequence[torch.Tensor] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Integer codes shaped like ``weight`` and the bfloat16 scales that multiply them."""

    def fit_temperature(self, weights: Iterable[torch.Tensor]) -> float:
        """tau that minimises the mean squared relaxation error over all ``weights`` together.

        Costs some 40 evaluations of every weight; a method that knows a shorter way overrides it.

        Args:
            weights: latent weights (out_features, in_features), all held on the CPU at once, and
                evaluated where they were.

        Raises:
            InputError: if the weights are not finite, or all zero.
        """
        held = [(weight.detach().cpu(), weight.device) for weight in weights]

        def error(tau: float) -> float:
            total = 0.0
            for latent in (weight.to(device) for weight, device in held):
                scalars = (torch.tensor(v, device=latent.device) for v in (tau, 1.0))
                difference = latent - self.effective_weight(latent, *scalars)
                total += float(difference.square().sum(dtype=torch.float64))
            return total

        # Each round narrows the bracket around the best of 11 points 5-fold.
        return search_temperature(lambda taus: [error(tau) for tau in taus], rounds=4, points=11)

    @abstractmethod
    def check_layer(self, in_features: int, out_features: int, name: str) -> None:
        """Raises ValueError that names the layer if a weight of this shape cannot be quantized."""


def _parsed(value: str) -> int | float | str:
    """An option of a key: a number if it is one."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value)
    return value


def compute_dtype(weight: torch.Tensor) -> torch.dtype:
    """Formulas run in float32, or in float64 when the weight is float64."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def as_scalar(value: Scalar, name: str, weight: torch.Tensor) -> torch.Tensor:
    """Makes ``tau`` or ``pressure`` a 0-D tensor; Python numbers are checked, tensors are not.

    A tensor is taken as it is, because a look at its value would wait for the device.

    Raises:
        InputTypeError: if ``value`` is neither a number nor a 0-D tensor.
        InputError: if a number is outside [0, inf) for tau or [0, 1] for pressure.
    """
    if isinstance(value, torch.Tensor):
        if value.dim() != 0:
            raise InputTypeError(
                f"{name} must be a float or a 0-D tensor; got shape {tuple(value.shape)}"
            )
        return value
    require_number(name, value, 0.0, 1.0 if name == "pressure" else math.inf, "or a 0-D tensor")
    return torch.tensor(value, dtype=compute_dtype(weight), device=weight.device)


def require_float(weight: torch.Tensor) -> None:
    """Raises TypeError unless ``weight`` is a floating-point tensor."""
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
        kind = weight.dtype if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise InputTypeError(f"weight must be a floating-point tensor; got {kind}")


def require_finite(name: str, *tensors: torch.Tensor) -> None:
    """Raise FloatingPointError if a latent weight or a learned parameter is not finite.

    Args:
        name: Name of the layer or of the weight, for the error.
        tensors: The latent weight and the method's parameters. Meta tensors are not checked.
    """
    if not all(value.is_meta or value.isfinite().all() for value in tensors):
        raise NotFiniteError(
            f"{name} has NaN or infinity in its latent weight or learned parameters; a hard model "
            "must be finite; go back to an earlier checkpoint, and lower the learning rate"
        )


@functools.cache
def fused(key: str, formula: str):
    """A formula of a method as fused kernels, one set for weights of every shape.

    A result in bfloat16 is not rounded in the same kernel: on a CPU that made it 3.6 times slower.
    """
    return torch.compile(getattr(Method.from_key(key), formula), dynamic=True)


@torch.library.custom_op("hestia::effective_weight", mutates_args=())
def _effective_weight_operator(
    weight: Tensor, tau: Tensor, pressure: Tensor, parameters: list[Tensor], key: str
) -> Tensor:
    return fused(key, "effective_weight")(weight, tau, pressure, parameters)


@_effective_weight_operator.register_fake
def _(weight, tau, pressure, parameters, key):
    return Method.from_key(key).effective_weight(weight, tau, pressure, parameters)


@torch.library.custom_op("hestia::weight_grad", mutates_args=())
def _weight_grad_operator(
    grad: Tensor, weight: Tensor, tau: Tensor, pressure: Tensor, parameters: list[Tensor], key: str
) -> list[Tensor]:
    return list(fused(key, "vjp")(grad, weight, tau, pressure, parameters))


@_weight_grad_operator.register_fake
def _(grad, weight, tau, pressure, parameters, key):
    return list(Method.from_key(key).vjp(grad, weight, tau, pressure, parameters))


def weight_grad(method: Method, grad: torch.Tensor, *latent) -> Sequence[torch.Tensor]:
    """Return the gradients of the latent weight and the parameters (`Method.vjp`), by one operator
    in a compiled region.

    Args:
        grad: The gradient of the effective weight.
        latent: The latent weight, tau, pressure and the list of parameters.
    """
    if torch.compiler.is_compiling():
        return _weight_grad_operator(grad, *latent, method.key())
    return method.vjp(grad, *latent)


class _EffectiveWeight(torch.autograd.Function):
    """weight, tau, pressure, parameters -> effective weight; saves them and nothing else."""

    @staticmethod
    def forward(ctx, weight, method, tau, pressure, *parameters):
        ctx.method = method
        ctx.save_for_backward(weight, tau, pressure, *parameters)
        latent = (weight, tau, pressure, list(parameters))
        if method.is_one_operator and torch.compiler.is_compiling():
            return _effective_weight_operator(*latent, method.key())
        return method.effective_weight(*latent)

    @staticmethod
    def backward(ctx, grad):
        weight, tau, pressure, *parameters = ctx.saved_tensors
        step = partial(weight_grad, ctx.method) if ctx.method.is_one_operator else ctx.method.vjp
        grads = step(grad, weight, tau, pressure, parameters)
        return grads[0], None, None, None, *grads[1:]


def effective_weight(
    weight: torch.Tensor,
    tau: Scalar,
    pressure: Scalar,
    method: Method,
    parameters: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """The differentiable effective weight (Eq. 7) of ``method``; scalars as in `as_scalar`."""
    require_float(weight)
    tau = as_scalar(tau, "tau", weight)
    pressure = as_scalar(pressure, "pressure", weight)
    return _EffectiveWeight.apply(weight, method, tau, pressure, *parameters)
