"""Prepare and convert models: swap quantized linears in and out of any model, as torchao does.

Both doors follow from a method (`hestia_tune.methods`), whose fields are their options:

    component    ``prepare(model)`` before training, ``convert(model)`` after it. YAML names it:
                 ``_component_: hestia_tune.LSQ``. It chooses the linears, and names them in its
                 errors.
    config       ``quantize_(model, LSQConfig(step="prepare"))`` of torchao. `MethodConfig` takes
                 any method.

`Method.component` is the component's name. Methods with the same name share a component, which has
all their options. The first method whose words fit is taken, such as `TernaryMethod` for the
codebook "ternary". Components and configs are made when they are first asked for.

Nothing here copies a weight: prepare shares the parameter (also on the meta device), and convert
replaces it by the hard weight.
"""

import abc
import dataclasses
import functools
import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler

from hestia_tune.errors import InputError, InputTypeError, nearest, require_number, warn_once
from hestia_tune.files import digest
from hestia_tune.methods import GroupMethod, Method
from hestia_tune.qat.linear import QuantizedLayer, QuantizedLinear, clean_fqn, methods_of
from hestia_tune.qat.select import check_layer, matching, select_layers
from hestia_tune.qat.stack import QuantizedStack, Stack
from hestia_tune.tensors import pack, packed_formats

log = logging.getLogger(__name__)
# The end of the name of a component that the name of its config lacks.
_SUFFIX = "QATQuantizer"


@dataclass(frozen=True, kw_only=True)
class QATConfigBase(AOBaseConfig):
    """The base of the configs of all methods.

    Args:
        step: "prepare" swaps quantized linears in. "convert" swaps plain linears with hard weights
            back.
        tau: The temperature until a schedule sets another, in [0, 100]. 0 is straight-through. A
            method without a temperature ignores it.
        pressure: The pressure until a schedule sets another, in [0, 1].
        target: The kind of weight that "convert" makes: "dense" (the hard weight in its own dtype)
            or a packed format of the method.

    Raises:
        InputError: If an option is wrong.

    Note:
        ``quantize_`` by itself takes every linear, the output head too. Pass
        ``filter_fn=hestia_tune.is_transformer_linear``, or use the method's component.
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
        allowed = ("dense", *packed_formats(self.method()))
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


@dataclass(frozen=True, kw_only=True)
class MethodConfig(QATConfigBase):
    """QAT by any method for ``torchao.quantization.quantize_``.

    Args:
        of: The method, such as ``LSQMethod(group_size=64)``.
        step: See `QATConfigBase`, also for the next three options.
        tau: The temperature until a schedule sets another.
        pressure: The pressure until a schedule sets another.
        target: The kind of weight that "convert" makes.
    """

    of: Method

    def method(self) -> Method:
        return self.of


def transform(module: Any, config: QATConfigBase, name: str = "a linear") -> nn.Module:
    """Return the module that replaces a linear in ``quantize_``, for every method.

    For a `Stack`, return the layer that "prepare" puts into its module. The errors of "convert"
    show the name. ``quantize_`` does not pass a name.
    """
    scalars = {"tau": config.tau, "pressure": config.pressure}
    if isinstance(module, Stack):
        return QuantizedStack.of(module, config.method(), **scalars)
    if config.step == "convert":
        is_quantized = isinstance(module, QuantizedLinear)
        return module.to_hard_linear(config.pack, name) if is_quantized else module
    method = config.method()
    if isinstance(module, QuantizedLinear):
        if module.method != method:
            warn_once(
                f"a linear that is prepared for {module.method.key()} keeps this method and does "
                f"not get {method.key()}; prepare the model anew to change it"
            )
        return module
    method.check_layer(module.in_features, module.out_features, str(module))
    return QuantizedLinear.from_linear(module, method, **scalars)


register_quantize_module_handler(MethodConfig)(transform)


def options_of(methods: Sequence[type[Method]]) -> dict[str, dataclasses.Field]:
    """Return the options of methods that share a component, by name, in order."""
    fields: dict[str, dataclasses.Field] = {}
    for method in methods:
        for field in dataclasses.fields(cast(Any, method)):
            fields.setdefault(field.name, field)
    return fields


def method_of(methods: Sequence[type[Method]], options: Mapping[str, Any]) -> Method:
    """Return the method that options choose among methods that share a component.

    Args:
        methods: The classes.
        options: Name -> value. The others have their defaults.

    Raises:
        InputError: If no method has a value, or the chosen method lacks an option.
    """
    defaults = {name: field.default for name, field in options_of(methods).items()}
    chosen = {**defaults, **options}
    words: dict[str, list] = {}
    for method in methods:
        own = method.words()
        if all(chosen[name] in allowed for name, allowed in own.items()):
            break
        for name, allowed in own.items():
            words.setdefault(name, []).extend(each for each in allowed if each not in words[name])
    else:
        name = next(name for name, allowed in words.items() if chosen[name] not in allowed)
        rule = " or ".join(map(json.dumps, words[name]))
        raise InputError(f"{name} must be {rule}; got {chosen[name]!r}")
    known = options_of([method])
    if odd := [n for n in options if n not in known and options[n] != defaults[n]]:
        other = next(each for each in methods if odd[0] in options_of([each]))
        *names, last = [name for name in options_of([other]) if name not in known]
        owned = f"{', '.join(names)} and {last} are options" if names else f"{last} is an option"
        shared = [name for name in other.words() if name in method.words()]
        rules = [f"the {name} {' or '.join(map(str, other.words()[name]))}" for name in shared]
        given = [f"the {name} {chosen[name]}" for name in shared]
        raise InputError(
            f"{owned} of {' and '.join(rules)}; got {odd[0]}={options[odd[0]]} with "
            f"{' and '.join(given)}; leave {odd[0]} out"
        )
    return method(**{name: value for name, value in options.items() if name in known})


class Component:
    """A two-step component: ``prepare(model)`` before training, ``convert(model)`` after it.

    Args:
        config: The method and its options. A component of a method takes the options of the method
            instead, by name.
        include: Shell patterns of the linears to quantize. None takes every linear of the
            transformer blocks (attention q, k, v, output; MLP gate, up, down) and the stacks
            (`hestia_tune.qat.stack`).
        exclude: Shell patterns of linears to leave out.
        skip_incompatible: Whether to leave out linears of a shape that the method cannot quantize,
            instead of raising an error.
        scale_lr: Learning rate of the methods' own parameters. None takes the optimizer's rate.
        layers: Shell pattern -> the component that quantizes the linears of this name instead, or
            None for linears that stay dense. Later patterns take precedence. Only the method of
            such a component is used. A component may also be a mapping with ``_component_`` and the
            options of its method, as in a YAML file.
        **options: Options of the method, such as ``group_size``.

    Attributes:
        method: The method of all linears that ``layers`` does not name.
        skipped: Names of the linears that `prepare` left out because of their shape.
        left_dense: Names of the linears that `prepare` left out because of ``layers``.

    Raises:
        InputTypeError: If there is no such option, the patterns are not lists, or ``layers`` is
            not such a mapping.
        InputError: If a value is not allowed; if ``scale_lr`` is given, and no method has
            parameters; or if a method in ``layers`` has a temperature and the component has none.
    """

    # The methods whose options this component has. The base takes a config instead.
    methods: ClassVar[tuple[type[Method], ...]] = ()
    # Whether a method reads a temperature, and so a schedule of the temperature.
    has_temperature: bool = True

    def __init__(
        self,
        config: QATConfigBase | None = None,
        *,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        skip_incompatible: bool = False,
        scale_lr: float | None = None,
        layers: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        known = options_of(self.methods)
        for name in options.keys() - known.keys():
            raise InputTypeError(
                f"unknown option {name}{nearest(name, known)}; {type(self).__name__} has "
                f"{', '.join(known)}"
            )
        if (config is None) != bool(self.methods):
            raise InputTypeError(
                "a Component takes a config, such as hestia_tune.HestiaConfig(), and the component "
                "of a method takes the method's options by name"
            )
        self.config = config or MethodConfig(of=method_of(self.methods, options))
        self.method = self.config.method()
        self.has_temperature = self.method.has_temperature
        if isinstance(layers, Mapping):
            layers = {name: _component(name, other) for name, other in layers.items()}
        self.layers = self._checked(layers)
        if scale_lr is not None:
            require_number("the method's learning rate", scale_lr, 0, 1)
            if not any(each.method.trained_parameters for each in self.components):
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
        self.left_dense: list[str] = []

    def _checked(
        self, layers: Mapping[str, "Component | None"] | None
    ) -> dict[str, "Component | None"]:
        """Return the components of ``layers``, or raise the errors that concern them."""
        if not isinstance(layers, Mapping | None):
            raise InputTypeError(
                f"layers must map patterns to components; got {type(layers).__name__}"
            )
        for pattern, other in (layers or {}).items():
            if not isinstance(other, Component | None):
                raise InputTypeError(
                    f"layers: {pattern} must be a component of hestia_tune such as INT4, or null "
                    f"for dense linears; got {other!r}"
                )
            if not all(isinstance(m, GroupMethod) for m in (self.method, (other or self).method)):
                raise InputError(
                    f"layers: only methods with scales by group can be mixed; {pattern} mixes "
                    f"{self.method.key()} with {other.method.key() if other else 'dense linears'}; "
                    "leave layers out"
                )
            if other and other.has_temperature > self.has_temperature:
                raise InputError(
                    f"layers: {pattern} has a temperature, but {type(self).__name__} has none, so "
                    "no schedule would set it; make the component with a temperature the main one"
                )
        return dict(layers or {})

    @property
    def components(self) -> list["Component"]:
        """This component and the components in ``layers``."""
        return [self, *filter(None, self.layers.values())]

    @property
    def name(self) -> str:
        """The name of the method of all linears, or "mixed"."""
        return "mixed" if any(self.layers.values()) else self.method.name

    def key(self) -> str:
        """Return a string that identifies the methods of all linears.

        It is `Method.key` for one method. For several, it begins with "mixed", and a digest of
        ``layers`` follows.
        """
        if not any(self.layers.values()):
            return self.method.key()
        others = {name: other and other.method.key() for name, other in self.layers.items()}
        texts = dict.fromkeys((self.method.key(), *(key or "dense" for key in others.values())))
        return f"mixed, layers={digest([*others.items()])[:8]}: {'; '.join(texts)}"

    def describe(self, model: nn.Module) -> dict[str, Any]:
        """Return the entries of hestia.json about the quantized layers of a prepared model.

        These are ``quantizer`` (`key`), ``layers`` (names) and, for several methods, ``methods``:
        name -> `Method.key` of every layer with another method than the component's.
        """
        methods = methods_of(model)
        others = {name: m.key() for name, m in methods.items() if m != self.method}
        return {
            "quantizer": self.key(),
            "layers": [*methods],
            **({"methods": others} if others else {}),
        }

    def fit_temperature(
        self,
        weights: Mapping[str, Tensor],
        methods: Mapping[str, Method],
        device: torch.device | None = None,
    ) -> float:
        """Return the temperature at which relaxed weights have the smallest squared error.

        It fits the component's own method; if no layer uses it, the first method in ``layers`` that
        has a temperature and that a layer uses. Without one, return the paper's 0.3.

        Args:
            weights: Name -> latent weight of every quantized layer.
            methods: Name -> method of every quantized layer.
            device: Where to compute. None: where each weight is.

        Raises:
            InputError: If the weights are not finite, or all zero.
        """
        for method in [each.method for each in self.components if each.has_temperature]:
            chosen = [weight for name, weight in weights.items() if methods.get(name) == method]
            if chosen:
                return method.fit_temperature(
                    weight.flatten(0, -2).to(device or weight.device, torch.float32)
                    for weight in chosen
                )
        return 0.3

    def prepare(self, model: nn.Module) -> nn.Module:
        """Swap the selected linears for quantized linears, in place, and return ``model``.

        Raises:
            InputError: If a pattern matches nothing, or a layer cannot be quantized. The error
                names the layer, and the model does not change.
        """
        chosen = select_layers(model, self._include, self._exclude)
        selected: dict[str, Component | None] = dict.fromkeys(chosen, self)
        for pattern, other in self.layers.items():
            selected |= dict.fromkeys(matching(pattern, chosen, "layers"), other)
        self.left_dense = [fqn for fqn, other in selected.items() if other is None]
        components = {fqn: other for fqn, other in selected.items() if other is not None}
        chosen = {fqn: layer for fqn, layer in chosen.items() if fqn in components}
        self.skipped = []
        for method in dict.fromkeys(components[fqn].method for fqn in chosen):
            if isinstance(method, GroupMethod) and not self._skip_incompatible:
                mine = {n: layer for n, layer in chosen.items() if components[n].method == method}
                method.check_widths({name: layer.in_features for name, layer in mine.items()})
        for fqn, layer in list(chosen.items()):
            try:
                check_layer(components[fqn].method, layer, fqn)
            except ValueError as error:
                if not self._skip_incompatible:
                    raise
                log.warning("not quantized: %s", error)
                self.skipped.append(fqn)
                del chosen[fqn]
        if not chosen:
            raise InputError(
                f"{self.key()} can quantize none of the {len(selected)} selected linears"
            )
        layers = {
            id(layer): transform(layer, dataclasses.replace(components[fqn].config, step="prepare"))
            for fqn, layer in chosen.items()
        }
        for fqn, module in list(model.named_modules(remove_duplicate=False)):
            if id(module) in layers and clean_fqn(fqn) in chosen:
                model.set_submodule(fqn, layers[id(module)])
        return model

    def convert(self, model: nn.Module) -> nn.Module:
        """Swap every quantized linear for a plain linear with its hard weight, in place.

        Linears that shared a latent weight share the hard weight. A module that is not quantized,
        such as an embedding, no longer shares the weight. Hard weights of stacks are dense.

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
        hard: dict[int, Tensor] = {}
        for fqn, layer in layers.items():
            if isinstance(layer, QuantizedStack):
                layer.convert(clean_fqn(fqn))
            elif isinstance(layer, QuantizedLinear):
                linear = layer.to_hard_linear(config.pack, clean_fqn(fqn))
                linear.weight = hard.setdefault(id(layer.weight), linear.weight)
                model.set_submodule(fqn, linear)
        return model


def _component(pattern: str, given: Any) -> Any:
    """Return the component that an entry of ``layers`` describes, or anything else unchanged."""
    if not isinstance(given, Mapping) or "_component_" not in given:
        return given
    import hestia_tune

    options = dict(given)
    name = str(options.pop("_component_"))
    kind = getattr(hestia_tune, name.removeprefix("hestia_tune."), None)
    if not (isinstance(kind, type) and issubclass(kind, Component)):
        raise InputError(
            f"layers: {pattern} names {name}, which is no quantizer component of hestia_tune; use "
            "one such as hestia_tune.INT4, or null for dense linears"
        )
    if shared := options.keys() & {"include", "exclude", "skip_incompatible", "scale_lr", "layers"}:
        raise InputError(
            f"layers: {pattern} can only have options of its method; got {min(shared)}; set it for "
            "the whole quantizer"
        )
    return kind(**options)


@functools.cache
def component_of(*methods: type[Method]) -> type[Component]:
    """Return the component of methods that share one."""
    return type(
        methods[0].component,
        (Component,),
        {
            "methods": methods,
            "has_temperature": any(method.has_temperature for method in methods),
            "__doc__": _described("component", methods),
            "__module__": __name__,
        },
    )


@functools.cache
def config_of(*methods: type[Method]) -> type[QATConfigBase]:
    """Return the config for torchao's ``quantize_`` of methods that share a component."""
    known, fields = options_of(methods), []
    for option, field in known.items():
        words = dict.fromkeys(word for m in methods for word in m.words().get(option, ()))
        kind = Literal[tuple(words)] if words else field.type
        fields.append((option, kind, dataclasses.field(default=field.default)))

    def method(self) -> Method:
        return method_of(methods, {option: getattr(self, option) for option in known})

    made = dataclasses.make_dataclass(
        f"{methods[0].component.removesuffix(_SUFFIX)}Config",
        fields,
        bases=(QATConfigBase,),
        namespace={
            "methods": methods,
            "method": method,
            "__doc__": _described("config", methods),
            "__module__": __name__,
        },
        frozen=True,
        kw_only=True,
    )
    register_quantize_module_handler(made)(transform)
    return made


def _described(kind: str, methods: Sequence[type[Method]]) -> str:
    """Return the docstring of a component or a config: those of its methods."""
    texts = [f"{method.__name__}: {inspect.getdoc(method)}" for method in methods]
    base = "Component" if kind == "component" else "QATConfigBase"
    return "\n\n".join([f"The {kind} of a method; see also `{base}`.", *texts])


def __getattr__(name: str) -> Any:
    """Return the component or the config of this name."""
    if methods := Method.of_component(name):
        return component_of(*methods)
    base = name.removesuffix("Config")
    methods = Method.of_component(base) or Method.of_component(base + _SUFFIX)
    if base != name and methods:
        return config_of(*methods)
    raise AttributeError(f"module {__name__} has no attribute {name}")
