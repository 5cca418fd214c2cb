"""Test torchao's own tensor of codes and scales: exact, and usable with torchao alone."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torchao.quantization import IntxUnpackedToInt8Tensor

from hestia_tune.functional import hard_ternary, ternary_codes
from hestia_tune.tensors import TernaryTensor, TwoBitTensor, to_intx

GROUP_SIZES = [16, "channel", "tensor"]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]


def codes_and_scale(group_size, seed=0, shape=(10, 64)):
    generator = torch.Generator().manual_seed(seed)
    return ternary_codes(torch.randn(shape, generator=generator), group_size=group_size)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact(group_size, dtype):
    for seed, shape in enumerate([(10, 64), (3, 80), (1, 16)]):
        codes, scale = codes_and_scale(group_size, seed, shape)
        intx = to_intx(codes, scale, dtype)
        ours = TernaryTensor.from_codes(codes, scale, dtype=dtype)
        assert type(intx) is IntxUnpackedToInt8Tensor and intx.target_dtype == torch.int2
        assert intx.dtype == intx.dequantize().dtype == dtype
        assert torch.equal(intx.dequantize(), ours.dequantize())
        assert intx.block_size == (1, 16 if group_size == 16 else shape[1])
        assert not intx.zero_point.any() and intx.activation_quantization is None
        x = torch.randn(4, shape[1]).to(dtype)
        assert torch.equal(F.linear(x, intx), F.linear(x, ours))


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_with_a_2_become_their_negatives(dtype):
    """The integers of int2 are -2 to 1."""
    weight = torch.randn(10, 64, generator=torch.Generator().manual_seed(5))
    packed = TwoBitTensor.from_hp(weight, group_size=16)
    assert (packed.scale < 0).any() and (packed.scale > 0).any()
    intx = to_intx(packed.codes(), packed.scale, dtype)
    assert torch.equal(intx.qdata, -packed.codes()) and intx.target_dtype == torch.int2
    assert torch.equal(intx.dequantize(), packed.to(dtype).dequantize())


def test_a_packed_tensor_converts():
    weight = torch.randn(10, 64, generator=torch.Generator().manual_seed(5))
    packed = TernaryTensor.from_hp(weight, group_size=16)
    intx = to_intx(packed.codes(), packed.scale, packed.dtype)
    assert torch.equal(intx.dequantize(), hard_ternary(weight, group_size=16))


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_rows_can_be_cut_out(group_size):
    codes, scale = codes_and_scale(group_size)
    intx = to_intx(codes, scale)
    assert torch.equal(intx[2:5].dequantize(), intx.dequantize()[2:5])


def test_torchao_alone_loads_it(tmp_path):
    expected = {}
    for group_size in GROUP_SIZES:
        intx = to_intx(*codes_and_scale(group_size))
        expected[str(group_size)] = (intx, intx.dequantize())
    torch.save(expected, tmp_path / "weights.pt")
    script = (
        "import sys, torch, torchao.quantization\n"
        "loaded = torch.load(sys.argv[1], weights_only=True)\n"
        "assert len(loaded) == 3\n"
        "assert all(torch.equal(w.dequantize(), dense) for w, dense in loaded.values())\n"
        "assert 'hestia_tune' not in sys.modules\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "weights.pt")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_refusals():
    codes, scale = codes_and_scale(16)
    with pytest.raises(ValueError, match="got 3 to 3"):
        to_intx(torch.full_like(codes, 3), scale)
    with pytest.raises(TypeError, match="codes must be int8"):
        to_intx(codes.float(), scale)
    with pytest.raises(ValueError, match="scale must have the shape"):
        to_intx(codes, scale[:, :3])
    with pytest.raises(ValueError, match="bfloat16 values"):
        to_intx(codes, scale.float() + 1e-6)
    with pytest.raises(TypeError, match="got torch.float64"):
        to_intx(codes, scale, torch.float64)
    huge = torch.full_like(scale, 1e5)
    with pytest.raises(ValueError, match="at most 65504 for float16"):
        to_intx(codes, huge, torch.float16)
    assert to_intx(codes, huge, torch.bfloat16).dtype == torch.bfloat16
