"""Test what choices cost and how much they are predicted to hurt."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from hestia_tune.bits import (
    Budget,
    Layer,
    bits_per_weight,
    component_of,
    resolved_traces,
    squared_error,
)
from hestia_tune.errors import InputError
from hestia_tune.methods import EvenMethod, TernaryMethod
from hestia_tune.models.loading import make_component
from hestia_tune.sensitivity import SensitivityArtifact

GROUP = 16
METHODS = {
    "binary": EvenMethod(group_size=GROUP),
    "ternary": TernaryMethod(group_size=GROUP),
    "int2": EvenMethod(group_size=GROUP, codebook="int2"),
    "bf16": None,
}
SHAPES = {
    "layers.0.q": (8, 32),
    "layers.0.v": (4, 32),
    "layers.1.q": (8, 32),
    "layers.1.v": (4, 64),
}


def weights(seed=0):
    """Return weights of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (0.2 + index)
        for index, (name, shape) in enumerate(SHAPES.items())
    }


def artifact(unresolved=()):
    """Return traces that grow by a factor of 5 from layer to layer."""
    traces = {name: 5.0**index for index, name in enumerate(SHAPES)}
    errors = {name: 10 * trace * (name in unresolved) for name, trace in traces.items()}
    return SensitivityArtifact(traces=traces, standard_errors=errors, model_fingerprint="sha256:0")


def budget(average, by="sensitivity", methods=METHODS):
    layers = {name: Layer(size=math.prod(shape), group=GROUP) for name, shape in SHAPES.items()}
    return Budget(average=average, by=by, methods=methods, layers=layers)


def mean_bits(choices):
    """Return the mean bits per weight, as exact as the numbers in this table."""
    bits = {"binary": 1, "ternary": Fraction(8, 5), "int2": 2, "bf16": 16}
    total = sum(
        math.prod(SHAPES[name]) * (bits[choice] + (choice != "bf16")) for name, choice in choices
    )
    return total / sum(map(math.prod, SHAPES.values()))


def choices_of(document):
    return [(name, entry["choice"]) for name, entry in document["layers"].items()]


@pytest.mark.parametrize("scale", ["absmean", "learned"])
def test_two_bits_and_ternary_weights_choose_each_other_with_scales_of_the_same_kind(scale):
    ternary = {"_component_": "hestia_tune.HestiaQATQuantizer", "group_size": 64, "scale": scale}
    two_bit = ternary | {"_component_": "hestia_tune.TwoBit"}
    for own, choice, others in ((ternary, "ternary", "two_bit"), (two_bit, "two_bit", "ternary")):
        assert component_of(choice, own) == own
        method = make_component(component_of(others, own)).method
        assert (method.name, method.group_size, method.scale) == (others, 64, scale)
        assert component_of("int2", own)["codebook"] == "int2"


def test_scales_start_at_least_squares_in_all_linears_or_in_none():
    learned = {"group_size": 64, "scale": "learned", "start": "least_squares"}
    ternary = {"_component_": "hestia_tune.HestiaQATQuantizer"}
    two_bit = {"_component_": "hestia_tune.TwoBit"}
    for own, choice in ((ternary, "two_bit"), (two_bit, "ternary")):
        method = make_component(component_of(choice, own | learned)).method
        assert (method.scale, method.start) == ("learned", "least_squares")
    # Ternary weights know no other share, and no start of a scale that is not learned.
    for options in ({"scale": "learned", "start": 0.9}, {"start": "least_squares"}):
        method = make_component(component_of("ternary", two_bit | options)).method
        assert (method.scale, method.start) == (options.get("scale", "absmean"), "absmean")


def test_bits_include_the_scales():
    assert bits_per_weight("ternary", 128) == Fraction(8, 5) + Fraction(1, 8)
    expected = {"binary": 1.25, "two_bit": 2.25, "int2": 2.25, "int4": 4.25}
    assert {name: float(bits_per_weight(name, 64)) for name in expected} == expected
    assert bits_per_weight("bf16", 64) == 16


def test_errors_are_those_of_the_hard_weight(monkeypatch):
    weight = weights()["layers.0.q"]
    groups = weight.double().unflatten(1, (-1, GROUP))
    scale = groups.abs().mean(-1, keepdim=True).bfloat16().double()
    expected = (groups - scale * (groups / scale).round().clamp(-1, 1)).square().sum()
    assert squared_error(weight, METHODS["ternary"]) == pytest.approx(float(expected), rel=1e-6)
    assert squared_error(weight.bfloat16().float(), None) == 0
    whole = squared_error(weight, METHODS["int2"])
    monkeypatch.setattr("hestia_tune.bits._ROWS", 3)
    assert squared_error(weight, METHODS["int2"]) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("by", ["sensitivity", "error"])
@pytest.mark.parametrize("average", [2.2, 2.7, 3.0, 4.5, 9.1])
def test_no_choice_within_the_budget_is_better(by, average):
    latents, traces = weights(), artifact().traces
    document = budget(average, by).choose(latents, artifact())
    limit = Fraction(str(average))

    def cost(choices):
        errors = {n: squared_error(latents[n], METHODS[choice]) for n, choice in choices}
        if by == "error":
            return sum(e / float(latents[n].square().sum()) for n, e in errors.items())
        return sum(traces[n] / latents[n].numel() * e / 2 for n, e in errors.items())

    assignments = (
        list(zip(SHAPES, options, strict=True))
        for options in itertools.product(METHODS, repeat=len(SHAPES))
    )
    best = min(cost(one) for one in assignments if mean_bits(one) <= limit)
    found = choices_of(document)
    assert mean_bits(found) <= limit and document["gap"] == 0
    assert document["mean_bits"] == pytest.approx(float(mean_bits(found)))
    assert cost(found) == pytest.approx(best, rel=1e-6)
    if by == "sensitivity":
        assert document["predicted_increase"] == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("by", ["sensitivity", "error"])
def test_every_way_keeps_the_budget_and_spends_it_all_at_16_bits(by):
    increases = []
    for average in np.linspace(2.0, 16.0, 29):
        document = budget(float(average), by).choose(weights(), artifact())
        assert mean_bits(choices_of(document)) <= average
        increases.append(document["predicted_increase"])
    assert {choice for _, choice in choices_of(document)} == {"bf16"}
    if by == "sensitivity":
        assert increases == sorted(increases, reverse=True)


def test_a_trace_that_may_be_negative_takes_the_smallest_known_trace():
    last, *_, first = reversed(SHAPES)
    traces = resolved_traces(artifact(unresolved=[last]))
    assert traces[last] == artifact().traces[first] == min(traces.values())


def test_without_traces_nothing_is_predicted():
    document = budget(3.0, "error").choose(weights())
    assert document["predicted_increase"] is None
    assert all(entry["trace"] is None for entry in document["layers"].values())


@pytest.mark.parametrize("average", [4.0, 5.5, 9.1])
def test_an_embedding_takes_its_share_of_the_budget(average):
    linears, size = sum(map(math.prod, SHAPES.values())), 300
    options = {"by": "error", "methods": METHODS, "layers": budget(2.2).layers}
    whole = Budget(average=average, embedding=(size, Fraction(8.5) * size), **options)
    document = whole.choose(weights())
    rest = (Fraction(str(average)) * (linears + size) - Fraction(8.5) * size) / linears
    without = Budget(average=float(rest), **options).choose(weights())
    assert choices_of(document) == choices_of(without)
    total = mean_bits(choices_of(document)) * linears + Fraction(8.5) * size
    assert document["mean_bits"] == pytest.approx(float(total / (linears + size)))
    with pytest.raises(InputError, match="for all linears with its scales and for the embedding"):
        Budget(average=3.0, embedding=(size, Fraction(8.5) * size), **options)


def test_a_budget_below_the_fewest_bits_is_refused():
    ternary = {"ternary": METHODS["ternary"], "bf16": None}
    assert budget(2.6, methods=ternary).choose(weights(), artifact())["mean_bits"] <= 2.6
    with pytest.raises(InputError, match=r"at least 2\.6000, which is what ternary needs"):
        budget(2.5999, methods=ternary)
    layers = {"q": Layer(size=160, group=160)}
    assert Budget(average=1.7, by="error", methods=ternary, layers=layers)  # 1.6 + 16/160
