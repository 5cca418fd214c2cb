"""Test that every option of every YAML section refuses wrong values with a clear error."""

import dataclasses
import math
import re
import sys

import pytest
from omegaconf import OmegaConf

from hestia_tune.config import (
    ConvertConfig,
    DistillationConfig,
    EstimationConfig,
    EvalConfig,
    GeneratedConfig,
    ReconstructionConfig,
    ScheduleConfig,
    TextConfig,
)
from hestia_tune.config.run_config import RunConfig, load_config, overridden
from hestia_tune.config.section import describe
from hestia_tune.errors import InputError, InputErrors

GIVEN = {  # fields that must be given
    TextConfig: {"source": "text.txt"},
    GeneratedConfig: {"num_sequences": 10, "seq_len": 16, "cache_dir": "generated"},
}


def test_a_component_beside_the_config_may_have_no_temperature(tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text("class Plain:\n    has_temperature = False\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    given = OmegaConf.merge(load_config("demo"), {"quantizer": {"_component_": "beside.Plain"}})
    del given["schedule"]
    config = RunConfig.parse(given)
    assert (config.schedule.tau_init, config.schedule.rho) == (0.0, 0.0)
    given.schedule = {"tau_init": 0.3}
    with pytest.raises(InputError, match=r"tau_init=0.3 is read by methods with a temperature"):
        RunConfig.parse(given)


def of_type(names, values):
    """Return rows of values with a wrong type, which OmegaConf refuses."""
    return [(name, value, TypeError, None) for name in names for value in values]


def in_range(rule, names, values):
    """Return rows of values with the right type that are out of range."""
    return [(name, value, ValueError, rule) for name in names for value in values]


STRINGS, COUNTS, OPTIONAL_COUNTS = (
    ([1], None, False),
    (2.5, "many", None, True, [2]),
    (2.5, "many", True),
)
WRONG = {
    ScheduleConfig: [
        *of_type(("rho", "alpha", "hard_fraction"), ("much", None, True)),
        *in_range(r"in \[0, 0.9\]", ("hard_fraction",), (-0.1, 0.95, math.nan)),
        *of_type(("tau_init",), (None, True, [0.3])),
        *in_range("a number or one of auto", ("tau_init",), ("hot", "0.3")),
        *in_range(r"in \[0, 1\]", ("rho",), (-0.1, 1.1, math.nan, math.inf)),
        *in_range(r"in \[0, 100\]", ("tau_init",), (-0.3, -1, 101, math.nan, math.inf)),
        *in_range(r"in \[-4, 4\]", ("alpha",), (-4.5, 4.5, math.nan)),
    ],
    DistillationConfig: [
        *of_type(("weight",), ("much", None, True)),
        *of_type(("loss", "teacher"), STRINGS),
        *in_range(r"in \[0, 1\]", ("weight",), (-0.1, 1.1, math.nan)),
        *in_range("one of kl, kl_reverse, mixed", ("loss",), ("jsd", "KL")),
    ],
    GeneratedConfig: [
        *of_type(("num_sequences", "seq_len", "seed"), COUNTS),
        *of_type(("epochs", "batch_size"), OPTIONAL_COUNTS),
        *in_range("at least 1", ("num_sequences", "epochs", "batch_size"), (0, -1)),
        *of_type(("chats", "packed"), ("maybe", None)),
        *of_type(("chat_template_kwargs",), ("thinking", ["thinking"])),
        *in_range("at least 8", ("seq_len",), (7,)),
        *in_range("in ", ("seed",), (-1, 2**63)),
        *of_type(("temperature",), ("hot", None)),
        *in_range(r"in \[0.01, 100\]", ("temperature",), (0, 101)),
        *of_type(("cache_dir",), STRINGS),
    ],
    ReconstructionConfig: [
        *of_type(("num_samples", "batch_size", "epochs", "window"), COUNTS),
        *in_range("at least 1", ("num_samples", "batch_size", "epochs", "window"), (0, -1)),
        *of_type(("lr", "parameter_lr", "norm_lr", "kl_rate"), ("much", None, True)),
        *in_range(r"in \[0, 1\]", ("lr", "parameter_lr", "norm_lr"), (-0.1, 1.1, math.nan)),
        *of_type(("kl_blocks", "kl_epochs"), COUNTS),
        *in_range("at least 0", ("kl_blocks",), (-1,)),
        *in_range("at least 1", ("kl_epochs",), (0,)),
        *in_range(r"in \[1e-06, 10\]", ("kl_rate",), (0, 11)),
        *of_type(("tau_init",), ("hot", None)),
        *in_range(r"in \[0, 100\]", ("tau_init",), (-0.3, 101)),
        *of_type(("output",), ([1],)),
        *of_type(("overwrite",), ("maybe", None)),
    ],
    EstimationConfig: [
        *of_type(("curvature",), STRINGS),
        *in_range("one of hessian, fisher", ("curvature",), ("hutchinson", "Hessian")),
        *of_type(("num_samples", "batch_size", "num_probes"), COUNTS),
        *of_type(("rank",), OPTIONAL_COUNTS),
        *in_range("at least 1", ("batch_size",), (0, -1)),
        *in_range(r"in \[1, 1e\+06\]", ("num_samples",), (0, -1, 10**8)),
        *in_range("at least 2", ("num_probes",), (1,)),
        *in_range("at least 0", ("rank",), (-1,)),
        *of_type(("overwrite",), ("maybe", None, [True])),
        *of_type(("target_standard_error", "kappa"), ("x", None, True)),
        *in_range(r"in \[", ("target_standard_error",), (0, 0.6, math.nan)),
        *in_range(r"in \[0, 1000\]", ("kappa",), (-0.1, 1001, math.inf, math.nan)),
        *of_type(("output",), (["a"], {"a": 1})),
    ],
    ConvertConfig: [
        *of_type(("formats",), ("gguf",)),
        *in_range("one of torchao, intx, huggingface", ("formats",), (["onyx"], ["gguf", "ggml"])),
        *in_range("one of float32, int8", ("onnx_head",), ("int4",)),
        *of_type(("source",), STRINGS),
        *of_type(("onnx_head",), ([1],)),
        *of_type(("block_type",), (3, None)),
        *in_range(
            "one of auto, Q4_0, Q2_0, TQ2_0, TQ1_0", ("block_type",), ("Q8_0", ["Q4_0", "Q8_0"])
        ),
        *of_type(("output",), ([1],)),
        *of_type(("overwrite",), ("maybe", None)),
    ],
    TextConfig: [
        *of_type(("source", "column", "split"), STRINGS),
        *of_type(("name", "join"), ([1],)),
        *of_type(("window", "stride", "max_tokens"), OPTIONAL_COUNTS),
        *in_range("at least 1", ("window", "stride", "max_tokens"), (0,)),
    ],
    EvalConfig: [
        *of_type(("models", "tasks"), ("trained", 3, None)),
        *of_type(("include_path", "output"), ([1],)),
        *of_type(("limit",), ("x", True)),
        *in_range("at least 1e-06", ("limit",), (0, -1, -0.5)),
        *of_type(("every_n_steps",), OPTIONAL_COUNTS),
        *in_range("at least 1", ("batch_size", "every_n_steps"), (0,)),
        *of_type(("batch_size",), (None, 1.5)),
        *in_range("a number or one of auto", ("batch_size",), ("fast",)),
        *of_type(("perplexity",), (3, "text.txt", None)),
    ],
}
TABLE = [(section, *row) for section, rows in WRONG.items() for row in rows]


def given(section, **options):
    return GIVEN.get(section, {}) | options


@pytest.mark.parametrize("from_yaml", [False, True])
@pytest.mark.parametrize(
    ("section", "name", "value", "error", "rule"),
    TABLE,
    ids=[f"{section.section}.{name}={value!r}" for section, name, value, *_ in TABLE],
)
def test_wrong_values_name_the_option_the_rule_and_the_value(
    section, name, value, error, rule, from_yaml
):
    said = "(: | must be (a |true))" if rule is None else f" must be {rule}"
    with pytest.raises(error, match=rf"^{section.section}\.{name}{said}") as caught:
        if from_yaml:
            section.parse(given(section, **{name: value}))
        else:
            section(**given(section, **{name: value}))
    message = str(caught.value)
    assert "\n" not in message
    if rule is not None:
        stray = value[-1] if isinstance(value, list) else value
        shown = re.search(r"got (.*?)(;|$)", message)[1]
        assert shown in (str(stray), repr(stray)) or float(shown) == stray or shown == "nan"


def test_every_option_has_a_wrong_value():
    for section, rows in WRONG.items():
        assert {f.name for f in dataclasses.fields(section)} == {name for name, *_ in rows}


@pytest.mark.parametrize(
    ("section", "options", "message"),
    [
        (
            EstimationConfig,
            {"curvature": "fisher", "rank": 10},
            "rank is the sketch of Hutch",
        ),
        (ConvertConfig, {"formats": []}, "convert.formats must name at least one"),
        (ConvertConfig, {"block_type": []}, "convert.block_type must name at least one"),
        (ConvertConfig, {"block_type": ["auto", "Q4_0"]}, "or leave auto out of the list"),
        (EvalConfig, {"models": []}, "eval.models must name at least one model"),
        (ConvertConfig, {"format": ["gguf"]}, "unknown key convert.format; did you mean formats"),
        (ReconstructionConfig, {"num_samples": 4}, "num_samples 4 must be at least batch_size 8"),
        (ScheduleConfig, {"rho": 0.6, "hard_fraction": 0.5}, "rho . hard_fraction must be at most"),
        (TextConfig, {"window": 8, "stride": 9}, "stride 9 must not be above window 8"),
        (EvalConfig, {"perplexity": {"a": {}}}, "^eval.perplexity.a.source must be given"),
        (
            EvalConfig,
            {"perplexity": {"a": {"sourc": "x"}}},
            r"key eval.perplexity.a.sourc; did you",
        ),
        (
            EvalConfig,
            {"perplexity": {"a": {"source": "x", "window": 0}}},
            "window must be at least",
        ),
    ],
)
def test_options_that_contradict_each_other_or_are_unknown(section, options, message):
    with pytest.raises(ValueError, match=message):
        section.parse(given(section, **options))


@pytest.mark.parametrize("section", WRONG)
@pytest.mark.parametrize("value", [3, "text", [1]])
def test_a_section_is_a_mapping(section, value):
    with pytest.raises(TypeError, match=f"{section.section} must be a mapping of options; got"):
        section.parse(value)


def test_a_text_is_a_mapping():
    with pytest.raises(TypeError, match="^eval.perplexity.a must be a mapping of options; got 3"):
        EvalConfig.parse({"perplexity": {"a": 3}})
    with pytest.raises(InputError, match="^eval.perplexity.a.source must be given"):
        EvalConfig.parse({"perplexity": {"a": None}})


def test_all_wrong_options_are_reported_together():
    wrong = ["batch_size=four", "schedule.roh=1", "schedule.alpha=9", "eval.limit=x", "devise=cpu"]
    with pytest.raises(InputErrors) as caught:
        RunConfig.parse(overridden(load_config("demo"), [*wrong, "tensor_parallel_dim=2"]))
    starts = ("tensor_parallel_dim=2", "unknown key devise; did", "unknown key schedule.roh")
    starts += ("schedule.alpha must be", "eval.limit must be a", "batch_size must be a whole")
    lines = str(caught.value).splitlines()
    assert len(lines) == len(starts)
    assert all(any(line.startswith(start) for line in lines) for start in starts)


def test_the_defaults_are_the_papers_values():
    config = EstimationConfig()
    assert (config.curvature, config.num_samples, config.num_probes) == ("hessian", 50, 20)
    assert (config.kappa, config.target_standard_error, config.rank) == (1.0, 0.01, None)
    assert ScheduleConfig() == ScheduleConfig(rho=0.2, tau_init=0.3, alpha=0.4)


BOUNDARIES = [
    (ScheduleConfig, {"rho": 0.0, "tau_init": 0, "alpha": -4.0}),
    (ScheduleConfig, {"rho": 1.0, "tau_init": "auto", "alpha": 4.0}),
    (EstimationConfig, {"num_probes": 2, "rank": 0}),
    (EstimationConfig, {"kappa": 0, "curvature": "fisher"}),
    (EstimationConfig, {"output": "a", "overwrite": True, "target_standard_error": 0.5}),
    (ConvertConfig, {"formats": ["gguf", "torchao"], "block_type": ["Q4_0", "TQ1_0"]}),
    (ConvertConfig, {"block_type": "TQ2_0"}),
    (TextConfig, {"window": 8, "stride": 8, "max_tokens": 1, "join": "\n"}),
    (EvalConfig, {"limit": 0.5, "batch_size": 1, "models": ["a", "b"]}),
    (EvalConfig, {"limit": 1, "batch_size": "auto", "tasks": ["piqa"]}),
    (ReconstructionConfig, {"num_samples": 1, "batch_size": 1, "tau_init": 0}),
    (GeneratedConfig, {"temperature": 0.01, "seed": 2**63 - 1, "epochs": None}),
]


@pytest.mark.parametrize(("section", "options"), BOUNDARIES)
def test_boundaries_are_allowed_and_frozen(section, options):
    config = section(**given(section, **options))
    assert all(getattr(config, name) == value for name, value in options.items())
    assert section.parse(given(section, **options)) == config
    assert section.parse(OmegaConf.create(given(section, **options))) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, next(iter(options)), None)


@pytest.mark.parametrize("section", [section for section in WRONG if section not in GIVEN])
def test_an_empty_section_has_the_defaults(section):
    assert section.parse(None) == section.parse({}) == section()


def test_values_are_converted_to_their_type():
    """YAML reads 1e-3 as a string, and 1 as an int even if the option is a float."""
    options = {"kappa": 2, "target_standard_error": "1e-3", "num_probes": "7"}
    config = EstimationConfig.parse(options)
    assert (config.target_standard_error, config.num_probes) == (1e-3, 7)
    assert isinstance(config.kappa, float) and isinstance(EstimationConfig(kappa=2).kappa, float)


def test_interpolations_are_resolved_and_texts_become_objects():
    whole = OmegaConf.create(
        {"folder": "data", "eval": {"perplexity": {"held": {"source": "${folder}/a.txt"}}}}
    )
    parsed = EvalConfig.parse(whole.eval)
    assert parsed.perplexity == {"held": TextConfig(source="data/a.txt")}
    assert EvalConfig(perplexity=parsed.perplexity) == parsed


def test_a_configured_logger_gets_no_options_of_the_default_logger():
    logger = {"_component_": "torchtune.training.metric_logging.StdoutLogger"}
    config = OmegaConf.merge(load_config("demo"), {"metric_logger": logger})
    assert RunConfig.parse(config).metric_logger == logger
    assert RunConfig.parse(load_config("demo")).metric_logger["log_dir"] == "./runs/demo/logs"


def test_null_in_place_of_a_section_gives_its_defaults():
    nulls = overridden(load_config("demo"), ["distillation=null", "dataset_val=null"])
    config = RunConfig.parse(nulls)
    assert config.distillation == DistillationConfig() and config.dataset_val is None


def wrong_values() -> list[tuple[str, str]]:
    """Return (key, value) of at least two wrong values of every option with a type."""
    found = []
    for key, kind, *_ in describe(RunConfig):
        values = ["[1]", "{a: 1}"]
        if kind == "bool":
            values = ["abc", "5", "[1]", "null"]
        elif kind.startswith(("int", "float")):
            values = ["abc", "[1]", "{a: 1}", "-1e9", "nan"]
        elif kind.startswith("list"):
            values = ["abc", "{a: 1}", "[[1]]"]
        elif kind.startswith("dict"):
            values = ["abc", "[1]"]
        elif kind == "Any":
            values = [] if key == "clip_grad_norm" else ["5", "[]"]
        found += [(key, value) for value in values]
    return found


@pytest.mark.parametrize(("key", "value"), wrong_values())
def test_wrong_values_of_every_option_are_one_line_that_names_the_option(key, value):
    with pytest.raises(InputError) as caught:
        RunConfig.parse(overridden(load_config("demo"), [f"{key}={value}"]))
    assert "\n" not in str(caught.value)
    section, _, name = key.rpartition(".")
    assert name in str(caught.value) or section in str(caught.value)


def test_there_are_enough_wrong_values():
    assert len(wrong_values()) > 300
