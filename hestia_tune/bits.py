"""Spend a budget of bits: which linear gets how many bits per weight.

**Loss.** The increase of the loss is predicted to second order. Let e = vec(W - Q(W)) be the error
of a linear's n weights, and H its block of the Hessian. The gradient of a pretrained model is
small, so

    L(W - e) - L(W)  =  1/2 e'He + ...  ~  1/2 Tr(H)/n ||e||^2

The second step holds in the mean over errors that are uncorrelated and of equal size: then
E[e'He] = Tr(H) E||e||^2/n. Tr(H) is the trace that the temperatures use (Eq. 12); HAWQ-V2
(arXiv 1911.03852) chooses bits by the same product. The increases of the linears are added up.

The errors are measured on the pretrained weights, before any training. Training makes them smaller,
and most of all the errors of the fewest bits. So the prediction ranks choices. It does not predict
the loss of the trained model.

**Choice.** One option per layer under a budget is a multiple-choice knapsack, which `allocate`
solves exactly. It goes through the layers and keeps the states (cost so far, loss so far) that can
still lead to the best result. It drops a state in two cases:

- A cheaper state has no larger loss (dominance).
- Even a lower bound of the final loss is above a loss that is known to be possible. The bound comes
  from a Lagrange multiplier m >= 0. For every choice c within the budget B,

      sum_i loss_i(c_i)  >=  sum_i min_c (loss_i(c) + m cost_i(c)) - m B

Costs are integers, so a budget is met exactly. With the bound few states remain: a model of 224
linears and four options takes well under a second.

**File.** ``bits.json`` in output_dir has the choice of every linear:

    "average", "choices", "by", "quantizer", "embedding"
                                                 the settings
    "model_fingerprint", "traces"                the weights, and a digest of the traces
    "mean_bits", "predicted_increase", "gap"     the result
    "layers": {"layers.0.attn.q_proj": {"choice", "bits", "weights", "error", "relative_error",
                                        "trace", "predicted_increase"}, ...}

A run reads only ``choice``, so a user may edit it by hand. A run with other settings does not use
the file.

`chosen` puts the choices into the config, as ``quantizer.layers``. Training, conversion and
evaluation then read that option, as if the user had written it.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hestia_tune.config.run_config import RunConfig
from hestia_tune.config.sections import CHOICES, BitsConfig
from hestia_tune.errors import InputError
from hestia_tune.files import kept_result
from hestia_tune.methods import Method
from hestia_tune.methods.straight_through import EMBEDDING_BITS, check_embedding_width
from hestia_tune.models.loading import make_component
from hestia_tune.qat.linear import quantized_linears
from hestia_tune.qat.prepare import Component, HestiaConfig, HestiaQATQuantizer, TwoBit
from hestia_tune.qat.stack import QuantizedStack, Stack
from hestia_tune.sensitivity import SensitivityArtifact

# States that are kept after each layer. With more, the result may be not the best one.
_MOST_STATES = 200_000


class Allocation(NamedTuple):
    """One option per layer.

    Attributes:
        options: The index of each layer's option.
        loss: The sum of the losses.
        gap: The loss is at most this much above the smallest possible loss. 0: it is the smallest.
    """

    options: list[int]
    loss: float
    gap: float


def allocate(losses: np.ndarray, costs: np.ndarray, budget: int) -> Allocation:
    """Return the options with the smallest sum of losses whose costs do not exceed a budget.

    Args:
        losses: The loss of every option of every layer, float64 (layers, options).
        costs: The cost of every option of every layer, int64 (layers, options). The options of a
            layer are in order of their cost.
        budget: The largest sum of costs. The cheapest options must fit into it.
    """
    multiplier, start = _relaxed(losses, costs, budget)
    rows = np.arange(len(losses))
    reachable = losses[rows, start].sum()
    # Lower bounds of what all later layers add to a state, after each layer.
    reduced_later, cost_later = (
        np.append(table.min(1)[::-1].cumsum()[::-1], 0)
        for table in (losses + multiplier * costs, costs)
    )
    bound = reduced_later[0] - multiplier * budget
    limit = reachable + 1e-12 * (abs(reachable) + multiplier * budget)  # for the rounding of sums
    cost, loss, is_exact = np.zeros(1, np.int64), np.zeros(1), True
    history = []
    for layer in rows:
        # A flat index is state * options + option.
        cost = (cost[:, None] + costs[layer]).ravel()
        loss = (loss[:, None] + losses[layer]).ravel()
        bounds = loss + multiplier * (cost - budget) + reduced_later[layer + 1]
        fits = cost + cost_later[layer + 1] <= budget
        index = np.flatnonzero(fits & (bounds <= limit))
        index = index[np.lexsort((loss[index], cost[index]))]
        cheaper = np.minimum.accumulate(np.append(np.inf, loss[index][:-1]))
        index = index[loss[index] < cheaper]
        if len(index) > _MOST_STATES:
            is_exact = False
            index = np.sort(index[np.argsort(bounds[index])[:_MOST_STATES]])
        history.append(index)
        cost, loss = cost[index], loss[index]
    if not is_exact and (not len(loss) or loss.min() > reachable):
        return Allocation(start.tolist(), float(reachable), float(reachable - bound))
    state, options = int(loss.argmin()), []
    for index in reversed(history):
        state, option = divmod(int(index[state]), costs.shape[1])
        options.append(option)
    best = float(loss.min())
    return Allocation(options[::-1], best, 0.0 if is_exact else float(best - bound))


def _relaxed(losses: np.ndarray, costs: np.ndarray, budget: int) -> tuple[float, np.ndarray]:
    """Return the smallest Lagrange multiplier whose options fit the budget, and these options.

    The options for a multiplier m minimize loss + m cost in every layer. They change only at
    m = (loss_a - loss_b)/(cost_b - cost_a) of two options, and their cost falls with m.
    """
    a, b = np.triu_indices(costs.shape[1], 1)
    differences = costs[:, b] - costs[:, a]
    slopes = (losses[:, a] - losses[:, b])[differences > 0] / differences[differences > 0]
    # Slightly above each slope, where the cheaper of the two options is chosen.
    multipliers = np.append(0.0, np.sort(slopes[slopes > 0]) * (1 + 1e-9))
    rows = np.arange(len(losses))

    def options(multiplier: float) -> np.ndarray:
        return (losses + multiplier * costs).argmin(1)

    def fits(multiplier: float) -> bool:
        return bool(costs[rows, options(multiplier)].sum() <= budget)

    found = bisect_left(multipliers, True, key=fits)
    if found == len(multipliers):  # the slopes of equal losses, rounded: the cheapest options fit
        return float(multipliers[-1]), costs.argmin(1)
    return float(multipliers[found]), options(multipliers[found])


BITS_FILE = "bits.json"
_HESTIA, _TWO_BIT = "hestia_tune.HestiaQATQuantizer", "hestia_tune.TwoBit"


def component_of(choice: str, quantizer: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the component that quantizes a linear with this choice. None: the linear stays dense.

    The quantizer itself is the component of its own codes. It keeps all its options. Scales are
    learned in all linears whose method can learn them, or in none, and start at least squares in
    all of them or in none.

    Args:
        choice: One of `hestia_tune.config.sections.CHOICES`.
        quantizer: The ``quantizer`` section.
    """
    group = {"group_size": quantizer.get("group_size", HestiaConfig.group_size)}
    if choice == "bf16":
        return None
    if choice == "int4":
        return {"_component_": "hestia_tune.INT4", **group}
    is_two_bit = quantizer["_component_"] == _TWO_BIT
    if choice == ("two_bit" if is_two_bit else quantizer.get("codebook", "ternary")):
        return {**quantizer}
    # A share of the least-squares scale is an option of four levels only.
    shared = {"scale": ("learned",), "start": ("least_squares",)}
    scale = {key: value for key, value in quantizer.items() if value in shared.get(key, ())}
    if choice == "two_bit":
        return {"_component_": _TWO_BIT, **scale, **group}
    scale = scale if choice == "ternary" and "scale" in scale else {}
    return {"_component_": _HESTIA, "codebook": choice, **scale, **group}


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return the settings in a config that the choices depend on, as plain values."""
    bits = config.bits
    settings = {"average": bits.average, "choices": sorted(bits.choices, key=CHOICES.index)}
    return settings | {
        "by": bits.by,
        "quantizer": {**config.quantizer},
        "embedding": bits.embedding,
    }


def kept(config: RunConfig, identity: Mapping[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """Return the content of a config's file, or None if there is no file to use.

    Args:
        config: The config, with ``bits.average``.
        identity: The settings that the file must have.
        overwrite: Whether another choice may be replaced.

    Raises:
        InputError: If the file has other settings and may not be replaced.
    """
    remedy = "use the same settings, delete the file to choose again, or take another output_dir"
    path = Path(config.output_dir) / BITS_FILE
    return kept_result(path, identity, overwrite=overwrite, remedy=remedy)


def read_choices(saved: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return name of a linear -> its choice, from the content of a file.

    Args:
        saved: The content.
        path: The file, for errors.

    Raises:
        InputError: If a choice is missing or unknown, or if every linear stays dense.
    """
    choices = {}
    for name, entry in saved["layers"].items():
        choice = entry.get("choice") if isinstance(entry, Mapping) else None
        if choice not in saved["choices"]:
            raise InputError(
                f"{path}: the choice of {name} must be one of {', '.join(saved['choices'])}; got "
                f"{choice}; correct it, or delete the file to choose again"
            )
        choices[name] = choice
    if {*choices.values()} == {"bf16"}:
        raise InputError(
            f"{path} leaves every linear dense, so there is nothing to quantize; lower "
            "bits.average, or leave bf16 out of bits.choices"
        )
    return choices


def with_choices(config: RunConfig, choices: Mapping[str, str]) -> RunConfig:
    """Return a config in which ``quantizer.layers`` names the component of every other linear.

    A linear whose choice is the quantizer's own codebook has no entry. The new config has no
    ``bits.average``.
    """
    sections = {name: component_of(choice, config.quantizer) for name, choice in choices.items()}
    layers = {name: section for name, section in sections.items() if section != config.quantizer}
    quantizer = {**config.quantizer, **({"layers": layers} if layers else {})}
    return config.changed(quantizer=quantizer, bits=BitsConfig(embedding=config.bits.embedding))


def chosen(config: RunConfig, required: bool = False) -> RunConfig:
    """Return the config with the choices of its file, or the config itself if there are none yet.

    A run that may replace what is in its output_dir does not mind a file with other settings.

    Args:
        config: The config.
        required: Whether there must be a file, for training and what follows it. The embedding may
            then be rounded in another way. A run that resumes needs a file with all settings.

    Raises:
        InputError: If the file has other settings or is damaged, or is missing and needed.
    """
    if config.bits.average is None:
        return config
    settings, path = settings_of(config), Path(config.output_dir) / BITS_FILE
    if required:
        del settings["embedding"]
    required = required or config.resume_from_checkpoint
    saved = kept(config, settings, overwrite=config.overwrite_output and not required)
    if saved is not None:
        return with_choices(config, read_choices(saved, path))
    if required:
        raise InputError(
            f"{path} does not exist, which says how many bits every linear has; run "
            "hestia_qat, or put the file of the trained run back"
        )
    return config


# Bits of a code in the densest packed layout. Five ternary codes fit into a byte, since 3^5 = 243:
# 1.6 bits, as in GGUF's TQ1_0. The entropy bound, log2 3 = 1.585, is reached by no layout.
_CODE_BITS = {
    "binary": Fraction(1),
    "ternary": Fraction(8, 5),
    "two_bit": Fraction(2),
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
        choice: One of `hestia_tune.config.sections.CHOICES`.
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
    """Budget of a model and its choices.

    Attributes:
        average: The largest mean number of bits per weight.
        by: How to choose; see `hestia_tune.config.sections.BitsConfig`.
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
        if not isinstance(component, HestiaQATQuantizer | TwoBit):
            raise InputError(
                f"bits needs quantizer._component_={_HESTIA} or {_TWO_BIT}, because other methods "
                f"have one number of bits; got {config.quantizer['_component_']}; leave bits out"
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
                if isinstance(layer, QuantizedStack):
                    Stack(*layer.place).check_method(method, name)
            own: Any = component.method  # of Hestia or TwoBit, so it has groups
            group_size = own.group_size
            group = {"channel": in_features, "tensor": size}.get(group_size, group_size)
            layers[name] = Layer(size=size, group=group)
        options = {"average": settings.average, "by": settings.by}
        if settings.embedding:
            options["embedding"] = _embedding(model, layers, settings.embedding)
        return cls(methods=methods, layers=layers, **options)

    @property
    def size(self) -> int:
        """The number of weights that share the budget."""
        return sum(layer.size for layer in self.layers.values()) + self.embedding[0]

    @property
    def limit(self) -> Fraction:
        """The number of bits that all linears together may have."""
        return Fraction(str(self.average)) * self.size - self.embedding[1]

    @property
    def costs(self) -> np.ndarray:
        """The cost of every choice of every linear in fifths of a bit (layers, choices)."""
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
            losses: What each choice of each linear adds to the sum to minimize (layers, choices).
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
            A document for `hestia_tune.bits`. ``gap`` is how far the increase of the loss (or
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
            check_embedding_width(name, weight.shape[1])
            size += weight.numel()
    return size, size * Fraction(EMBEDDING_BITS[choice])


def resolved_traces(artifact: SensitivityArtifact) -> dict[str, float]:
    """Return the traces, with the smallest resolved trace for every unresolved layer.

    `hestia_tune.sensitivity.estimation.sensitivity_scores` does the same. A trace that may be
    negative would say that errors help.
    """
    unresolved = set(artifact.unresolved)
    smallest = min(trace for name, trace in artifact.traces.items() if name not in unresolved)
    return {n: smallest if n in unresolved else trace for n, trace in artifact.traces.items()}
