"""Test bit packing: a byte-by-byte reference, round trips, widths that fill no byte."""

import pytest
import torch

from hestia_tune.tensors.packed_tensor import pack2, unpack2


def random_codes(shape, seed=0, dtype=torch.int8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def slow_bytes(row: list[int]) -> list[int]:
    """Return the bytes, little end first, with the last byte padded with zeros."""
    chunks = [row[at : at + 4] for at in range(0, len(row), 4)]
    return [sum(code * 4**i for i, code in enumerate(chunk)) for chunk in chunks]


@pytest.mark.parametrize("width", [*range(12), 64, 97])
def test_bytes_and_round_trip(width):
    for seed, dtype in enumerate([torch.int8, torch.uint8, torch.int64]):
        codes = random_codes((3, width), seed, dtype)
        packed = pack2(codes)
        assert packed.dtype == torch.uint8 and packed.shape == (3, -(-width // 4))
        assert packed.tolist() == [slow_bytes(row) for row in codes.tolist()]
        assert torch.equal(unpack2(packed, width), codes.to(torch.uint8))


def test_every_byte_that_packing_makes_is_unpacked():
    every = torch.arange(4**4, dtype=torch.uint8).unsqueeze(1)
    assert torch.equal(pack2(unpack2(every, 4)), every)


@pytest.mark.parametrize("shape", [(8,), (2, 3, 8), (0, 8), (2, 0)])
def test_any_number_of_axes(shape):
    codes = random_codes(shape)
    assert torch.equal(unpack2(pack2(codes), shape[-1]), codes.to(torch.uint8))


def test_meta_device_and_views():
    codes = random_codes((6, 16))
    assert unpack2(pack2(codes.to("meta")), 16).shape == (6, 16)
    before = codes.clone()
    assert torch.equal(pack2(codes.t()), pack2(codes.t().contiguous()))
    assert torch.equal(codes, before)


def test_compiled_is_eager():
    codes = random_codes((4, 30))
    packed = torch.compile(pack2, fullgraph=True)(codes)
    assert torch.equal(packed, pack2(codes))
    unpacked = torch.compile(lambda p: unpack2(p, 30), fullgraph=True)(packed)
    assert torch.equal(unpacked, codes.to(torch.uint8))
