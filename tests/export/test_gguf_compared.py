"""Tests how `hestia_convert` compares a GGUF file in llama.cpp with transformers."""

import logging
import shutil

import pytest
from gguf_models import DEMO, edit_json, ternarize
from safetensors.torch import load_file, save_file

from hestia_tune.errors import InputError
from hestia_tune.export import gguf, llama_cpp
from hestia_tune.export.gguf import write_gguf
from hestia_tune.export.logits import compare_gguf
from hestia_tune.models.folder import ModelFolder

BLOCK = "model.layers.1.mlp."


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A ternary model whose rotary embedding is scaled behind 128 tokens, and its file."""
    folder = tmp_path_factory.mktemp("gguf") / "model"
    quantized = ternarize(DEMO, folder, 128)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    edit_json(folder / "config.json", rope_scaling=yarn, max_position_embeddings=512)
    write_gguf(ModelFolder(folder, quantized), folder.with_suffix(".gguf"))
    return folder, quantized


def compare(folder, path, quantized):
    runs = dict.fromkeys(quantized, 32)
    compare_gguf(ModelFolder(folder, quantized), path, runs)


def test_a_file_within_and_behind_its_context(written, caplog):
    pytest.importorskip("xllamacpp")
    folder, quantized = written
    with caplog.at_level(logging.INFO):
        compare(folder, folder.with_suffix(".gguf"), quantized)
    assert "on 11 tokens" in caplog.messages[-1] and "on 176 tokens" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("most", "length", "behind"), [(177, 176, True), (160, 159, True), (128, 127, False)]
)
def test_texts_fit_into_the_context_of_the_model(tmp_path, caplog, most, length, behind):
    """A server of llama.cpp refuses a prompt that fills the context."""
    pytest.importorskip("xllamacpp")
    folder = tmp_path / "model"
    quantized = ternarize(DEMO, folder, 128)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    edit_json(folder / "config.json", rope_scaling=yarn, max_position_embeddings=most)
    write_gguf(ModelFolder(folder, quantized), folder.with_suffix(".gguf"))
    with caplog.at_level(logging.INFO):
        compare(folder, folder.with_suffix(".gguf"), quantized)
    told = "\n".join(caplog.messages)
    assert f"on {length} tokens" in told and ("or not fit" in told) == (not behind)


@pytest.mark.parametrize("change", ["scale", "norm", "rope"])
def test_a_file_that_computes_otherwise(written, tmp_path, change):
    """The file is compared with a model of which one matrix, norm or setting differs."""
    pytest.importorskip("xllamacpp")
    folder, quantized = written
    other = shutil.copytree(folder, tmp_path / "model")
    state = load_file(other / "model.safetensors")
    if change == "rope":
        edit_json(other / "config.json", rope_theta=30.0)
    else:
        name = f"{BLOCK}down_proj.weight" if change == "scale" else "model.norm.weight"
        rows = slice(None) if change == "scale" else slice(0, 32)
        state[name][rows] *= 1.5
        save_file(state, other / "model.safetensors")
    with pytest.raises(InputError, match=r"logits of transformers; their relative difference is"):
        compare(other, folder.with_suffix(".gguf"), quantized)


def test_a_file_that_llama_cpp_does_not_load(written, tmp_path):
    pytest.importorskip("xllamacpp")
    folder, quantized = written
    path = tmp_path / "cut.gguf"
    path.write_bytes(folder.with_suffix(".gguf").read_bytes()[:-4096])
    with pytest.raises(InputError, match=r"llama.cpp must run the file; .*pip install --upgrade"):
        compare(folder, path, quantized)


def test_without_llama_cpp(written, monkeypatch, caplog):
    folder, quantized = written
    monkeypatch.setattr(llama_cpp, "is_installed", lambda: False)
    with caplog.at_level(logging.INFO):
        compare(folder, folder.with_suffix(".gguf"), quantized)
    (message,) = caplog.messages
    assert "was not compared" in message and "`pip install xllamacpp`" in message


def test_a_different_file_is_not_kept(tmp_path, monkeypatch):
    """`write_gguf` compares before the file has its name."""
    quantized = ternarize(DEMO, tmp_path / "model", 128)
    source, path = ModelFolder(tmp_path / "model", quantized), tmp_path / "model.gguf"

    def refuse(source, file, runs):
        assert file.is_file() and set(runs) == set(quantized) and set(runs.values()) == {32}
        raise InputError("other logits")

    monkeypatch.setattr(gguf, "compare_gguf", refuse)
    with pytest.raises(InputError, match="other logits"):
        write_gguf(source, path, verify=True)
    assert not path.exists()
    write_gguf(source, path)
    assert path.is_file()
