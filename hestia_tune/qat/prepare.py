"""Prepare and convert models: swap quantized linears in and out of any model, as torchao does.

The two-step components, ``prepare(model)`` and ``convert(model)``, wrap the configs of
`hestia_tune.qat.configs`. They choose the linears, and name them in their errors. Nothing here
copies a weight: prepare shares the parameter (also on the meta device), and convert replaces it by
the hard weight.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hestia_tune.config import nearest, require_number
from hestia_tune.errors import InputError, InputTypeError
from hestia_tune.files import digest
from hestia_tune.methods import GroupMethod, Method
from hestia_tune.qat.configs import (
    Fairy2iConfig,
    HestiaConfig,
    MethodConfig,
    QATConfigBase,
    transform,
)
from hestia_tune.qat.experts import QuantizedExperts
from hestia_tune.qat.linear import QuantizedLayer, clean_fqn, methods_of
from hestia_tune.qat.select import check_layer, matching, select_layers

log = logging.getLogger(__name__)


class QATQuantizerBase:
    """A two-step component: ``prepare(model)`` before training, ``convert(model)`` after it.

    Args:
        config: The method and its options.
        include: Shell patterns of the linears to quantize. None takes every linear of the
            transformer blocks (attention q, k, v, output; MLP gate, up, down) and the experts.
        exclude: Shell patterns of linears to leave out.
        skip_incompatible: Whether to leave out linears of a shape that the method cannot quantize,
            instead of raising an error.
        scale_lr: Learning rate of the methods' own parameters. None takes the optimizer's rate.
        layers: Shell pattern -> the component that quantizes the linears of this name instead, or
            None for linears that stay dense. A later pattern wins over an earlier one. Only the
            method of such a component is used.

    Attributes:
        method: The method of all linears that ``layers`` does not name.
        skipped: Names of the linears that `prepare` left out for their shape.
        left_dense: Names of the linears that `prepare` left out because of ``layers``.

    Raises:
        InputTypeError: If the patterns are not lists, or ``layers`` is not such a mapping.
        InputError: If ``scale_lr`` is out of range, or no method has parameters; or if a method in
            ``layers`` has a temperature and the component has none.
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
        layers: Mapping[str, "QATQuantizerBase | None"] | None = None,
    ):
        self.config, self.method = config, config.method()
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
        self, layers: Mapping[str, "QATQuantizerBase | None"] | None
    ) -> dict[str, "QATQuantizerBase | None"]:
        """Return the components of ``layers``, or raise the errors that concern them."""
        if not isinstance(layers, Mapping | None):
            raise InputTypeError(
                f"layers must map patterns to components; got {type(layers).__name__}"
            )
        for pattern, other in (layers or {}).items():
            if not isinstance(other, QATQuantizerBase | None):
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
    def components(self) -> list["QATQuantizerBase"]:
        """Return this component and the components in ``layers``."""
        return [self, *filter(None, self.layers.values())]

    @property
    def name(self) -> str:
        """Return the name of the method of all linears, or "mixed"."""
        return "mixed" if any(self.layers.values()) else self.method.name

    def key(self) -> str:
        """Return a text that identifies the methods of all linears.

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
        """Return the temperature that fits the weights of one method best.

        It is the component's method. If no layer has this method, it is the first method in
        ``layers`` that has a temperature and a layer. Without any, return the paper's 0.3.

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
        components = dict.fromkeys(chosen, self)
        for pattern, other in self.layers.items():
            components |= dict.fromkeys(matching(pattern, chosen, "layers"), other)
        self.left_dense = [fqn for fqn, other in components.items() if other is None]
        chosen = {fqn: layer for fqn, layer in chosen.items() if components[fqn]}
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
                f"{self.key()} can quantize none of the {len(components)} selected linears"
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
        layers: See `QATQuantizerBase`. A component may also be given as a config gives it: a
            mapping with ``_component_`` and the options of its method.
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
        layers: Mapping[str, Any] | None = None,
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
        if isinstance(layers, Mapping):
            layers = {name: _component(name, other) for name, other in layers.items()}
        super().__init__(config, include, exclude, skip_incompatible, scale_lr, layers)


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
