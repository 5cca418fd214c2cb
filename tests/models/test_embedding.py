"""Test the rounding of embeddings to whole-number codes."""

import math

import pytest
import torch

from hestia_tune.errors import InputError
from hestia_tune.methods.straight_through import (
    check_embedding_width,
    embedding_codes,
    round_embedding,
)

LARGEST = {"int4": 8, "int5": 16, "int8": 127}


def embedding() -> torch.Tensor:
    """Return rows of very different sizes, one of them zero, and one with a power of two."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 96, generator=generator) * torch.logspace(-3, 2, 40)[:, None]
    weight[3] = 0
    weight[5, :32] = torch.linspace(-127 / 64, 127 / 64, 32)
    return weight.bfloat16().float()


def test_scales_of_8_bits_are_the_least_powers_of_two_that_hold_the_group():
    weight = embedding()
    codes, scales = embedding_codes(weight, "int8")
    for row in range(len(weight)):
        for group in range(3):
            values = weight[row, 32 * group : 32 * (group + 1)].tolist()
            scale = 2.0**-14
            while max(map(abs, values)) > 127 * scale:
                scale *= 2
            assert scales[row, group] == scale
            expected = [round(value / scale) for value in values]
            assert codes[row, 32 * group : 32 * (group + 1)].tolist() == expected


@pytest.mark.parametrize("choice", LARGEST)
def test_rounded_weights_are_bfloat16_and_near(choice):
    weight = embedding()
    codes, scales = embedding_codes(weight, choice)
    rounded = round_embedding(weight, choice)
    assert codes.abs().max() == LARGEST[choice] and codes.dtype == torch.int8
    assert torch.equal(rounded, rounded.bfloat16().float())
    half = scales.double().repeat_interleave(32, 1) / 2
    error = (rounded.double() - weight.double()).abs()
    # With 4 and 5 bits, the largest weights may be cut off, which leaves less error in all.
    largest = LARGEST[choice]
    is_cut = (codes == -largest) | (codes == largest - 1)
    assert (error <= half.abs() + 1e-8)[~is_cut | (largest == 127)].all()
    if choice == "int4":
        groups, least = weight.double().unflatten(1, (-1, 32)), error.unflatten(1, (-1, 32))
        plain = (groups.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-12)
        plain_error = (groups / plain).round() * plain - groups
        assert least.square().sum() < plain_error.square().sum()
    assert not rounded[3].any()
    assert math.isfinite(float(scales.sum()))


@pytest.mark.parametrize("choice", LARGEST)
def test_a_second_rounding_changes_nothing(choice):
    rounded = round_embedding(embedding(), choice)
    assert torch.equal(round_embedding(rounded, choice), rounded)
    if choice != "int5":  # a group of 5 bits may find its weights with another scale, too
        pairs = zip(
            embedding_codes(embedding(), choice), embedding_codes(rounded, choice), strict=True
        )
        assert all(torch.equal(first, second) for first, second in pairs)


def test_scales_of_5_bits_have_the_least_error_of_all_scales_of_four_significant_bits():
    weight = embedding()
    codes, scales = embedding_codes(weight, "int5")
    groups = weight.double().unflatten(1, (-1, 32))
    found = (codes.double().unflatten(1, (-1, 32)) * scales.double()[..., None] - groups).square()
    for row in range(len(weight)):
        for group in range(3):
            values, errors = groups[row, group], []
            if not values.any():
                continue
            for mantissa in range(8, 16):
                for exponent in range(-18, 8):
                    scale = mantissa * 2.0**exponent
                    if 14 <= values.abs().max() / scale <= 16:
                        code = (values / scale).round().clamp(-16, 15)
                        errors.append((code * scale - values).square().sum())
            assert found[row, group].sum() <= min(errors, default=torch.inf) * (1 + 1e-6)


def test_rows_with_a_rest_are_refused():
    check_embedding_width("tok_embeddings", 576)
    with pytest.raises(InputError, match="multiple of 32 weights; head has rows of 100"):
        check_embedding_width("head", 100)
