"""Tests codes -1 to 2 with signed scales in every format of two bits, each by its own program."""

import logging
import re

import pytest
import torch
from gguf_models import DEMO, naive
from readers import genai_logits, mlx_logits, openvino_session, transformers_logits

from hestia_tune.export import gguf
from hestia_tune.export.compressed_tensors import write_compressed_tensors
from hestia_tune.export.huggingface import write_huggingface
from hestia_tune.export.mlx import write_mlx
from hestia_tune.export.onnx import write_onnx
from hestia_tune.export.openvino import write_openvino
from hestia_tune.export.torchao import packed_entries
from hestia_tune.methods.groups import TWO_BIT, find_codes
from hestia_tune.models.contents import contents_table, read_gguf
from hestia_tune.models.folder import ModelFolder, SafetensorsFolder
from hestia_tune.tensors.packed_tensor import as_dense

TOKENS = torch.arange(2, 42)[None]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The hard model, and its logits (tokens, vocabulary) in transformers."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("two_bit") / "hard"
    latent = naive(DEMO, 128, "two_bit")
    write_huggingface(latent, folder)
    source = ModelFolder(folder, latent.quantized)
    for name in source.quantized:
        packed = source.pack(name, source.read_hard(name))
        assert set(packed.codes().unique().tolist()) == {*TWO_BIT}
        assert (packed.scale < 0).any() and (packed.scale > 0).any()
        assert find_codes(source.read(name))[0] == TWO_BIT
    return source, transformers_logits(folder, TOKENS)[0]


def assert_near(found, expected, limit=1e-5):
    assert (found - expected).norm() < limit * expected.norm()


@pytest.mark.parametrize(("packed_format", "bits"), [(None, 2), ("intx", 8)])
def test_torchao(model, packed_format, bits):
    source, _ = model
    weights = ((name, source.read_hard(name)) for name in source.shapes)
    for name, stored in packed_entries(weights, source.quantized, packed_format):
        assert torch.equal(as_dense(stored), source.read_hard(name))
        if name in source.quantized:
            assert 8 * stored.qdata.nbytes == bits * stored.numel()


def test_gguf_in_llama_cpp(model, tmp_path, caplog):
    """llama.cpp computes the file's logits, but for its 8-bit activations."""
    pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp")
    source, _ = model
    assert {kind.name for kind in gguf.block_types(source, "auto").values()} == {"Q2_0"}
    with caplog.at_level(logging.INFO):
        gguf.write_gguf(source, tmp_path / "model.gguf", verify=True)
    (text,) = [message for message in caplog.messages if "tokens" in message]
    shares = [float(share) for share in re.findall(r"([\d.]+)%", text)]
    assert shares and max(shares) < 5, text
    with pytest.raises(ValueError, match=r"no block of TQ2_0 holds .* codes -1 to 2\)"):
        gguf.write_gguf(source, tmp_path / "other.gguf", block_type="TQ2_0")


def test_a_gguf_file_is_inspected(model, tmp_path):
    """Q2_0 is read, though the package gguf may not know the type."""
    pytest.importorskip("gguf")
    source, _ = model
    gguf.write_gguf(source, tmp_path / "model.gguf", block_type="Q2_0")
    found = read_gguf(tmp_path / "model.gguf")
    name = next(name for name in source.quantized if name.endswith("layers.1.mlp.up_proj.weight"))
    tensor = found["blk.1.ffn_up.weight"]
    assert tensor.stored == "Q2_0" and tensor.nbytes * 8 == 2.25 * source.read(name).numel()
    assert torch.equal(tensor.dequantize(), source.read_hard(name).float())
    assert (
        contents_table(tmp_path / "model.gguf")
        .splitlines()[-1]
        .startswith(f"{len(source.quantized)} linears: four levels in groups of 128")
    )


def test_compressed_tensors(model, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    source, expected = model
    summary = write_compressed_tensors(source, tmp_path / "out")
    assert summary["quantized_bits_per_weight"] < 2.2
    assert SafetensorsFolder(tmp_path / "out").shapes  # the codes are in a file
    options = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    packed = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, **options
    )
    with torch.no_grad():
        assert torch.equal(packed(TOKENS).logits[0], expected)


def test_mlx(model, tmp_path):
    pytest.importorskip("mlx_lm.utils")
    source, expected = model
    summary = write_mlx(source, tmp_path / "out")
    assert summary["quantized_bits_per_weight"] == 2.25
    assert_near(mlx_logits(tmp_path / "out", TOKENS)[0], expected)


@pytest.mark.parametrize(("bits", "limit"), [(32, 1e-5), (8, 0.1)])
def test_onnx(model, tmp_path, bits, limit):
    pytest.importorskip("onnxruntime_genai")
    source, expected = model
    write_onnx(source, tmp_path / "out", activation_bits=bits)
    assert_near(genai_logits(tmp_path / "out", TOKENS.tolist()), expected[-1:], limit)


@pytest.mark.parametrize(("size", "limit"), [("0", 1e-4), ("32", 0.1)])
def test_openvino(model, tmp_path, size, limit):
    """With groups of 32, the program rounds activations to 8 bits, as it does by default."""
    pytest.importorskip("openvino_tokenizers")
    source, expected = model
    write_openvino(source, tmp_path / "out")
    run = openvino_session(tmp_path / "out", DYNAMIC_QUANTIZATION_GROUP_SIZE=size)
    assert_near(run(TOKENS, 0, [0])[0], expected, limit)
