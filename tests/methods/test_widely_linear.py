"""Test the widely-linear map: lossless, equal to a real product, orthogonal up to a factor."""

import pytest
import references_fairy2i as references
import torch

from hestia_tune.methods.fairy2i import Fairy2iMethod, merge, split

SHAPES = [(2, 2), (4, 6), (10, 2), (64, 128)]
DTYPES = {torch.float64: 1e-15, torch.float32: 5e-7, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def matrix(seed, shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pair(weight):
    """Return U and W as complex matrices."""
    return torch.complex(*split(weight)).unbind()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_undoes_split(shape, dtype):
    for seed in range(3):
        weight = matrix(seed, shape, dtype)
        re, im = split(weight)
        assert re.shape == im.shape == (2, shape[0] // 2, shape[1] // 2)
        back = merge(re, im)
        assert re.dtype == back.dtype == dtype
        torch.testing.assert_close(back, weight, rtol=0, atol=DTYPES[dtype] * weight.abs().max())


@pytest.mark.parametrize("shape", SHAPES)
def test_split_undoes_merge_so_the_pair_is_unique(shape):
    re, im = (matrix(seed, (2, shape[0] // 2, shape[1] // 2)).double() for seed in (0, 1))
    torch.testing.assert_close(split(merge(re, im)), (re, im), rtol=0, atol=1e-15)


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_formulas(shape):
    weight = matrix(0, shape).double()
    torch.testing.assert_close(pair(weight), references.split(weight), rtol=0, atol=0)
    torch.testing.assert_close(merge(*split(weight)), references.merge(*pair(weight)))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_complex_map_is_the_real_product(shape):
    """Check y = U·x + W·conj(x), with x = x1 + i·x2 and y = y1 + i·y2."""
    weight, x = matrix(0, shape).double(), matrix(1, (3, shape[1])).double()
    u, w = pair(weight)
    z = torch.complex(*x.chunk(2, dim=1))
    y = z @ u.T + z.conj() @ w.T
    torch.testing.assert_close(torch.cat([y.real, y.imag], 1), x @ weight.T)


def test_a_complex_linear_map_has_no_conjugate_part():
    u = torch.complex(matrix(0, (3, 4)), matrix(1, (3, 4)))
    weight = torch.cat([torch.cat([u.real, -u.imag], 1), torch.cat([u.imag, u.real], 1)])
    got_u, got_w = pair(weight)
    assert torch.equal(got_u, u) and got_w.abs().max() == 0


def test_orthogonal_up_to_a_factor_of_two():
    """Check <merge(z), A> = 2·<z, split(A)>. So gradients can use the same two functions."""
    a, b = matrix(0, (6, 8)).double(), matrix(1, (6, 8)).double()
    (re_a, im_a), (re_b, im_b) = split(a), split(b)
    inner = (re_a * re_b).sum() + (im_a * im_b).sum()
    torch.testing.assert_close((a * b).sum(), 2 * inner)


def test_strides_do_not_matter():
    for weight in (
        torch.randn(8, 6).t(),
        torch.randn(12, 16)[::2, ::2],
        torch.ones(1, 4).expand(6, 4),
    ):
        torch.testing.assert_close(split(weight), split(weight.contiguous()), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 4), "got 4 and 3 of the weight"),
        ((4, 5), "got 5 and 4 of the weight"),
        ((3, 5), "got 5 and 3"),
        ((4,), "must have the shape"),
        ((2, 2, 2), "must have the shape"),
    ],
)
def test_shapes_that_cannot_be_split(shape, message):
    with pytest.raises(ValueError, match=message):
        Fairy2iMethod().hard(torch.ones(shape))


def test_odd_dimensions_name_the_layer_and_the_remedy():
    Fairy2iMethod().check_layer(4, 6, "layers.0")
    with pytest.raises(ValueError, match="of layers.0; leave .*`skip_incompatible: true`"):
        Fairy2iMethod().check_layer(5, 6, "layers.0")
