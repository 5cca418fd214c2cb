"""Bit packing against a byte-by-byte reference, round trips, widths that fill no byte."""

import pytest
import torch

from hestia_tune.tensors import pack2, pack_base3, unpack2, unpack_base3

PACKINGS = {"2bit": (pack2, unpack2, 4, 4), "base3": (pack_base3, unpack_base3, 5, 3)}
packings = pytest.mark.parametrize(("pack", "unpack", "per_byte", "base"), PACKINGS.values())


def random_codes(shape, base, seed=0, dtype=torch.int8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, base, shape, generator=generator).to(dtype)


def slow_bytes(row: list[int], per_byte: int, base: int) -> list[int]:
    """Little end first, the last byte filled up with zeros."""
    chunks = [row[at : at + per_byte] for at in range(0, len(row), per_byte)]
    return [sum(code * base**i for i, code in enumerate(chunk)) for chunk in chunks]


@packings
@pytest.mark.parametrize("width", [*range(12), 64, 97])
def test_bytes_and_round_trip(pack, unpack, per_byte, base, width):
    for seed, dtype in enumerate([torch.int8, torch.uint8, torch.int64]):
        codes = random_codes((3, width), base, seed, dtype)
        packed = pack(codes)
        assert packed.dtype == torch.uint8 and packed.shape == (3, -(-width // per_byte))
        assert packed.tolist() == [slow_bytes(row, per_byte, base) for row in codes.tolist()]
        assert torch.equal(unpack(packed, width), codes.to(torch.uint8))


@packings
def test_every_byte_that_packing_makes_is_unpacked(pack, unpack, per_byte, base):
    every = torch.arange(base**per_byte, dtype=torch.uint8).unsqueeze(1)
    assert torch.equal(pack(unpack(every, per_byte)), every)


@packings
@pytest.mark.parametrize("shape", [(8,), (2, 3, 8), (0, 8), (2, 0)])
def test_any_number_of_axes(pack, unpack, per_byte, base, shape):
    codes = random_codes(shape, base)
    assert torch.equal(unpack(pack(codes), shape[-1]), codes.to(torch.uint8))


@packings
def test_meta_device_and_views(pack, unpack, per_byte, base):
    codes = random_codes((6, 16), base)
    assert unpack(pack(codes.to("meta")), 16).shape == (6, 16)
    before = codes.clone()
    assert torch.equal(pack(codes.t()), pack(codes.t().contiguous()))
    assert torch.equal(codes, before)


@packings
def test_compiled_is_eager(pack, unpack, per_byte, base):
    codes = random_codes((4, 30), base)
    packed = torch.compile(pack, fullgraph=True)(codes)
    assert torch.equal(packed, pack(codes))
    unpacked = torch.compile(lambda p: unpack(p, 30), fullgraph=True)(packed)
    assert torch.equal(unpacked, codes.to(torch.uint8))
