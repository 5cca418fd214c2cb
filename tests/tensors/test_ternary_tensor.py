"""Test a TernaryTensor: construction, exactness, layout and errors."""

import pytest
import torch
import torch.nn.functional as F
from references import TRANSPOSES, eq2_hard
from torch._subclasses.fake_tensor import FakeTensorMode

from hestia_tune.functional import hard_ternary, ternary_codes
from hestia_tune.tensors import TernaryTensor

GROUP_SIZES = [1, 4, 6, 32, "channel", "tensor"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def latent(seed=0, shape=(6, 96), dtype=torch.float32, std=0.7):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * std).to(dtype)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_from_hp_is_the_trained_hard_weight(group_size, dtype):
    for seed in range(3):
        weight = latent(seed, dtype=dtype)
        packed = TernaryTensor.from_hp(weight, group_size=group_size)
        assert packed.dtype == dtype and packed.shape == weight.shape
        assert torch.equal(packed.dequantize(), hard_ternary(weight, group_size=group_size))
        expected = eq2_hard(weight, group_size)
        assert torch.equal(packed.to(torch.float64).dequantize(), expected)


@pytest.mark.parametrize("shape", [(3, 4), (3, 12), (5, 10), (0, 8), (4, 0)])
@pytest.mark.parametrize("scales", ["rows", "groups", "tensor"])
@pytest.mark.parametrize("odd", [None, 0.0, -1.5, float("inf"), float("nan")])
def test_dequantizing_is_the_product_bit_for_bit(shape, scales, odd):
    """Check every kind of scale, also scales that no method returns."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-1, 2, shape, generator=generator, dtype=torch.int8)
    groups = max(1, shape[1] // 4) if scales == "groups" and shape[1] % 4 == 0 else 1
    scale = torch.rand(1 if scales == "tensor" else shape[0], groups, generator=generator)
    scale = scale.mul_(torch.tensor(10.0) ** torch.arange(groups)).to(torch.bfloat16)
    if odd is not None and scale.numel():
        scale[0, -1] = odd
    packed = TernaryTensor.from_codes(codes, scale, dtype=torch.bfloat16)
    every = scale.repeat_interleave(shape[1] // groups, dim=1).expand(shape) if shape[1] else scale
    expected = (codes.to(torch.bfloat16) * every)[:, : shape[1]]
    for dense in (packed.dequantize(), packed.dequantize(for_now=True)):
        finite = expected.isnan().logical_not()
        assert torch.equal(dense.isnan(), expected.isnan())
        assert torch.equal(dense[finite].view(torch.int16), expected[finite].view(torch.int16))
    assert torch.equal(packed.t().codes(), codes.t())
    assert torch.equal(packed.t().dequantize(for_now=True).isnan(), expected.t().isnan())


@pytest.mark.parametrize("group_size", [4, 16, "channel", "tensor"])
@pytest.mark.parametrize("shape", [(10, 64), (1, 64), (3, 16), (16, 16)])
@pytest.mark.parametrize("inference", [False, True])
def test_transposes_share_memory(group_size, shape, inference):
    weight = TernaryTensor.from_hp(latent(shape=shape), group_size=group_size)
    dense = weight.dequantize()
    with torch.inference_mode(inference):
        for transpose in TRANSPOSES:
            turned = transpose(weight)
            assert turned.is_transposed
            assert turned.shape == dense.t().shape and turned.stride() == dense.t().stride()
            assert torch.equal(turned.dequantize(), dense.t())
            assert turned.qdata.data_ptr() == weight.qdata.data_ptr()
            assert torch.equal(transpose(turned).dequantize(), dense)
        for same in (weight.transpose(1, -1), weight.permute(0, 1), weight.permute(-2, -1)):
            assert not same.is_transposed and torch.equal(same.dequantize(), dense)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_is_scale_times_code_entry_by_entry(group_size, dtype):
    codes, scale = ternary_codes(latent(1), group_size=group_size)
    packed = TernaryTensor.from_codes(codes, scale, dtype=dtype)
    dense = packed.dequantize()
    assert dense.dtype == dtype and torch.equal(packed.codes(), codes)
    rows, columns = codes.shape
    for i in range(rows):
        for j in range(columns):
            group = j * scale.shape[1] // columns
            value = scale[min(i, scale.shape[0] - 1), group].item() * codes[i, j].item()
            assert dense[i, j].item() == torch.tensor(value).to(dtype).item()


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 98])
def test_widths_that_fill_no_byte(width):
    weight = latent(2, shape=(5, width))
    for group_size in ("channel", "tensor", 1):
        packed = TernaryTensor.from_hp(weight, group_size=group_size)
        assert packed.qdata.shape == (5, -(-width // 4)) and packed.codes().shape == weight.shape
        assert torch.equal(packed.dequantize(), hard_ternary(weight, group_size=group_size))
        assert torch.equal(packed.t().dequantize(), packed.dequantize().t())


def test_layout_is_code_plus_one_little_end_first():
    codes = torch.tensor([[-1, 0, 1, 1, -1, 1]], dtype=torch.int8)
    packed = TernaryTensor.from_codes(codes, torch.ones(1, 1))
    first, second = 0 | 1 << 2 | 2 << 4 | 2 << 6, 0 | 2 << 2
    assert packed.qdata.tolist() == [[first, second]]
    assert packed.block_size == (1, 6)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_from_hard_recovers_the_weight(group_size, dtype):
    weight = latent(3, dtype=dtype)
    weight[1] = 0.0
    hard = hard_ternary(weight, group_size=group_size)
    if dtype == torch.float16:  # The scales of this weight are not rounded here.
        assert torch.equal(hard.to(torch.bfloat16).to(dtype), hard)
    packed = TernaryTensor.from_hard(hard, group_size=group_size)
    assert packed.dtype == dtype and torch.equal(packed.dequantize(), hard)
    if group_size != "tensor":
        assert not packed.scale[1].any()


def test_from_hard_and_from_hp_agree():
    weight = latent(4)
    made = TernaryTensor.from_hp(weight, group_size=32)
    found = TernaryTensor.from_hard(made.dequantize(), group_size=32)
    assert torch.equal(found.qdata, made.qdata) and torch.equal(found.scale, made.scale)
    assert found.block_size == made.block_size


@pytest.mark.parametrize("wrong", [0.25, float("nan"), float("inf")])
def test_from_hard_names_the_group_that_is_not_ternary(wrong):
    hard = hard_ternary(latent(5), group_size=32)
    hard[4, 70] = wrong
    with pytest.raises(ValueError, match="row 4, group 2 has"):
        TernaryTensor.from_hard(hard, group_size=32)


def test_from_hard_refuses_a_scale_that_is_no_bfloat16_value():
    with pytest.raises(ValueError, match="bfloat16 value; row 0, group 0 has .0.1001"):
        TernaryTensor.from_hard(torch.full((2, 8), 0.1001), group_size=8)


def test_scales_that_float16_cannot_hold():
    """Check that rounding comes after the product: code 0 at a scale beyond 65504 stays zero."""
    scale = torch.tensor([[2.0**20], [2.0**-23], [2.0**-30]], dtype=torch.bfloat16)
    codes = torch.tensor([[0, 1, -1, 0]] * 3, dtype=torch.int8)
    dense = TernaryTensor.from_codes(codes, scale, dtype=torch.float16).dequantize()
    inf = float("inf")
    assert dense.tolist() == [[0, inf, -inf, 0], [0, 2.0**-23, -(2.0**-23), 0], [0.0] * 4]


def test_size_in_memory_and_repr():
    packed = TernaryTensor.from_hp(latent(shape=(8, 256)), group_size=128)
    assert 8 * sum(part.nbytes for part in packed.parts) == (2 + 16 / 128) * packed.numel()
    assert repr(packed) == (
        "TernaryTensor(shape=torch.Size([8, 256]), dtype=torch.float32, is_transposed=False, "
        "device=cpu, qdata=(8, 64), scale=(8, 2))"
    )
    assert not packed.requires_grad and packed.is_floating_point()


def test_a_file_of_an_earlier_version_loads(tmp_path):
    """Check a file that stores the block size, and nothing about transposes."""
    packed = TernaryTensor.from_hp(latent(), group_size=32)
    expected = packed.dequantize()
    del packed.__dict__["is_transposed"]
    packed.__dict__["block_size"] = (1, 32)
    torch.save(packed, tmp_path / "weight")
    found = torch.load(tmp_path / "weight", weights_only=True)
    assert torch.equal(found.dequantize(), expected) and found.block_size == (1, 32)
    assert torch.equal(found.t().dequantize(), expected.t())


def test_meta_device():
    packed = TernaryTensor.from_hp(latent().to("meta"), group_size=32)
    assert packed.device.type == "meta" and packed.dequantize().shape == (6, 96)
    assert TernaryTensor.from_hard(latent().to("meta"), group_size=32).is_meta
    codes = torch.empty(6, 96, dtype=torch.int8, device="meta")
    assert TernaryTensor.from_codes(codes, torch.empty(6, 3, device="meta")).is_meta


CODES = torch.zeros(4, 8, dtype=torch.int8)


@pytest.mark.parametrize(
    ("codes", "scale", "dtype", "error", "message"),
    [
        (CODES.float(), torch.ones(4, 1), torch.bfloat16, TypeError, "codes must be int8"),
        (CODES, torch.ones(4, 1, dtype=torch.int8), torch.bfloat16, TypeError, "floating-point"),
        (CODES, torch.ones(4, 1), torch.int8, TypeError, "presents one of"),
        (CODES + 2, torch.ones(4, 1), torch.bfloat16, ValueError, "got 2 to 2"),
        (CODES - 128, torch.ones(4, 1), torch.bfloat16, ValueError, "got -128 to -128"),
        (CODES, torch.ones(4, 3), torch.bfloat16, ValueError, "groups that divide"),
        (CODES, torch.ones(2, 1), torch.bfloat16, ValueError, "scale must have the shape"),
        (CODES, torch.ones(4), torch.bfloat16, ValueError, "scale must have the shape"),
        (CODES, torch.ones(4, 0), torch.bfloat16, ValueError, "scale must have the shape"),
        (CODES, torch.full((4, 1), 0.1), torch.bfloat16, ValueError, "bfloat16 values.*got 0.1"),
    ],
)
def test_from_codes_refuses(codes, scale, dtype, error, message):
    with pytest.raises(error, match=message):
        TernaryTensor.from_codes(codes, scale, dtype=dtype)


def test_parts_that_do_not_fit_are_refused():
    qdata, scale = torch.zeros(4, 2, dtype=torch.uint8), torch.ones(4, 1, dtype=torch.bfloat16)
    TernaryTensor(qdata, scale, (4, 8), torch.float32)
    with pytest.raises(ValueError, match="4 codes a byte"):
        TernaryTensor(qdata, scale, (4, 9), torch.float32)
    with pytest.raises(ValueError, match="scale must have the shape"):
        TernaryTensor(qdata, scale.expand(4, 3), (4, 8), torch.float32)
    with pytest.raises(ValueError, match="scale must have the shape"):
        TernaryTensor(qdata, scale[:2], (4, 8), torch.float32)
    with pytest.raises(TypeError, match="qdata must be uint8"):
        TernaryTensor(qdata, scale.float(), (4, 8), torch.float32)


@pytest.mark.parametrize("make", [TernaryTensor.from_hp, TernaryTensor.from_hard])
def test_quantizing_constructors_refuse(make):
    with pytest.raises(ValueError, match="group_size 64 does not divide in_features 96"):
        make(latent(), group_size=64)
    with pytest.raises(TypeError, match="floating-point"):
        make(torch.ones(4, 8, dtype=torch.int32), group_size=8)


@pytest.mark.parametrize("width", [24, 25], ids=["whole bytes", "padded"])
def test_products_share_memory_without_meeting(width):
    """Check that products may overwrite earlier dequantized weights, in every order and mode."""
    generator = torch.Generator().manual_seed(0)
    dense = [torch.randn(rows, width, generator=generator) for rows in (4, 16, 8)]
    packed = [TernaryTensor.from_hp(w, group_size="channel").to(torch.bfloat16) for w in dense]
    hard = [weight.dequantize() for weight in packed]
    x = torch.randn(3, width, generator=generator).bfloat16().requires_grad_()
    with torch.inference_mode():
        found = [F.linear(x, weight) for weight in packed]
    with torch.no_grad():
        found += [F.linear(x, weight) for weight in packed[::-1]]
    for y, weight in zip(found, hard + hard[::-1], strict=True):
        assert torch.equal(y, F.linear(x.detach(), weight))
    with torch.no_grad():  # Fake tensors do not stay in it either, for every default device.
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta"):
            packed[1].rebuilt(*(torch.empty_like(part) for part in packed[1].parts)).dequantize()
        with torch.device("meta"):
            assert torch.equal(F.linear(x, packed[1]), found[1])
    y = F.linear(x, packed[0])
    with torch.no_grad():
        F.linear(x, packed[1])  # before the backward uses the tensors of the first
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(y) @ hard[0])
    assert all(torch.equal(w.dequantize(), h) for w, h in zip(packed, hard, strict=True))
