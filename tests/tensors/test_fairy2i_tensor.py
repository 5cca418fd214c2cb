"""Test that a Fairy2iTensor is exact and small, and acts as a dense weight or raises an error."""

import pytest
import references_fairy2i as reference
import torch
from references import TRANSPOSES

from hestia_tune.methods.fairy2i import Fairy2iMethod
from hestia_tune.tensors import Fairy2iTensor

LAYOUTS = [(1, "tensor"), (2, "tensor"), (2, 4), (3, 16), (4, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
layouts = pytest.mark.parametrize(("num_stages", "granularity"), LAYOUTS)
few_layouts = pytest.mark.parametrize(("num_stages", "granularity"), [(2, "tensor"), (3, 4)])
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def latent(seed=0, shape=(10, 32), dtype=torch.float32, std=0.7):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * std).to(dtype)


def packed(num_stages=2, granularity="tensor", dtype=torch.float32, shape=(10, 32), seed=0):
    weight = latent(seed, shape, dtype)
    return Fairy2iTensor.from_hp(weight, num_stages=num_stages, granularity=granularity)


def assert_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that the numbers are equal, including the sign of zero."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    assert torch.equal(actual.contiguous().view(integer), expected.contiguous().view(integer))


def assert_same(actual: Fairy2iTensor, expected: Fairy2iTensor) -> None:
    assert type(actual) is Fairy2iTensor
    for name in ("shape", "dtype", "is_transposed", "device"):
        assert getattr(actual, name) == getattr(expected, name), name
    assert actual.stride() == expected.stride()
    assert torch.equal(actual.qdata, expected.qdata)
    assert torch.equal(actual.scale, expected.scale)


# The contents.


@layouts
@dtypes
def test_dequantize_is_the_trained_hard_weight(num_stages, granularity, dtype):
    method = Fairy2iMethod(num_stages=num_stages, granularity=granularity)
    for seed in range(3):
        weight = latent(seed, dtype=dtype)
        weight[seed, ::3] = 0.0  # ties and zeros
        made = Fairy2iTensor.from_hp(weight, num_stages=num_stages, granularity=granularity)
        assert made.dtype == dtype and made.shape == weight.shape
        assert_bits(made.dequantize(), method.hard(weight))
        codes, scales = method.codes(weight)
        again = Fairy2iTensor.from_codes(codes, scales, dtype=dtype)
        assert_same(again, made)
        assert torch.equal(again.codes(), codes) and again.codes().dtype == torch.int8


@layouts
def test_dequantize_is_the_reference(num_stages, granularity):
    weight = latent(4, dtype=torch.float64)
    made = packed(num_stages, granularity, torch.float64, seed=4)
    expected = reference.quantized(weight, 0, num_stages, granularity)
    torch.testing.assert_close(made.dequantize(), expected, rtol=1e-13, atol=1e-13)


@dtypes
def test_another_presented_dtype_rounds_the_same_sum(dtype):
    weight = latent(5)
    made = Fairy2iTensor.from_hp(weight, num_stages=3).to(dtype)
    exact = made.to(torch.float64).dequantize()
    assert made.dtype == dtype
    torch.testing.assert_close(made.dequantize(), exact.to(dtype))
    if dtype != torch.float64:
        hard = Fairy2iMethod(num_stages=3).hard(weight)
        assert_bits(made.dequantize(), hard.to(dtype))


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("rows", [1, 3])
def test_widths_that_fill_no_byte(columns, rows):
    weight = latent(2, (2 * rows, 2 * columns))
    for granularity in ("tensor", 1, columns):
        made = Fairy2iTensor.from_hp(weight, granularity=granularity)
        assert made.qdata.shape == (2, 2, rows, -(-columns // 4))
        assert made.codes().shape == (2, 2, rows, columns)
        assert_bits(made.dequantize(), Fairy2iMethod(granularity=granularity).hard(weight))
        assert_bits(made.t().dequantize(), made.dequantize().t())
        assert_same(made.t().t(), made)


def test_layout_is_powers_of_i_little_end_first():
    codes = torch.tensor([[0, 1, 2, 3, 3, 1], [3, 0, 0, 0, 2, 2]], dtype=torch.int8)
    scales = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    made = Fairy2iTensor.from_codes(codes.view(1, 2, 1, 6), scales.view(1, 2, 2, 1, 1))
    assert made.qdata.tolist() == [
        [[[0 | 1 << 2 | 2 << 4 | 3 << 6, 3 | 1 << 2]], [[3, 2 | 2 << 2]]]
    ]
    # U = (1, 2i, -1, -2i, -2i, 2i), W = (-8i, 4, 4, 4, -4, -4).
    real_of_u, imag_of_u = [1, 0, -1, 0, 0, 0], [0, 2, 0, -2, -2, 2]
    real_of_w, imag_of_w = [0, 4, 4, 4, -4, -4], [-8, 0, 0, 0, 0, 0]
    u = torch.complex(torch.tensor([real_of_u]).float(), torch.tensor([imag_of_u]).float())
    w = torch.complex(torch.tensor([real_of_w]).float(), torch.tensor([imag_of_w]).float())
    assert torch.equal(made.to(torch.float32).dequantize(), reference.merge(u, w))


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_a_stage_takes_one_bit_a_weight(num_stages):
    def bits_per_weight(tensor):
        return 8 * sum(part.nbytes for part in tensor.parts) / tensor.numel()

    made = packed(num_stages, shape=(16, 64))
    assert bits_per_weight(made) == num_stages * (1 + 16 * 4 / (16 * 64))
    made = packed(num_stages, 16, shape=(16, 64))
    assert bits_per_weight(made) == num_stages * (1 + 16 / 16)
    assert made.scale.shape == made.t().scale.shape == (num_stages, 2, 2, 8, 2)


def test_a_hard_weight_does_not_determine_its_codes():
    """Show why there is no `from_hard`: a second quantization makes another weight."""
    hard = packed(seed=1).dequantize()
    assert not torch.equal(Fairy2iTensor.from_hp(hard).dequantize(), hard)
    assert not hasattr(Fairy2iTensor, "from_hard")


def test_a_weight_that_is_not_finite_stays_so():
    weight = latent()
    weight[3, 3] = float("inf")
    assert Fairy2iTensor.from_hp(weight).dequantize().isnan().all()


def test_repr_and_meta_device():
    made = packed(2, 4, torch.bfloat16)
    assert repr(made) == (
        "Fairy2iTensor(shape=torch.Size([10, 32]), dtype=torch.bfloat16, is_transposed=False, "
        "device=cpu, qdata=(2, 2, 5, 4), scale=(2, 2, 2, 5, 4))"
    )
    assert not made.requires_grad and made.is_floating_point()
    meta = Fairy2iTensor.from_hp(latent().to("meta"), granularity=4)
    assert meta.is_meta and meta.dequantize().shape == (10, 32) and meta.qdata.shape[2:] == (5, 4)


CODES = torch.zeros(2, 2, 4, 8, dtype=torch.int8)
SCALES = torch.ones(2, 2, 2, 1, 1)


@pytest.mark.parametrize(
    ("codes", "scales", "dtype", "error", "message"),
    [
        (CODES.float(), SCALES, torch.bfloat16, TypeError, "codes must be int8"),
        (CODES, SCALES.to(torch.int8), torch.bfloat16, TypeError, "floating-point"),
        (CODES, SCALES, torch.int8, TypeError, "presents one of"),
        (CODES + 4, SCALES, torch.bfloat16, ValueError, "got 4 to 4"),
        (CODES - 1, SCALES, torch.bfloat16, ValueError, "got -1 to -1"),
        (CODES[0], SCALES, torch.bfloat16, ValueError, r"\(num_stages, 2, n, m\); got"),
        (CODES[:, :1], SCALES, torch.bfloat16, ValueError, "qdata must have the shape"),
        (CODES[:0], SCALES[:0], torch.bfloat16, ValueError, "1 to 4 stages"),
        (CODES.repeat(3, 1, 1, 1), SCALES, torch.bfloat16, ValueError, "1 to 4 stages"),
        (CODES[:, :, :, :0], SCALES, torch.bfloat16, ValueError, "two even numbers"),
        (CODES, SCALES[:1], torch.bfloat16, ValueError, "scale must have the shape"),
        (CODES, SCALES[0], torch.bfloat16, ValueError, "scale must have the shape"),
        (CODES, SCALES[..., 0, 0], torch.bfloat16, ValueError, "scale must have the shape"),
        (CODES, torch.ones(1), torch.bfloat16, ValueError, "scale must have the shape"),
        (CODES, torch.ones(2, 2, 2, 4, 3), torch.bfloat16, ValueError, "groups that divide 8"),
        (CODES, torch.ones(2, 2, 2, 4, 0), torch.bfloat16, ValueError, "groups that divide 8"),
        (CODES, torch.ones(2, 2, 2, 1, 2), torch.bfloat16, ValueError, "groups that divide 8"),
        (CODES, SCALES * 0.1, torch.bfloat16, ValueError, "bfloat16 values.*got 0.1"),
    ],
)
def test_from_codes_refuses(codes, scales, dtype, error, message):
    with pytest.raises(error, match=message):
        Fairy2iTensor.from_codes(codes, scales, dtype=dtype)


def test_parts_that_do_not_fit_are_refused():
    qdata, scale = torch.zeros(2, 2, 4, 2, dtype=torch.uint8), SCALES.bfloat16()
    Fairy2iTensor(qdata, scale, (8, 16), torch.float32)
    for shape in ((8, 18), (16, 8), (10, 16)):
        with pytest.raises(ValueError, match="qdata must have the shape"):
            Fairy2iTensor(qdata, scale, shape, torch.float32)
    for shape in ((7, 16), (8, 15), (8,), (2, 4, 16)):
        with pytest.raises(ValueError, match="two even numbers"):
            Fairy2iTensor(qdata, scale, shape, torch.float32)
    with pytest.raises(TypeError, match="qdata must be uint8"):
        Fairy2iTensor(qdata, scale.float(), (8, 16), torch.float32)


def test_from_hp_refuses():
    with pytest.raises(ValueError, match="even in_features and out_features; got 7"):
        Fairy2iTensor.from_hp(torch.ones(4, 7))
    with pytest.raises(ValueError, match="granularity 5 does not divide the 16 complex columns"):
        Fairy2iTensor.from_hp(latent(), granularity=5)
    with pytest.raises(ValueError, match="num_stages must be an int from 1 to 4"):
        Fairy2iTensor.from_hp(latent(), num_stages=5)
    with pytest.raises(TypeError, match="floating-point"):
        Fairy2iTensor.from_hp(torch.ones(4, 8, dtype=torch.int32))


# The behaviour under torch.


@few_layouts
@pytest.mark.parametrize("shape", [(10, 32), (2, 8), (8, 8)])
@pytest.mark.parametrize("inference", [False, True])
def test_transpose(num_stages, granularity, shape, inference):
    weight = packed(num_stages, granularity, shape=shape)
    dense = weight.dequantize()
    with torch.inference_mode(inference):
        for transpose in TRANSPOSES:
            turned = transpose(weight)
            assert turned.is_transposed and turned.shape == dense.t().shape
            assert turned.stride() == dense.t().stride()
            assert_bits(turned.dequantize(), dense.t())
            assert torch.equal(turned.codes(), weight.codes())
            assert turned.qdata.data_ptr() == weight.qdata.data_ptr()
            assert_same(transpose(turned), weight)
        for same in (weight.transpose(1, -1), weight.permute(0, 1)):
            assert_same(same, weight)
