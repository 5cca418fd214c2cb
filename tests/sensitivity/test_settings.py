"""Every option of the estimation refuses what it cannot mean, and says which and what it met."""

import dataclasses
import math
import re

import pytest

from hestia_tune.sensitivity import EstimationConfig

WRONG = [
    ("curvature", "hutchinson", ValueError, "one of hessian, fisher"),
    ("curvature", None, ValueError, "one of hessian, fisher"),
    ("curvature", "Hessian", ValueError, "one of hessian, fisher"),
    *((name, 0, ValueError, "at least 1") for name in ("num_samples", "batch_size")),
    *((name, 1, ValueError, "at least 2") for name in ("min_probes", "num_probes")),
    ("vectors_at_once", 0, ValueError, "at least 1"),
    ("rank", -1, ValueError, "at least 0"),
    *(
        (name, value, TypeError, "an int")
        for name in (
            "num_samples",
            "batch_size",
            "min_probes",
            "num_probes",
            "rank",
            "vectors_at_once",
        )
        for value in (2.0, "3", None, True, [2])
    ),
    *(
        (name, value, TypeError, "True or False")
        for name in ("fixed", "overwrite")
        for value in (1, "yes", None)
    ),
    *((name, v, ValueError, r"in \[") for name in ("kappa", "epsilon") for v in (-0.1, math.inf)),
    ("kappa", 1001, ValueError, r"in \[0, 1000\]"),
    ("epsilon", 1.5, ValueError, r"in \[0, 1\]"),
    ("target_standard_error", 0, ValueError, r"in \["),
    ("target_standard_error", 0.6, ValueError, r"in \["),
    *(
        (name, value, TypeError, "a number")
        for name in ("target_standard_error", "kappa", "epsilon")
        for value in ("0.1", None, True)
    ),
    *(
        (name, math.nan, ValueError, r"in \[")
        for name in ("target_standard_error", "kappa", "epsilon")
    ),
    ("seed", -1, ValueError, r"in \["),
    ("seed", 2**63, ValueError, r"in \["),
    ("seed", "7", TypeError, ""),
    ("seed", True, TypeError, ""),
    ("seed", 1.5, TypeError, ""),
    ("output", 5, TypeError, "a path"),
    ("output", ["a"], TypeError, "a path"),
]


@pytest.mark.parametrize(
    ("name", "value", "error", "rule"), WRONG, ids=[f"{n}={v!r}" for n, v, *_ in WRONG]
)
def test_wrong_values_name_the_option_the_rule_and_the_value(name, value, error, rule):
    message = rf"^sensitivity_estimation\.{name} must be {rule}"
    with pytest.raises(error, match=message) as caught:
        EstimationConfig(**{name: value})
    shown = str(value) if error is ValueError else repr(value)
    assert re.search(rf"got {re.escape(shown)}", str(caught.value))


def test_every_option_has_a_wrong_value():
    assert {f.name for f in dataclasses.fields(EstimationConfig)} == {name for name, *_ in WRONG}


def test_options_that_contradict_each_other():
    with pytest.raises(ValueError, match="min_probes 5 must not be above num_probes 4; raise"):
        EstimationConfig(min_probes=5, num_probes=4)
    with pytest.raises(ValueError, match="fixed is Hutch.*use curvature: hessian"):
        EstimationConfig(curvature="fisher", fixed=True)


def test_the_defaults_are_the_papers():
    config = EstimationConfig()
    assert (config.curvature, config.num_samples, config.rank, config.num_probes) == (
        "hessian",
        50,
        10,
        20,
    )
    assert (config.kappa, config.epsilon, config.target_standard_error) == (1.0, 1e-8, 0.01)


@pytest.mark.parametrize(
    "options",
    [
        {"min_probes": 2, "num_probes": 2},
        {"rank": 0, "fixed": True},
        {"seed": 0, "kappa": 0, "epsilon": 0},
        {"seed": 2**63 - 1, "curvature": "fisher"},
        {"output": "a.json", "overwrite": True, "target_standard_error": 0.5},
    ],
)
def test_boundaries_are_allowed(options):
    config = EstimationConfig(**options)
    assert all(getattr(config, name) == value for name, value in options.items())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rank = 3
