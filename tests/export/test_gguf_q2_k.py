"""Tests the block type Q2_K: exact codes, scales rounded as well as they can be, and errors."""

import gguf
import numpy as np
import pytest
import torch
from gguf_models import assert_same, expected_tensors, random_qwen2, read_stock
from safetensors.torch import load_file, save_file

from hestia_tune.errors import InputError
from hestia_tune.export.gguf import write_gguf
from hestia_tune.export.gguf_types import BLOCK_TYPES
from hestia_tune.methods import Method
from hestia_tune.models.folder import ModelFolder
from hestia_tune.tensors import read_hard

KIND = BLOCK_TYPES["Q2_K"]
METHODS = {2: "even, codebook=binary", 3: "ternary", 4: "even, codebook=int2"}


def packed(codes, scales, levels=3) -> torch.Tensor:
    """Return the weights as the gguf package reads them."""
    data = KIND.pack(codes, scales, "layer", levels).reshape(-1)
    found = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.Q2_K)
    return torch.from_numpy(found).view(codes.shape)


@pytest.mark.parametrize("levels", [2, 3, 4])
@pytest.mark.parametrize(("group_size", "rms"), [(16, 0.05), (64, 0.02), (128, 0.01), (256, 0)])
def test_codes_are_exact_and_scales_are_rounded(group_size, rms, levels):
    method = Method.from_key(METHODS[levels] + f", group_size={group_size}")
    torch.manual_seed(0)
    spread = torch.randn(32, 512 // 16, 1).mul(0.2).exp()
    weight = torch.randn(32, 512 // 16, 16).mul(spread).view(32, 512) * 0.02
    weight[3, :256] = 0
    hard = method.hard(weight)
    tensor = read_hard(hard, group_size, levels)
    found = packed(tensor.codes(), tensor.scale, levels)
    assert torch.equal(found.sign(), hard.sign())
    assert (found - hard).norm() <= rms * hard.norm()
    scales = tensor.scale.float().repeat_interleave(group_size, 1)
    nearest = (found / scales.where(scales > 0, 1)).abs()  # 0, 1 or 3, give or take the rounding
    assert ((nearest - tensor.codes().abs() * (scales > 0)).abs() < 0.7).all()


def best_error(first: float, second: float) -> float:
    """Return the least squared error of two scales, by trying every pair of integers."""
    least = np.inf
    for a in range(1, 16):
        for b in range(1, 16):
            d = (first * a + second * b) / (a * a + b * b)
            least = min(least, (d * a - first) ** 2 + (d * b - second) ** 2)
    return least


def test_two_scales_of_a_block_are_rounded_in_the_best_way():
    torch.manual_seed(1)
    scales = torch.rand(40, 2).add(0.5).bfloat16()
    found = packed(torch.ones(40, 256, dtype=torch.int8), scales)[:, [0, 128]]
    for row, expected in zip(found.double(), scales.double(), strict=True):
        error = ((row - expected) ** 2).sum().item()
        assert error <= best_error(*expected.tolist()) + 1e-6  # float16 rounds d


def test_a_file_of_a_model(tmp_path):
    folder, path = tmp_path / "model", tmp_path / "model.gguf"
    quantized = random_qwen2(folder, 128)
    summary = write_gguf(ModelFolder(folder, quantized), path, block_type=["Q2_K", "Q4_0"])
    assert summary["types"]["Q2_K"] == len(quantized)
    assert summary["quantized_bits_per_weight"] == 2.625
    found, expected = read_stock(path), expected_tensors(folder)
    rounded = [name for name in expected if name.endswith("weight") and expected[name].dim() == 2]
    for name in rounded:
        if name.startswith("blk."):
            hard, read = expected.pop(name), found.pop(name)
            assert torch.equal(read.sign(), hard.sign())
            assert (read - hard).norm() < 0.02 * hard.norm()
    assert_same(found, expected)  # all other tensors are exact


def test_scales_that_differ_too_much_are_refused(tmp_path):
    folder = tmp_path / "model"
    quantized, name = random_qwen2(folder, 128), "model.layers.0.mlp.up_proj.weight"
    state = load_file(folder / "model.safetensors")
    state[name][5, :128] *= 2.0**-6
    save_file(state, folder / "model.safetensors")
    with pytest.raises(
        InputError, match=f"scales of a block of {name} differ .* use convert.block_type=Q4_0"
    ):
        write_gguf(ModelFolder(folder, quantized), tmp_path / "model.gguf", block_type="Q2_K")
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.slow
def test_llama_cpp_runs_the_file(tmp_path):
    pytest.importorskip("xllamacpp")
    from test_gguf_client import TEXTS, Client, Reference

    folder, path = tmp_path / "model", tmp_path / "model.gguf"
    write_gguf(ModelFolder(folder, random_qwen2(folder, 128)), path, block_type="Q2_K")
    client, reference = Client(path, 1100), Reference(folder)
    for text in TEXTS:
        ids = reference.tokenizer(text)["input_ids"]
        expected = reference.logits(ids)
        assert (client.logits(text) - expected).norm() < 0.05 * expected.norm()
