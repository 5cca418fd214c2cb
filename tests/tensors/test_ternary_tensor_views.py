"""Views of a TernaryTensor are the views of its dequantized weight, and share its memory."""

import pytest
import torch

from hestia_tune.functional import ternary_codes
from hestia_tune.tensors import TernaryTensor

GROUP_SIZES = [4, 16, "channel", "tensor"]
group_sizes = pytest.mark.parametrize("group_size", GROUP_SIZES)


def packed(group_size, shape=(10, 64), seed=0) -> TernaryTensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    return TernaryTensor.from_codes(*ternary_codes(weight, group_size=group_size))


def assert_view(actual, expected, source=None) -> None:
    assert type(actual) is TernaryTensor
    assert actual.shape == expected.shape and actual.is_contiguous()
    assert torch.equal(actual.dequantize(), expected)
    if source is not None and actual.numel():
        storage = source.qdata.untyped_storage().data_ptr()
        assert actual.qdata.untyped_storage().data_ptr() == storage


VIEWS = {
    "rows": lambda w: w[2:5],
    "one row": lambda w: w[3:4],
    "last row": lambda w: w[-1:],
    "no rows": lambda w: w[4:4],
    "rows past the end": lambda w: w[8:99],
    "negative rows": lambda w: w[-3:-1],
    "all": lambda w: w[:],
    "narrow": lambda w: w.narrow(0, 1, 4),
    "columns": lambda w: w[:, 16:48],
    "columns to the end": lambda w: w[:, 32:],
    "no columns": lambda w: w[:, 32:32],
    "rows and columns": lambda w: w[1:7, 16:32],
    "columns of columns": lambda w: w[:, 16:][:, 16:32],
    "flat": lambda w: w.view(-1),
    "one long row": lambda w: w.reshape(1, 640),
    "itself": lambda w: w.view(10, 64),
    "part of flat": lambda w: w.flatten()[64:192],
}


@group_sizes
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("inference", [False, True])
def test_view(group_size, name, inference):
    weight = packed(group_size)
    with torch.inference_mode(inference):
        assert_view(VIEWS[name](weight), VIEWS[name](weight.dequantize()), weight)


@group_sizes
def test_pieces(group_size):
    weight = packed(group_size)
    dense = weight.dequantize()
    for split in (
        lambda w: w.chunk(3),
        lambda w: w.chunk(4, dim=1),
        lambda w: w.split(4),
        lambda w: w.split(32, dim=-1),
        lambda w: w[:0].split(2),
    ):
        for piece, expected in zip(split(weight), split(dense), strict=True):
            assert_view(piece, expected, weight)


@group_sizes
@pytest.mark.parametrize("shape", [(10, 64), (1, 64), (3, 16), (16, 16)])
def test_transpose(group_size, shape):
    weight = packed(group_size, shape)
    dense = weight.dequantize()
    for transpose in (
        lambda w: w.t(),
        lambda w: w.T,
        lambda w: w.mT,
        lambda w: w.transpose(0, 1),
        lambda w: w.transpose(-1, 0),
        lambda w: w.permute(1, 0),
    ):
        turned = transpose(weight)
        assert turned.is_transposed == (shape[0] > 1 or shape[1] > 1)
        assert turned.shape == dense.t().shape and turned.stride() == dense.t().stride()
        assert torch.equal(turned.dequantize(), dense.t())
        assert torch.equal(turned.codes(), weight.codes().t())
        assert_view(turned.t(), dense, weight)
    assert_view(weight.transpose(1, -1), dense, weight)
    assert torch.equal(weight.t()[:16].dequantize(), dense.t()[:16])
    assert torch.equal(weight.t()[:, 1:].dequantize(), dense.t()[:, 1:])


def test_columns_within_one_group():
    """Eight ranks may share 128 columns with one scale a row."""
    weight = packed("channel")
    for piece, expected in zip(weight.chunk(16, 1), weight.dequantize().chunk(16, 1), strict=True):
        assert_view(piece, expected, weight)
        assert piece.block_size == (1, 4)
    assert_view(packed(16)[:, 4:12], packed(16).dequantize()[:, 4:12])


def joined_columns(weight: TernaryTensor) -> TernaryTensor:
    return torch.cat(weight.chunk(2, 1), 1)


REFUSED = {
    "columns across groups": (16, lambda w: w[:, 8:24], "between groups"),
    "columns that cut a byte": ("channel", lambda w: w[:, :30], "multiples of 4"),
    "columns from within a byte": ("channel", lambda w: w[:, 2:], "multiples of 4"),
    "every other row": (16, lambda w: w[::2], r"step 1; got \[0:10:2\]"),
    "a row": (16, lambda w: w[3], "got aten.select.int; call dequantize"),
    "a column": (16, lambda w: w[:, 3], "got aten.select.int; call dequantize"),
    "rows apart": (16, lambda w: w.unbind(0), "got aten.unbind.int"),
    "other rows": (16, lambda w: w.view(5, 128), "as one row; got the view"),
    "view of columns of one scale": ("tensor", lambda w: joined_columns(w).view(-1), "one row"),
    "view of another size": (16, lambda w: w.view(10, 32), "the view"),
    "view of a transpose": (16, lambda w: w.t().view(10, 64), "the view"),
    "three axes": (16, lambda w: w.view(2, 5, 64), "as one row"),
    "other strides": (16, lambda w: w.as_strided((5, 64), (128, 1)), "no strides but its own"),
    "uneven split": (16, lambda w: w.chunk(3, 1), "between groups"),
    "zeros of another width": (16, lambda w: w.new_zeros(10, 32), "every axis but the first"),
    "arithmetic": (16, lambda w: w + 1, "can be cut between groups.*got aten.add"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_stay_packed_is_an_error(name):
    group_size, view, message = REFUSED[name]
    with pytest.raises((ValueError, NotImplementedError), match=message):
        view(packed(group_size))


def test_odd_width_has_no_flat_view():
    weight = packed("channel", (3, 7))
    with pytest.raises(ValueError, match="whole bytes"):
        weight.view(-1)
    assert_view(weight[1:], weight.dequantize()[1:], weight)
    assert_view(weight[:, 4:], weight.dequantize()[:, 4:], weight)


def test_flattened_columns_are_a_copy():
    weight = packed(16)
    assert_view(weight[:, 16:48].reshape(-1), weight.dequantize()[:, 16:48].reshape(-1))


@group_sizes
def test_new_zeros(group_size):
    weight = packed(group_size)
    for rows in (0, 1, 10, 13):
        zeros = weight.new_zeros(rows, 64)
        assert_view(zeros, torch.zeros(rows, 64, dtype=torch.bfloat16))
        assert not zeros.codes().any()
        if group_size == "tensor":  # what a rank without rows takes part in a gather with
            assert torch.equal(zeros.scale, weight.scale)


@group_sizes
def test_joining_pieces(group_size):
    weight = packed(group_size)
    dense = weight.dequantize()
    for dim, pieces in ((0, (weight[:3], weight[3:3], weight[3:])), (1, weight.chunk(4, 1))):
        assert_view(torch.cat(pieces, dim), dense)
    odd = packed("channel", (3, 7))
    with pytest.raises(ValueError, match="multiples of 4"):
        torch.cat([odd, odd], 1)
    with pytest.raises(ValueError, match="equal groups and dtypes"):
        torch.cat([weight, packed(32)])
    for other in (dense, weight.t()):
        with pytest.raises(ValueError, match="with TernaryTensors of"):
            torch.cat([weight, other])
