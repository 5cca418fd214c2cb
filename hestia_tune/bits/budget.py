"""Predict what every choice costs and how much it hurts, and choose within the budget.

The increase of the loss is predicted to second order. Let e = vec(W - Q(W)) be the error of a
linear's n weights, and H its block of the Hessian. The gradient of a pretrained model is small, so

    L(W - e) - L(W)  =  1/2 e'He + ...  ~  1/2 Tr(H)/n ||e||^2

The second step holds in the mean over errors that are uncorrelated and of equal size: then
E[e'He] = Tr(H) E||e||^2/n. Tr(H) is the trace that the temperatures use (Eq. 10); HAWQ-V2
(arXiv 1911.03852) chooses bits by the same product. The increases of the linears are added up.

The errors are measured on the pretrained weights, before any training. Training makes them smaller,
and most of all the errors of the fewest bits. So the prediction ranks choices. It does not predict
the loss of the trained model.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hestia_tune.bits.allocation import Allocation, allocate
from hestia_tune.bits.file import component_of
from hestia_tune.config.bits import CHOICES, BitsConfig
from hestia_tune.config.run import RunConfig
from hestia_tune.errors import InputError
from hestia_tune.methods import Method
from hestia_tune.models.build import make_component
from hestia_tune.models.embedding import EMBEDDING_BITS, check_width
from hestia_tune.qat.linear import quantized_linears
from hestia_tune.qat.prepare import Component, HestiaQATQuantizer
from hestia_tune.sensitivity import SensitivityArtifact

# Bits of a code in the densest packed layout. Five ternary codes fit into a byte, since 3^5 = 243:
# 1.6 bits, as in GGUF's TQ1_0. The entropy bound, log2 3 = 1.585, is reached by no layout.
_CODE_BITS = {
    "binary": Fraction(1),
    "ternary": Fraction(8, 5),
    "int2": Fraction(2),
    "int4": Fraction(4),
    "bf16": Fraction(16),
}
_SCALE_BITS = 16
_ROWS = 1024  # Rows of a weight that are quantized together, to measure their error.
_UNITS = 5  # Costs are counted in fifths of a bit, so that they are integers.


def bits_per_weight(choice: str, group: int) -> Fraction:
    """Return the bits per weight of a choice, including its scales.

    Args:
        choice: One of `hestia_tune.config.bits.CHOICES`.
        group: The number of weights that share a scale of 16 bits. "bf16" has no scales.
    """
    scales = 0 if choice == "bf16" else Fraction(_SCALE_BITS, group)
    return _CODE_BITS[choice] + scales


def squared_error(weight: Tensor, method: Method | None) -> float:
    """Return ||W - Q(W)||^2 of a weight (out_features, in_features), before training.

    Args:
        weight: The pretrained weight, in float32.
        method: The method. None rounds to bfloat16.
    """
    # Some methods sort the weights, so a large weight is quantized in parts.
    parts = [weight] if method is not None and method.scales_span_rows else weight.split(_ROWS)
    error = 0.0
    for part in parts:
        if method is None:
            hard = part.to(torch.bfloat16)
        else:
            hard = method.hard(part, method.initial_parameters(part))
        error += float((part - hard).square().sum(dtype=torch.float64))
    return error


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Describe one linear.

    Attributes:
        size: The number of its weights.
        group: The number of weights that share a scale.
    """

    size: int
    group: int


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Hold the budget of a model and its choices.

    Attributes:
        average: The largest mean number of bits per weight.
        by: How to choose; see `hestia_tune.config.bits.BitsConfig`.
        methods: Name of a choice -> its method, in order of the bits. None leaves a linear dense.
        layers: Name of a linear -> its size, in model order.
        embedding: Numbers of weights and of bits of the embedding and of an output head of its own,
            which count too. (0, 0): they do not count.

    Raises:
        InputError: If even the fewest bits exceed the budget.
    """

    average: float
    by: str
    methods: Mapping[str, Method | None]
    layers: Mapping[str, Layer]
    embedding: tuple[int, Fraction] = 0, Fraction(0)

    def __post_init__(self):
        least = Fraction(int(self.costs[:, 0].sum()), _UNITS)
        if least > self.limit:
            shown = math.ceil(10**4 * (least + self.embedding[1]) / self.size) / 10**4
            raise InputError(
                f"bits.average must be at least {shown:.4f}, which is what "
                f"{next(iter(self.methods))} needs for all linears with its scales"
                f"{' and for the embedding' * bool(self.embedding[0])}; got "
                f"{self.average}; raise bits.average, add a choice to bits.choices, or raise "
                "quantizer.group_size"
            )

    @classmethod
    def of(cls, config: RunConfig, component: Component, model: nn.Module) -> "Budget":
        """Return the budget of a config, after checking its choices.

        Args:
            config: The config, with ``bits.average``.
            component: The component of ``quantizer``.
            model: The model that this component has prepared. It may be on the meta device.

        Raises:
            InputError: If the quantizer has no other numbers of bits, a choice cannot quantize a
                linear, or even the fewest bits exceed the budget.
        """
        settings: BitsConfig = config.bits
        if not isinstance(component, HestiaQATQuantizer):
            raise InputError(
                "bits needs quantizer._component_=hestia_tune.HestiaQATQuantizer, because other "
                f"methods have one number of bits; got {config.quantizer['_component_']}; leave "
                "bits out"
            )
        methods: dict[str, Method | None] = {}
        for choice in sorted(settings.choices, key=CHOICES.index):
            section = component_of(choice, config.quantizer)
            methods[choice] = None if section is None else make_component(section).method
        layers = {}
        for name, layer in quantized_linears(model).items():
            size, in_features = layer.weight.numel(), layer.weight.shape[-1]
            for method in filter(None, methods.values()):
                method.check_layer(in_features, size // in_features, name)
            own: Any = component.method  # of Hestia, so it has groups
            group_size = own.group_size
            group = {"channel": in_features, "tensor": size}.get(group_size, group_size)
            layers[name] = Layer(size=size, group=group)
        options = {"average": settings.average, "by": settings.by}
        if settings.embedding:
            options["embedding"] = _embedding(model, layers, settings.embedding)
        return cls(methods=methods, layers=layers, **options)

    @property
    def size(self) -> int:
        """Return the number of weights that share the budget."""
        return sum(layer.size for layer in self.layers.values()) + self.embedding[0]

    @property
    def limit(self) -> Fraction:
        """Return the number of bits that all linears together may have."""
        return Fraction(str(self.average)) * self.size - self.embedding[1]

    @property
    def costs(self) -> np.ndarray:
        """Return the cost of every choice of every linear in fifths of a bit (layers, choices)."""
        rows = [
            [int(_UNITS * x.size * bits_per_weight(choice, x.group)) for choice in self.methods]
            for x in self.layers.values()
        ]
        return np.array(rows, np.int64)

    def bits(self, choices: Mapping[str, str]) -> dict[str, float]:
        """Return name of a linear -> its bits per weight, from name -> choice."""
        layers = self.layers.items()
        return {name: float(bits_per_weight(choices[name], x.group)) for name, x in layers}

    def mean_bits(self, choices: Mapping[str, str]) -> float:
        """Return the mean bits per weight that share the budget, from name -> choice."""
        layers = self.layers.items()
        total = sum(x.size * bits_per_weight(choices[name], x.group) for name, x in layers)
        return float((total + self.embedding[1]) / self.size)

    def allocate(self, losses: np.ndarray) -> Allocation:
        """Return one choice per linear, with the smallest sum within the budget.

        Args:
            losses: What each choice of each linear adds to the sum to minimise (layers, choices).
        """
        return allocate(losses, self.costs, int(self.limit * _UNITS))

    def choose(
        self,
        weights: Mapping[str, Tensor],
        artifact: SensitivityArtifact | None = None,
        device: torch.device | str = "cpu",
    ) -> dict[str, Any]:
        """Return the choice of every linear with everything that it follows from.

        Args:
            weights: Name of a linear -> pretrained weight. Not all of its values are zero.
            artifact: The traces. None: the increase of the loss is not predicted.
            device: The device to compute the errors on.

        Returns:
            A document for `hestia_tune.bits.file`. ``gap`` is how far the increase of the loss (or
            the sum of relative errors) is above the least possible one, at most. It is 0 if no
            choice within the budget is better.
        """
        squared, norms = np.empty((len(self.layers), len(self.methods))), {}
        for row, name in enumerate(self.layers):
            weight = weights[name].flatten(0, -2).to(device, torch.float32)
            norms[name] = float(weight.square().sum(dtype=torch.float64))
            squared[row] = [squared_error(weight, method) for method in self.methods.values()]
        traces = {} if artifact is None else resolved_traces(artifact)
        # Predicted increases of the loss, if the traces are known: Tr(H)/(2n) ||e||^2.
        factors = [traces.get(name, 0.0) / (2 * layer.size) for name, layer in self.layers.items()]
        increases = np.array(factors)[:, None] * squared
        relative = squared / np.array([[norm] for norm in norms.values()])
        found = self.allocate(increases if self.by == "sensitivity" else relative)
        names = [*self.methods]
        choices = {n: names[k] for n, k in zip(self.layers, found.options, strict=True)}
        bits, layers = self.bits(choices), {}
        for row, (name, layer) in enumerate(self.layers.items()):
            option = found.options[row]
            layers[name] = {
                "choice": choices[name],
                "bits": bits[name],
                "weights": layer.size,
                "error": squared[row, option],
                "relative_error": relative[row, option],
                "trace": traces.get(name),
                "predicted_increase": increases[row, option] if traces else None,
            }
        parts = [entry["predicted_increase"] for entry in layers.values()]
        return {
            "mean_bits": self.mean_bits(choices),
            "predicted_increase": sum(parts) if traces else None,
            "gap": found.gap,
            "layers": layers,
        }


def _embedding(model: nn.Module, layers: Mapping[str, Layer], choice: str) -> tuple[int, Fraction]:
    """Return the numbers of weights and of bits of all matrices with a row for each token.

    Args:
        model: The prepared model.
        layers: The linears that are quantized, by name.
        choice: The option ``bits.embedding``.
    """
    rows = max(m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
    size = 0
    for name, weight in model.named_parameters():  # a tied head is the same parameter
        if weight.dim() == 2 and len(weight) == rows and name.removesuffix(".weight") not in layers:
            check_width(name, weight.shape[1])
            size += weight.numel()
    return size, size * Fraction(EMBEDDING_BITS[choice])


def resolved_traces(artifact: SensitivityArtifact) -> dict[str, float]:
    """Return the traces, with the smallest resolved trace for every unresolved layer.

    `hestia_tune.sensitivity.sensitivity_scores` does the same. A trace that may be negative would
    say that errors help.
    """
    unresolved = set(artifact.unresolved)
    smallest = min(trace for name, trace in artifact.traces.items() if name not in unresolved)
    return {n: smallest if n in unresolved else trace for n, trace in artifact.traces.items()}
