"""Prepare and convert models: swap quantized linears in and out of any model, as torchao does.

`HestiaConfig` and `Fairy2iConfig` are registered with torchao, so
``quantize_(model, HestiaConfig(step="prepare"))`` works like torchao's own configs. The two-step
components, ``prepare(model)`` and ``convert(model)``, wrap the configs. They choose the linears,
and name them in their errors. Nothing here copies a weight: prepare shares the parameter (also on
the meta device), and convert replaces it by the hard weight.
"""

import abc
import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler

from hestia_tune.config import nearest, require_number
from hestia_tune.errors import InputError, InputTypeError
from hestia_tune.methods import EvenMethod, Fairy2iMethod, Method, TernaryMethod
from hestia_tune.methods.fairy2i import Granularity
from hestia_tune.methods.granularity import GroupSize
from hestia_tune.qat.experts import ExpertsWeight, QuantizedExperts, quantized_experts
from hestia_tune.qat.linear import QuantizedLayer, QuantizedLinear, clean_fqn
from hestia_tune.qat.select import check_layer, select_layers
from hestia_tune.qat.tequila_linear import TequilaLinear  # noqa: F401  (registers itself)
from hestia_tune.tensors import pack

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class QATConfigBase(AOBaseConfig):
    """The base of the configs of all methods.

    Args:
        step: "prepare" swaps quantized linears in. "convert" swaps plain linears with hard weights
            back.
        tau: The temperature until a schedule sets another, at least 0. 0 is straight-through.
        pressure: The pressure until a schedule sets another, in [0, 1].
        target: The kind of weight that "convert" makes: "dense" (the hard weight in its own dtype)
            or a packed format of the method.

    Raises:
        InputError: If an option is wrong.
    """

    step: Literal["prepare", "convert"] = "prepare"
    tau: float = 0.3
    pressure: float = 1.0
    target: str = "dense"

    def __post_init__(self):
        if self.step not in ("prepare", "convert"):
            raise InputError(f'step must be "prepare" or "convert"; got {self.step!r}')
        require_number("tau", self.tau, 0, 100, "the paper starts at 0.3")
        require_number("pressure", self.pressure, 0, 1, "1 is fully quantized")
        allowed = ("dense", *self.method().packed_formats)
        if self.target not in allowed:
            words = ", ".join(f'"{word}"' for word in allowed)
            raise InputError(f"target must be one of {words}; got {self.target!r}")

    @abc.abstractmethod
    def method(self) -> Method:
        """Return the method."""

    def pack(self, method: Method, latent: Tensor, parameters: Sequence[Tensor] = ()) -> Tensor:
        """Return the weight that replaces a latent weight in "convert", by its layer's method."""
        if self.target == "dense":
            return method.hard(latent, parameters)
        return pack(method, latent, self.target, parameters)


def transform(module: Any, config: QATConfigBase, name: str = "a linear") -> nn.Module:
    """Return the module that replaces a linear in ``quantize_``, for every method.

    For an `ExpertsWeight`, return the layer that "prepare" puts into its module. The errors of
    "convert" show the name. ``quantize_`` does not pass a name.
    """
    if isinstance(module, ExpertsWeight):
        return quantized_experts(module, config.method(), tau=config.tau, pressure=config.pressure)
    if config.step == "convert":
        is_quantized = isinstance(module, QuantizedLinear)
        return module.to_hard_linear(config.pack, name) if is_quantized else module
    if isinstance(module, QuantizedLinear):
        return module
    method = config.method()
    method.check_layer(module.in_features, module.out_features, str(module))
    return QuantizedLinear.from_linear(module, method, tau=config.tau, pressure=config.pressure)


@dataclass(frozen=True, kw_only=True)
class MethodConfig(QATConfigBase):
    """QAT by any method for ``torchao.quantization.quantize_``.

    Args:
        of: The method, such as ``LSQMethod(group_size=64)``.
        step: See `QATConfigBase`, also for ``pressure`` and ``target``.
        tau: See `QATConfigBase`. A method without a temperature ignores it.
    """

    of: Method

    def method(self) -> Method:
        return self.of


@dataclass(frozen=True, kw_only=True)
class HestiaConfig(QATConfigBase):
    """Ternary QAT for ``torchao.quantization.quantize_``.

    Args:
        group_size: Weights that share a scale: an int that divides in_features (128 in the
            paper), "channel" or "tensor".
        scale: "absmean" (Eq. 1) or "learned", a factor per group that training finds. See
            `hestia_tune.methods.TernaryMethod`, also for the next three options.
        threshold: "half" of the scale, or "learned".
        offset: "none" or "learned".
        start: Where learned parameters start: "absmean" or "least_squares".
        codebook: "ternary"; or "binary" (1 bit) or "int2" (2 bits) of
            `hestia_tune.methods.EvenMethod`, which learns no scales.
        target: "dense", "ternary" (a packed `hestia_tune.TernaryTensor`) or "intx" (torchao's int2
            tensor). The other codebooks have "dense", and their own name for a packed weight.
        step: See `QATConfigBase`, also for ``tau`` and ``pressure``.

    Raises:
        InputError: If an option is wrong.

    Note:
        ``quantize_`` by itself takes every linear, the output head too. Pass
        ``filter_fn=hestia_tune.is_transformer_linear``, or use `HestiaQATQuantizer`.
    """

    group_size: GroupSize = 128
    scale: Literal["absmean", "learned"] = "absmean"
    threshold: Literal["half", "learned"] = "half"
    offset: Literal["none", "learned"] = "none"
    start: Literal["absmean", "least_squares"] = "absmean"
    codebook: Literal["ternary", "binary", "int2"] = "ternary"

    def method(self) -> Method:
        group = {"group_size": self.group_size}
        learned = {name: getattr(self, name) for name in ("scale", "threshold", "offset", "start")}
        ternary = TernaryMethod(**group, **learned)
        if self.codebook == "ternary":
            return ternary
        if ternary != TernaryMethod(**group):
            raise InputError(
                "scale, threshold, offset and start are options of the codebook ternary; got "
                f"{ternary.key()} with the codebook {self.codebook}; leave them out"
            )
        return EvenMethod(**group, codebook=self.codebook)


@dataclass(frozen=True, kw_only=True)
class Fairy2iConfig(QATConfigBase):
    """Complex-valued QAT for ``torchao.quantization.quantize_``; tau is in squared radians.

    Args:
        num_stages: Residual stages, 1 to 4, each of one bit per real weight (2 in the paper).
        granularity: "tensor" (two scales per matrix and stage, as in the paper), or the number of
            complex columns that share scales.
        target: "dense" or "fairy2i" (a packed `hestia_tune.Fairy2iTensor`).
        step: See `QATConfigBase`, also for ``tau`` and ``pressure``.

    Raises:
        InputError: If an option is wrong.
    """

    num_stages: int = 2
    granularity: Granularity = "tensor"

    def method(self) -> Method:
        return Fairy2iMethod(num_stages=self.num_stages, granularity=self.granularity)


for _config in (MethodConfig, HestiaConfig, Fairy2iConfig):
    register_quantize_module_handler(_config)(transform)


class QATQuantizerBase:
    """A two-step component: ``prepare(model)`` before training, ``convert(model)`` after it.

    Args:
        config: The method and its options.
        include: Shell patterns of the linears to quantize. None takes every linear of the
            transformer blocks (attention q, k, v, output; MLP gate, up, down) and the experts.
        exclude: Shell patterns of linears to leave out.
        skip_incompatible: Whether to leave out linears of a shape that the method cannot quantize,
            instead of raising an error.
        scale_lr: Learning rate of the method's own parameters. None takes the optimizer's rate.

    Attributes:
        skipped: Names of the linears that `prepare` left out for their shape.

    Raises:
        InputTypeError: If the patterns are not lists.
        InputError: If ``scale_lr`` is out of range, or the method has no parameters.
    """

    # Whether the method reads a temperature, and so a schedule of the temperature.
    has_temperature: ClassVar[bool] = True

    def __init__(
        self,
        config: QATConfigBase,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        skip_incompatible: bool = False,
        scale_lr: float | None = None,
    ):
        self.config, self.method = config, config.method()
        if scale_lr is not None:
            require_number("the method's learning rate", scale_lr, 0, 1)
            if not self.method.trained_parameters:
                raise InputError(
                    "scale_lr is read by methods that learn a scale, threshold or offset; "
                    f"{self.method.key()} learns none; leave it out"
                )
        for option, patterns in (("include", include), ("exclude", exclude)):
            if isinstance(patterns, str):
                raise InputTypeError(
                    f"{option} must be a list of patterns; got the string {patterns!r}"
                )
        self.parameter_lr = scale_lr
        self._include = None if include is None else list(include)
        self._exclude = list(exclude or ())
        self._skip_incompatible = skip_incompatible
        self.skipped: list[str] = []

    def prepare(self, model: nn.Module) -> nn.Module:
        """Swap the selected linears for quantized linears, in place, and return ``model``.

        Raises:
            InputError: If a pattern matches nothing, or a layer cannot be quantized. The error
                names the layer, and the model does not change.
        """
        chosen = select_layers(model, self._include, self._exclude)
        self.skipped = []
        for fqn, layer in list(chosen.items()):
            try:
                check_layer(self.method, layer, fqn)
            except ValueError as error:
                if not self._skip_incompatible:
                    raise
                log.warning("not quantized: %s", error)
                self.skipped.append(fqn)
                del chosen[fqn]
        if not chosen:
            key = self.method.key()
            raise InputError(f"{key} can quantize none of the {len(self.skipped)} selected linears")
        config = dataclasses.replace(self.config, step="prepare")
        layers = {id(layer): transform(layer, config) for layer in chosen.values()}
        for fqn, module in list(model.named_modules(remove_duplicate=False)):
            if id(module) in layers and clean_fqn(fqn) in chosen:
                model.set_submodule(fqn, layers[id(module)])
        return model

    def convert(self, model: nn.Module) -> nn.Module:
        """Swap every quantized linear for a plain linear with its hard weight, in place.

        Linears that shared a latent weight share the hard weight. A module that is not quantized,
        such as an embedding, no longer shares the weight. Hard weights of experts are dense.

        Raises:
            InputError: If nothing is prepared.
            NotFiniteError: If a latent weight or a learned parameter has NaN or infinity. The
                error names the layer. The layers before it are converted.
        """
        named = model.named_modules(remove_duplicate=False)
        layers = {fqn: module for fqn, module in named if isinstance(module, QuantizedLayer)}
        if not layers:
            raise InputError("nothing in the model is prepared; call prepare(model) before convert")
        config = dataclasses.replace(self.config, step="convert")
        hard: dict[int, nn.Parameter] = {}
        for fqn, layer in layers.items():
            if isinstance(layer, QuantizedExperts):
                layer.convert(clean_fqn(fqn))
            else:
                linear = transform(layer, config, clean_fqn(fqn))
                linear.weight = hard.setdefault(id(layer.weight), linear.weight)
                model.set_submodule(fqn, linear)
        return model


class Component(QATQuantizerBase):
    """A component whose options are the fields of a config or of a method.

    Args:
        scale_lr: See `QATQuantizerBase`, also for the next three options.
        include: Shell patterns of the linears to quantize.
        exclude: Shell patterns of linears to leave out.
        skip_incompatible: Whether to leave out linears that the method cannot quantize.
        **options: Fields of ``options_type``, such as ``group_size``.

    Raises:
        InputTypeError: If there is no such option.
        InputError: If a value is not allowed.
    """

    options_type: ClassVar[type]

    def __init__(
        self,
        *,
        scale_lr: float | None = None,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        skip_incompatible: bool = False,
        **options: Any,
    ):
        shared = {field.name for field in dataclasses.fields(QATConfigBase)}
        known = [f.name for f in dataclasses.fields(self.options_type) if f.name not in shared]
        for name in options.keys() - known:
            raise InputTypeError(
                f"unknown option {name}{nearest(name, known)}; {type(self).__name__} has "
                f"{', '.join(known)}"
            )
        config = self.options_type(**options)
        config = config if isinstance(config, QATConfigBase) else MethodConfig(of=config)
        super().__init__(config, include, exclude, skip_incompatible, scale_lr)


class HestiaQATQuantizer(Component):
    """Ternary QAT as a component (``_component_: hestia_tune.HestiaQATQuantizer``).

    Its options are the fields of `HestiaConfig`, and the options of `Component`. The defaults are
    the paper's.

    Example:
        >>> component = HestiaQATQuantizer(group_size=128)
        >>> model = component.prepare(model)      # train, a ScheduleDriver sets tau and pressure
        >>> model = component.convert(model)      # plain linears, every weight gamma·{-1, 0, 1}
    """

    options_type = HestiaConfig


class Fairy2iQATQuantizer(Component):
    """Complex-valued QAT as a component (``_component_: hestia_tune.Fairy2iQATQuantizer``).

    Its options are the fields of `Fairy2iConfig`, and the options of `Component`. With
    ``schedule: {rho: 0.0, tau_init: 0.0}`` it is straight-through (*Fairy2i* in the paper's
    Table 3). With a temperature it is relaxed (*Fairy2i-H*).
    """

    options_type = Fairy2iConfig
