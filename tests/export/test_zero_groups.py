"""Tests that groups of zeros stay zeros in every format, for codes of two and four levels."""

import pytest
import torch
from gguf_models import DEMO, assert_same, expected_tensors, is_linear, read_stock, ternarize
from safetensors.torch import load_file, save_file

from hestia_tune.export.compressed_tensors import write_compressed_tensors
from hestia_tune.export.gguf import write_gguf
from hestia_tune.export.huggingface import write_huggingface
from hestia_tune.export.onnx import write_onnx
from hestia_tune.export.torchao import packed_entries
from hestia_tune.methods import EvenMethod
from hestia_tune.models.folder import ModelFolder
from hestia_tune.tensors.packed_tensor import as_dense


@pytest.fixture(params=["binary", "int2"])
def hard(request, tmp_path):
    """Return a hard folder with a group of zeros in every linear of the demo, and its source."""
    method = EvenMethod(codebook=request.param)
    quantized = ternarize(DEMO, tmp_path / "latent", 128)
    state = load_file(DEMO / "model.safetensors")
    for name in quantized:
        state[name] = state[name].clone()
        state[name][3, :128] = 0
    save_file(state, tmp_path / "latent" / "model.safetensors", metadata={"format": "pt"})
    latent = ModelFolder(tmp_path / "latent", dict.fromkeys(quantized, method), quantize=True)
    write_huggingface(latent, tmp_path / "hard")
    return tmp_path / "hard", ModelFolder(tmp_path / "hard", dict.fromkeys(quantized, method))


def test_dense_packed_and_gguf_hold_the_zeros(hard, tmp_path):
    folder, source = hard
    state = load_file(folder / "model.safetensors")
    for name in filter(is_linear, state):
        assert not state[name][3, :128].any() and (state[name] == 0).sum() == 128
    entries = packed_entries(state.items(), source.quantized)
    assert all(torch.equal(as_dense(stored), state[name]) for name, stored in entries)
    for types in (
        "Q4_0",
        ["Q2_0", "Q4_0"],
    ):  # the first type that holds the groups and the levels is taken
        path = tmp_path / f"{types[0]}.gguf"
        write_gguf(source, path, block_type=types)
        if types == "Q4_0":  # the gguf package can read it
            assert_same(read_stock(path), expected_tensors(folder))


def test_compressed_tensors_hold_the_zeros(hard, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    folder, source = hard
    write_compressed_tensors(source, tmp_path / "out")  # this unpacks and compares every weight
    tokens = torch.arange(2, 42)[None]
    dense, packed = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
        for path, options in (
            (folder, {}),
            (tmp_path / "out", {"quantization_config": dequantized(transformers)}),
        )
    )
    with torch.no_grad():
        assert torch.equal(dense(tokens).logits, packed(tokens).logits)


def dequantized(transformers):
    return transformers.CompressedTensorsConfig(dequantize=True)


@pytest.mark.parametrize("hard", ["binary"], indirect=True)
def test_onnx_holds_the_zeros(hard, tmp_path):
    pytest.importorskip("onnxruntime_genai")
    from test_onnx import expected_logits, logits

    folder, source = hard
    write_onnx(source, tmp_path / "out", activation_bits=32)  # this compares every code
    found, expected = logits(tmp_path / "out"), expected_logits(folder)
    assert (found - expected).norm() < 1e-5 * expected.norm()
