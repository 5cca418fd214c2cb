"""Test weights that are hard already: their codes, their groups, and training from them."""

import dataclasses

import pytest
import torch

from hestia_tune.methods import (
    AbsMeanMethod,
    DLTMethod,
    EvenMethod,
    INT2Method,
    LSQMethod,
    SEQMethod,
    TequilaMethod,
    TernaryMethod,
    TWNMethod,
    TwoBitMethod,
)
from hestia_tune.methods.groups import (
    BINARY,
    SYMMETRIC,
    TERNARY,
    TWO_BIT,
    find_codes,
    find_group_size,
    is_hard,
    latent_of_hard,
    rounded_hard,
)

SIZES = [32, 64, 128, "channel", "tensor"]
ZERO, ONE = torch.tensor(0.0), torch.tensor(1.0)
METHODS = [
    TernaryMethod(),
    TernaryMethod(scale="learned"),
    TernaryMethod(scale="learned", start="least_squares"),
    TernaryMethod(threshold="learned", offset="learned"),
    TernaryMethod(threshold="learned", start="least_squares"),
    AbsMeanMethod(),
    TequilaMethod(),
    TWNMethod(),
    TWNMethod(delta=0),
    INT2Method(),
    LSQMethod(),
    SEQMethod(start="least_squares"),
    DLTMethod(),
]
OTHERS = [
    EvenMethod(),
    EvenMethod(codebook="int2"),
    INT2Method(start="least_squares"),
    SEQMethod(bits=2),
    TwoBitMethod(),
    TwoBitMethod(scale="learned"),
]


def with_groups(method, group_size):
    """Return the method with another group size, or None if it does not have it."""
    try:
        return dataclasses.replace(method, group_size=group_size)
    except ValueError:
        return None


def codes_of(levels, shape, generator):
    """Return random codes."""
    codes = [*levels, 0] if levels == TERNARY else levels  # half of the ternary codes are 0
    return torch.tensor(codes).float()[torch.randint(0, len(codes), shape, generator=generator)]


def hard_weight(levels=TERNARY, group_size=64, shape=(12, 384), seed=0, std=0.02):
    """Return scale times code, made without the package: scales with 6 significant bits."""
    generator = torch.Generator().manual_seed(seed)
    codes = codes_of(levels, shape, generator)
    group = shape[1] if isinstance(group_size, str) else group_size
    scales = torch.rand(shape[0], shape[1] // group, 1, generator=generator) + 1
    scales = (scales * 32).floor() / 32 * 2.0 ** torch.tensor(std).log2().round()
    scales = scales[:1, :1].expand_as(scales) if group_size == "tensor" else scales
    return (codes.unflatten(1, (-1, group)) * scales).flatten(1)


@pytest.mark.parametrize("levels", [BINARY, TERNARY, TWO_BIT, SYMMETRIC])
@pytest.mark.parametrize("group_size", [32, 64, 96, 128, 192, "channel", "tensor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_largest_group_size_is_found(levels, group_size, dtype):
    for seed in range(3):
        w = hard_weight(levels, group_size, seed=seed).to(dtype)
        assert find_codes(w) == (levels, group_size)
        for size in (32, 64, 96, 128, 192, "channel", "tensor"):
            divides = size == group_size or group_size == "tensor"
            divides |= isinstance(size, int) and group_size == "channel"
            both = isinstance(size, int) and isinstance(group_size, int)
            divides |= both and group_size % size == 0
            assert is_hard(w, size, levels) == divides


def test_other_weights_are_dense():
    w = torch.randn(40, 384)
    assert find_codes(w) == (None, None) == find_codes(w.bfloat16())
    hard = hard_weight(shape=(40, 384))
    hard[33, 200] += 0.001  # beyond the first rows
    assert find_codes(hard) == (None, None)
    assert find_codes(hard[:33]) == (TERNARY, 64)
    four_bit = (
        torch.randint(-8, 8, (40, 384)).unflatten(1, (-1, 32)) * torch.rand(40, 12, 1)
    ).flatten(1)
    assert find_codes(four_bit) == (None, None)
    hard[0, 0] = torch.nan
    assert find_codes(hard[:33]) == (None, None)
    assert find_codes(hard_weight(TERNARY, 20, (4, 60))) == (
        None,
        None,
    )  # no multiple of 32 divides 60
    assert is_hard(hard_weight(TERNARY, 20, (4, 60)), 20)


def test_zeros_fit_every_group():
    w = hard_weight(TERNARY, 64)
    w[:, 64:192] = 0
    w[5] = 0
    assert find_codes(w) == (TERNARY, 64)
    assert find_group_size(torch.zeros(3, 64)) == "tensor"


@pytest.mark.parametrize("factor", [1.001, -1.001])
def test_scales_with_more_digits_are_found_except_for_symmetric_levels(factor):
    for levels in (TERNARY, TWO_BIT):
        w = hard_weight(levels, 64) * factor
        assert find_codes(w) == (levels, 64)
        assert is_hard(w, 64, levels, any_scale=True)
    assert not is_hard(w, 64, TWO_BIT)  # files cannot hold the scale
    assert find_codes(hard_weight(SYMMETRIC, 64) * factor) == (None, None)


@pytest.mark.parametrize("scale", ["absmean", "learned"])
@pytest.mark.parametrize("levels", [TERNARY, TWO_BIT])
def test_two_bits_keep_the_codes_of_a_scale_with_more_digits(levels, scale):
    w = hard_weight(levels, 64) * 1.003
    method = TwoBitMethod(group_size=64, scale=scale)
    hard = rounded_hard(method, w).float()
    codes = method.hard(w, method.initial_parameters(w)) / hard
    assert ((hard / w).nan_to_num(1) - 1).abs().max() < 2**-6  # half of the sixth digit
    assert torch.equal(codes.nan_to_num(1), torch.ones_like(codes))
    assert is_hard(hard, 64, TWO_BIT) and torch.equal(hard.sign(), w.sign())
    assert torch.equal(latent_of_hard(method, hard), hard)


@pytest.mark.parametrize(
    "method",
    filter(None, (with_groups(method, s) for method in [*METHODS, *OTHERS] for s in SIZES)),
    ids=str,
)
@pytest.mark.parametrize("std", [1e-5, 0.02, 3.0])
def test_the_first_forward_and_the_hard_weight_are_the_source(method, std):
    group_size = method.group_size
    for seed, found in enumerate([group_size, "tensor"]):
        source = hard_weight(method.levels, found, seed=seed, std=std)
        if method.levels == TERNARY:
            source[2, :128] = 0
            source[3, 1::2] = source[3, 0]  # half the weights may be zeros: gamma·2 is bfloat16
            source[3, ::2] = 0
            if found == "tensor" or group_size != "tensor":
                assert is_hard(source, group_size)
        latent = latent_of_hard(method, source)
        parameters = method.initial_parameters(latent)
        forward = method.effective_weight(latent, ZERO, ONE, parameters)
        assert torch.equal(forward, source)
        assert torch.equal(method.hard(latent, parameters), source)


def test_absmean_alone_would_shrink_the_weight():
    source = hard_weight()
    for method in (TernaryMethod(group_size=64), AbsMeanMethod(group_size=64)):
        shrunk = method.effective_weight(source, ZERO, ONE)
        assert shrunk.norm() < 0.8 * source.norm()
        assert not torch.equal(latent_of_hard(method, source), source)
    learned = TernaryMethod(group_size=64, scale="learned")
    assert torch.equal(latent_of_hard(learned, source), source)


def test_every_share_of_zeros_and_every_scale():
    """Check all numbers of nonzeros in a group, and all significands of bfloat16."""
    method = AbsMeanMethod(group_size=32)
    scales = torch.arange(128, 256) * 2.0**-13
    for nonzeros in range(1, 33):
        source = torch.zeros(128, 32)
        source[:, :nonzeros] = scales.view(-1, 1)
        source[:, 0] *= -1
        latent = latent_of_hard(method, source)
        assert torch.equal(method.effective_weight(latent, ZERO, ONE), source)
        assert torch.equal(method.hard(latent), source)
