"""Test packed weights of two and four levels: contents, bytes and errors.

The tests of ternary weights cover the common behaviour of all kinds."""

import io

import pytest
import torch
import torch.nn.functional as F

from hestia_tune.methods import EvenMethod, INT2Method, INT4Method, SEQMethod, TwoBitMethod
from hestia_tune.tensors import (
    BinaryTensor,
    INT2Tensor,
    INT4Tensor,
    TernaryTensor,
    TwoBitTensor,
    pack,
    read_hard,
)

METHODS = [
    EvenMethod(group_size=16),
    EvenMethod(group_size="tensor"),
    EvenMethod(group_size=16, codebook="int2"),
    INT2Method(group_size="channel", start="least_squares"),
    SEQMethod(group_size=16, bits=2),
    TwoBitMethod(group_size=16),
    TwoBitMethod(group_size="channel", scale="learned"),
    INT4Method(group_size=16),
]
KINDS = {kind.levels: kind for kind in (BinaryTensor, TwoBitTensor, INT2Tensor, INT4Tensor)}


def latent(seed=0, shape=(6, 64)):
    return 0.7 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(method, seed=0, dtype=torch.float32):
    w = latent(seed).to(dtype)
    parameters = method.initial_parameters(w)
    return pack(method, w, parameters=parameters), method.hard(w, parameters)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_packed_is_hard_and_is_read_from_hard(method, dtype):
    packed, hard = make(method, dtype=dtype)
    assert type(packed) is KINDS[method.levels] and packed.dtype == dtype
    assert torch.equal(packed.dequantize(), hard)
    read = read_hard(hard, method.group_size, method.levels)
    assert torch.equal(read.dequantize(), hard) and type(read) is type(packed)
    again = pack(method, hard, is_hard=True)
    assert torch.equal(again.dequantize(), hard)
    assert packed.qdata.shape == (6, 64 * packed.bits // 8)
    x = torch.randn(3, 64, dtype=dtype)
    assert torch.equal(F.linear(x, packed), F.linear(x, hard))
    assert torch.equal(packed.t().dequantize(), hard.t())
    assert torch.equal(packed.t().codes(), packed.codes().t())


@pytest.mark.parametrize("kind", KINDS.values())
def test_from_a_latent_weight(kind):
    method = {
        BinaryTensor: EvenMethod(group_size=16),
        INT2Tensor: EvenMethod(group_size=16, codebook="int2"),
        TwoBitTensor: TwoBitMethod(group_size=16),
        INT4Tensor: INT4Method(group_size=16),
    }[kind]
    packed = kind.from_hp(latent(), group_size=16)
    hard = method.hard(latent(), method.initial_parameters(latent()))
    assert type(packed) is kind and torch.equal(packed.dequantize(), hard)


def test_layout():
    ones = torch.ones(1, 1)
    binary = torch.tensor([[-1, 1, 1, -1, 1, 1, 1, 1, 1]], dtype=torch.int8)
    assert BinaryTensor.from_codes(binary, ones).qdata.tolist() == [[0b11110110, 1]]
    sixteen = torch.tensor([[-8, 7, 0]], dtype=torch.int8)
    assert INT4Tensor.from_codes(sixteen, -ones).qdata.tolist() == [[0b11110000, 8]]
    assert torch.equal(INT4Tensor.from_codes(sixteen, -ones).codes(), sixteen)
    two_bit = torch.tensor([[-1, 0, 1, 2, 2]], dtype=torch.int8)
    assert TwoBitTensor.from_codes(two_bit, -ones).qdata.tolist() == [[0b11100100, 3]]
    assert torch.equal(TwoBitTensor.from_codes(two_bit, -ones).codes(), two_bit)
    four = torch.tensor([[-3, -1, 1, 3, 3]], dtype=torch.int8)
    assert INT2Tensor.from_codes(four, ones).qdata.tolist() == [[0b11100100, 3]]
    assert torch.equal(INT2Tensor.from_codes(four, ones).codes(), four)
    assert torch.equal(BinaryTensor.from_codes(binary, ones).codes(), binary)


@pytest.mark.parametrize("method", METHODS[:3], ids=str)
def test_saved_and_loaded_without_running_code(method):
    packed, hard = make(method)
    file = io.BytesIO()
    torch.save({"w": packed}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["w"]
    assert type(loaded) is type(packed) and torch.equal(loaded.dequantize(), hard)


def test_groups_of_one_magnitude_keep_their_values():
    """Check groups of one magnitude. Two scales fit four levels, but one fits ternary codes."""
    w = torch.tensor([[0.5, -0.5, 0.5, 0.5], [0.75, -0.25, 0.25, 0.25], [1.5, 1.5, -1.5, 1.5]])
    kinds = [(kind, w[[0, 2]]) for kind in (BinaryTensor, TernaryTensor, TwoBitTensor)]
    for kind, rows in ((INT2Tensor, w), *kinds):
        assert torch.equal(kind.from_hard(rows, group_size=4).dequantize(), rows)


@pytest.mark.parametrize(
    ("kind", "row", "rule"),
    [
        (INT2Tensor, [0.25, 0.5, 0.25, 0.75], "one absolute value and three times it"),
        (INT2Tensor, [0.25, 0.0, 0.25, 0.75], "one absolute value and three times it"),
        (BinaryTensor, [0.5, 0.0, 0.5, 0.5], "one absolute value per group"),
        (BinaryTensor, [0.5, 1.5, 0.5, 0.5], "one absolute value per group"),
        (TernaryTensor, [0.5, 1.0, 0.5, 0.5], "one absolute value besides 0"),
        (TwoBitTensor, [1.0, 0.5, -0.5, -1.0], "one scale times -1, 0, 1 and 2"),
        (TwoBitTensor, [1.0, 0.25, 0.0, 0.0], "one scale times -1, 0, 1 and 2"),
        (INT2Tensor, [0.2, 0.2, 0.2, 0.2], "a bfloat16 value"),
        (INT4Tensor, [1.0, 0.55, 0.0, 0.0], "integers from -8 to 7 times one scale"),
    ],
)
def test_weights_that_are_not_hard_are_refused(kind, row, rule):
    with pytest.raises(ValueError, match=rule):
        kind.from_hard(torch.tensor([row]), group_size=4)
    with pytest.raises(ValueError, match="must be"):
        kind.from_codes(torch.full((1, 4), 8, dtype=torch.int8), torch.ones(1, 1))
