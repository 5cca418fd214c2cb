"""Tests what is compared: the limits of a model, its small model, the texts, and the errors."""

import logging

import pytest
import torch
from families import make_family

from hestia_tune.errors import InputError
from hestia_tune.export import logits as comparing
from hestia_tune.export.logits import compare, expected_logits
from hestia_tune.models.decoder import load_hard
from hestia_tune.models.folder import ModelFolder, SafetensorsFolder
from hestia_tune.models.small import Limits, full_config, limits_of, small_config

transformers = pytest.importorskip("transformers")
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 2048}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def config(name, **values):
    return getattr(transformers, name)(**values).to_dict()


@pytest.mark.parametrize(
    ("name", "values", "limits"),
    [
        ("LlamaConfig", {}, Limits()),
        ("MistralConfig", {"max_position_embeddings": 32768}, Limits(window=4096)),
        ("MistralConfig", {"sliding_window": None}, Limits()),
        ("MistralConfig", {"max_position_embeddings": 4096}, Limits()),  # no text reaches it
        ("Qwen2Config", {"sliding_window": 512}, Limits()),  # use_sliding_window is False
        ("Qwen2Config", {"sliding_window": 512, "use_sliding_window": True}, Limits(window=512)),
        ("Gemma3TextConfig", {"sliding_window": 512}, Limits(window=512)),
        ("LlamaConfig", {"rope_parameters": LLAMA3}, Limits(context=8192)),
        ("Qwen3Config", {"rope_parameters": YARN}, Limits(context=2048)),
        ("LlamaConfig", {"rope_parameters": DYNAMIC}, Limits(context=2048)),
        ("LlamaConfig", {"rope_parameters": DYNAMIC | {"rope_type": "linear"}}, Limits()),
    ],
)
def test_limits(name, values, limits):
    values = {"num_hidden_layers": 32} | values
    assert limits_of(config(name, **values)) == limits


def test_a_small_model_keeps_the_kinds_of_layers_and_the_ratios():
    large = config("Gemma3TextConfig", num_hidden_layers=26, hidden_size=1152, head_dim=256)
    small = small_config(large)
    assert small["layer_types"] == large["layer_types"][:6] and small["num_hidden_layers"] == 6
    assert small["head_dim"] == 256 and limits_of(small) == Limits(window=16)
    assert small["hidden_size"] == 4 * 256 and small["vocab_size"] == 512
    values = {"num_hidden_layers": 28, "max_window_layers": 21, "sliding_window": 4096}
    large = config("Qwen2Config", use_sliding_window=True, **values)
    small = small_config(large)
    assert small["layer_types"] == ["full_attention", "sliding_attention"]
    assert small["max_window_layers"] == 1
    sizes = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8}
    long = {"max_position_embeddings": 131072}
    small = small_config(config("LlamaConfig", rope_parameters=LLAMA3, **sizes, **long))
    assert limits_of(small) == Limits(context=256)
    assert small["max_position_embeddings"] == 4096  # 16 times the original context, as before
    assert (small["num_attention_heads"], small["num_key_value_heads"]) == (4, 2)
    assert small["hidden_size"] == 4 * 64
    aperiodic = ["full_attention"] + ["sliding_attention"] * 8
    values = {"num_hidden_layers": 9, "layer_types": aperiodic}
    assert small_config(config("Gemma3TextConfig", **values))["num_hidden_layers"] == 9


def test_texts_end_behind_the_limits_if_this_can_be_afforded():
    def lengths(limits, vocabulary, parameters):
        texts, reaches = comparing.texts_of(limits, vocabulary, parameters)
        return [([p.shape[1] for p in t.parts], t.skip) for t in texts], reaches

    short = ([9, 1, 1], 0)
    assert lengths(Limits(), 1000, 10**10) == ([short], True)
    assert lengths(Limits(window=16), 512, 10**6) == ([short, ([62, 1, 1], 0)], True)
    # Logits of 262,144 tokens are compared at the last 256 positions only.
    expected = [short, ([304, 254, 1, 1], 1)]
    assert lengths(Limits(window=512), 262144, 27 * 10**7) == (expected, True)
    assert lengths(Limits(window=512), 262144, 4 * 10**9) == ([short], False)
    assert lengths(Limits(window=64, context=8192), 512, 10**6) == ([short], False)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    values = {"sliding_window": 24, "max_position_embeddings": 256}
    folder = make_family(tmp_path_factory.mktemp("model") / "m", "Mistral", **values)
    names = [n for n in SafetensorsFolder(folder).shapes if n.endswith("_proj.weight")]
    return ModelFolder(folder, dict.fromkeys(names, 32), quantize=True)


def runner(source, change):
    """Return a runtime that computes as transformers does, with a changed config."""

    def run(texts):
        model = load_hard(source, torch.float32)
        change(model)
        return [expected_logits(model, text) for text in texts]

    return run


def test_a_runtime_that_ignores_the_window_is_found_behind_it(source):
    def ignore(model):
        model.config.sliding_window = model.model.config.sliding_window = None

    compare(source, runner(source, lambda model: None), 1e-6, "a rule", "a remedy")
    match = r"a rule; their relative difference is .* at most 1e-06 behind the window of 24 tokens"
    with pytest.raises(InputError, match=match):
        compare(source, runner(source, ignore), 1e-6, "a rule", "a remedy")


def test_errors_of_a_runtime_and_differences_everywhere(source):
    def scale(model):
        model.lm_head.weight.data *= 1.01

    with pytest.raises(
        InputError, match=r"difference is 0\.01 instead of at most 0\.001; a remedy"
    ):
        compare(source, runner(source, scale), 1e-3, "a rule", "a remedy")
    with pytest.raises(InputError, match="a rule; it raises: division by zero; a remedy"):
        compare(source, lambda texts: 1 / 0, 1e-3, "a rule", "a remedy")


def test_a_text_that_takes_minutes_is_left_out_and_named(source, monkeypatch, caplog):
    monkeypatch.setattr(comparing, "_BUDGET", 10)
    with caplog.at_level(logging.INFO):
        compare(source, runner(source, lambda model: None), 1e-6, "a rule", "a remedy")
    assert (
        "compared on 11 tokens, because a text behind the window of 24 tokens takes" in caplog.text
    )


def test_the_random_state_and_the_terminal_are_left_alone(source, capsys):
    def write(small, target):
        found.append(limits_of(full_config(small.folder)))
        raise InputError(f"a rule; behind the {found[0]}; export to another format")

    found = []
    before = torch.get_rng_state()
    match = "a rule; behind the window of 24 tokens; measured on a small random model with the "
    match += "sliding_window 24 of config.json; leave x out of convert.formats"
    for _ in range(2):  # the second time from memory
        with pytest.raises(InputError, match=match):
            comparing.check_small("x", source, write)
    assert found == [Limits(window=16)]
    assert torch.equal(torch.get_rng_state(), before)
    assert capsys.readouterr() == ("", "")


def test_a_config_that_no_small_model_can_have_is_not_refused(source, monkeypatch):
    def fail(*_):
        raise ValueError("sizes that do not fit")

    monkeypatch.setattr(comparing, "make_small", fail)
    comparing.check_small("x", source, lambda small, target: 1 / 0)
