"""Test components by their names, and the errors where torchtune cannot be imported."""

import sys

import pytest
from omegaconf import OmegaConf

import hestia_tune.models
from hestia_tune import components
from hestia_tune.components import find_component, has_torchtune, instantiate, make
from hestia_tune.errors import InputError

INSTALL = "pip install 'hestia-tune.torchtune.'"


@pytest.fixture
def fresh_torchtune(monkeypatch):
    """An environment where torchtune is not imported yet."""

    def loaded():
        parts = ("torchtune.", "hestia_tune.torchtune.")
        return [name for name in sys.modules if f"{name}.".startswith(parts)]

    for name in loaded():
        if name != "hestia_tune.torchtune":
            monkeypatch.delitem(sys.modules, name)
    components.has_torchtune.cache_clear()
    yield
    components.has_torchtune.cache_clear()
    for name in loaded():  # monkeypatch puts the former ones back
        if name != "hestia_tune.torchtune":
            del sys.modules[name]


@pytest.fixture
def no_torchtune(fresh_torchtune, monkeypatch):
    """An environment whose torchtune cannot be imported."""
    monkeypatch.setitem(sys.modules, "torchtune", None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "part: '' is no dotted name"),
        ("torch..nn", "part: 'torch..nn' is no dotted name"),
        (".nn", "part: '.nn' is no dotted name"),
        ("nothing.at.all", "part: there is no nothing.at.all: No module named 'nothing'"),
        ("torch.nn.Nothing", "part: there is no torch.nn.Nothing"),
        ("torch.nn.Linear.nothing", "part: there is no torch.nn.Linear.nothing"),
        ("torchtune.nothing", "part: there is no torchtune.nothing: No module"),
    ],
)
def test_names_that_lead_nowhere(name, message):
    with pytest.raises(InputError) as caught:
        find_component(name, "part")
    assert str(caught.value).startswith(message)


def test_a_component_beside_the_config(tmp_path, monkeypatch):
    (tmp_path / "own_part.py").write_text("def build(size): return [size]\n")
    (tmp_path / "bad_part.py").write_text("1 / 0\n")
    (tmp_path / "poor_part.py").write_text("import not_installed\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert instantiate({"_component_": "own_part.build", "size": 3}, "part") == [3]
    with pytest.raises(InputError, match="part: bad_part cannot be imported: division by zero"):
        find_component("bad_part.build", "part")
    with pytest.raises(InputError, match="part: poor_part cannot be imported: .*not_installed"):
        find_component("poor_part.build", "part")


def test_a_component_gets_copies_and_the_callers_options_win():
    section = {"_component_": "builtins.dict", "sizes": [1, [2]], "both": 1}
    made = make(section, both=2)
    made["sizes"][1].append(3)
    assert made["both"] == 2 and section["sizes"] == [1, [2]]
    made = make(OmegaConf.create({"_component_": "builtins.dict", "a": 1, "b": "${a}"}))
    assert made == {"a": 1, "b": 1} and type(made["b"]) is int


@pytest.mark.parametrize(
    "name",
    ["torchtune.models.llama3_2.llama3_2_1b", "torchtune.training.metric_logging.DiskLogger"],
)
def test_a_component_of_torchtune_says_what_to_install(no_torchtune, name):
    assert not has_torchtune()
    with pytest.raises(InputError, match=f"^part: {name} needs torchtune .*{INSTALL}"):
        find_component(name, "part")
    with pytest.raises(InputError, match=f"^part: {name} needs torchtune .*{INSTALL}"):
        instantiate({"_component_": name}, "part")


@pytest.mark.parametrize("name", ["llama", "PackedWeights"])
def test_our_components_for_torchtune_say_what_to_install(no_torchtune, name):
    message = f"hestia_tune.models.{name} needs torchtune and torchao 0.15; run {INSTALL}"
    with pytest.raises(InputError, match=message):
        getattr(hestia_tune.models, name)
    with pytest.raises(InputError, match=f"^model: {message}"):
        instantiate({"_component_": f"hestia_tune.models.{name}"}, "model")


def test_another_torchao_is_named_too(fresh_torchtune, monkeypatch):
    """torchtune is installed, but imports what its torchao lacks."""
    monkeypatch.delattr("torchao.quantization.qat.linear.disable_4w_fake_quant")
    assert not has_torchtune()
    with pytest.raises(InputError, match=f"part: torchtune.training.* torchao 0.15; run {INSTALL}"):
        find_component("torchtune.training.FullModelHFCheckpointer", "part")


def test_the_loss_of_every_config_has_an_equal_without_torchtune(no_torchtune):
    name = "torchtune.modules.loss.CEWithChunkedOutputLoss"
    loss = instantiate({"_component_": name, "num_output_chunks": 3}, "loss")
    assert type(loss).__module__ == "hestia_tune.losses" and loss.num_output_chunks == 3


def test_with_torchtune_its_own_loss_is_used():
    name = "torchtune.modules.loss.CEWithChunkedOutputLoss"
    assert has_torchtune()
    assert find_component(name, "loss").__module__.startswith("torchtune.")


def test_a_name_that_models_does_not_have():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hestia_tune.models.nothing
