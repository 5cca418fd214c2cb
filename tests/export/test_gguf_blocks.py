"""Tests block packing: round trips, slow references of each layout, and weights that do not fit."""

import gguf
import numpy as np
import pytest
import torch

from hestia_tune.config import ConvertConfig
from hestia_tune.export.gguf import AUTO, BLOCK_TYPES, choose_block_type
from hestia_tune.functional import hard_ternary
from hestia_tune.methods.groups import CODEBOOKS, SYMMETRIC, TERNARY, TWO_BIT
from hestia_tune.tensors import TernaryTensor

NAMES = tuple(BLOCK_TYPES)
FP16_MIN_NORMAL, FP16_MAX = 2.0**-14, 65504.0


def random_rows(name: str, seed: int, rows: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random codes, two blocks per row, and a scale for each block."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(-1, 2, (rows, 2 * BLOCK_TYPES[name].block), dtype=np.int8)
    codes[:3] = np.array([[-1], [0], [1]])
    scales = torch.from_numpy(generator.uniform(0.001, 2, (rows, 2))).bfloat16()
    scales[1, 1] = 0
    return torch.from_numpy(codes), scales


def slow_decode(name: str, block: bytes) -> list[int]:
    """Decode one block, weight by weight, as ggml's source describes the layout."""
    size = BLOCK_TYPES[name].block
    if name == "Q2_0":
        qs = block[2:]
        return [((qs[j // 4] >> (2 * (j % 4))) & 3) - 1 for j in range(size)]
    if name == "Q4_0":
        qs = block[2:]
        return [((qs[j % 16] >> (4 * (j // 16))) & 15) - 8 for j in range(size)]
    if name == "TQ2_0":
        return [
            ((block[32 * (j // 128) + j % 32] >> (2 * (j % 128 // 32))) & 3) - 1
            for j in range(size)
        ]
    codes = []
    for j in range(size):
        if j < 160:
            byte, trit = block[j % 32], j // 32
        elif j < 240:
            byte, trit = block[32 + (j - 160) % 16], (j - 160) // 16
        else:
            byte, trit = block[48 + (j - 240) % 4], (j - 240) // 4
        codes.append(((byte * 3**trit % 256) * 3 >> 8) - 1)  # a multiplication and its overflow
    return codes


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_packing_has_an_exact_inverse(name, seed):
    block_type = BLOCK_TYPES[name]
    codes, scales = random_rows(name, seed)
    data = block_type.pack(codes, scales, "layer")
    assert data.dtype == np.uint8 and data.shape == (len(codes), 2, block_type.num_bytes)
    found = block_type.unpack(data.reshape(-1))
    assert found.dtype == np.float32
    expected = codes * scales.float().repeat_interleave(block_type.block, 1)
    assert torch.equal(torch.from_numpy(found).view(codes.shape), expected)


@pytest.mark.parametrize("name", NAMES)
def test_packing_is_ggmls_layout(name):
    block_type = BLOCK_TYPES[name]
    codes, scales = random_rows(name, seed=7)
    blocks = block_type.pack(codes, scales, "layer").reshape(-1, block_type.num_bytes)
    codes, scales = codes.view(len(blocks), -1), scales.view(-1).tolist()
    for codes_of_block, scale, block in zip(codes, scales, blocks, strict=True):
        assert slow_decode(name, bytes(block)) == codes_of_block.tolist()
        found = bytes(block[:2] if name.startswith("Q") else block[-2:])
        assert np.frombuffer(found, "<f2")[0] == scale  # also in a block of zeros


@pytest.mark.parametrize("name", ["Q4_0", "TQ1_0", "TQ2_0"])
def test_the_gguf_package_knows_the_types(name):
    quant_type = gguf.GGMLQuantizationType[name]
    assert quant_type == BLOCK_TYPES[name].ggml_id
    assert gguf.LlamaFileType[f"MOSTLY_{name}"] == BLOCK_TYPES[name].file_type
    expected_size = (BLOCK_TYPES[name].block, BLOCK_TYPES[name].num_bytes)
    assert gguf.GGML_QUANT_SIZES[quant_type] == expected_size


def test_types_are_sorted_by_size():
    bits = [8 * kind.num_bytes / kind.block for kind in BLOCK_TYPES.values()]
    assert bits == sorted(bits) == [1.6875, 2.0625, 2.25, 4.5]


def test_the_config_allows_every_type_and_the_last_choice_is_the_most_general():
    for names in (*NAMES, [*NAMES], "auto"):
        assert ConvertConfig(block_type=names).block_type == names
    assert ConvertConfig().block_type == "auto"
    for group_size in (32, 64, 96, 128, 256, "channel", "tensor"):
        for levels in CODEBOOKS:
            assert BLOCK_TYPES[AUTO[-1]].fits(768, group_size, levels)


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256, "channel", "tensor"])
@pytest.mark.parametrize("name", NAMES)
def test_every_block_of_a_group_has_its_scale(name, group_size, rows):
    torch.manual_seed(0)
    kind, hard = BLOCK_TYPES[name], hard_ternary(torch.randn(rows, 512), group_size=group_size)
    if not kind.fits(512, group_size):
        with pytest.raises(ValueError, match=f"no block of {name} holds layer"):
            choose_block_type((name,), 512, group_size, "layer")
        return
    packed = TernaryTensor.from_hard(hard, group_size=group_size)
    data = kind.pack(packed.codes(), packed.scale, "layer")
    assert data.shape == (rows, 512 // kind.block, kind.num_bytes)
    assert torch.equal(torch.from_numpy(kind.unpack(data.reshape(-1))).view(rows, 512), hard)


def test_a_group_of_zeros_has_scale_zero():
    hard = hard_ternary(torch.randn(4, 64), group_size=32)
    hard[2, 32:] = 0
    packed = TernaryTensor.from_hard(hard, group_size=32)
    assert packed.scale[2, 1] == 0 and not packed.codes()[2, 32:].any()
    assert torch.equal(packed_scales(packed.scale), packed.scale.float())


def packed_scales(scales: torch.Tensor) -> torch.Tensor:
    """Pack scales of Q4_0, two blocks per row, and return the scales in the bytes."""
    codes = torch.ones(len(scales), 64, dtype=torch.int8)
    blocks = BLOCK_TYPES["Q4_0"].pack(codes, scales, "blk.7")
    return torch.from_numpy(blocks[..., :2].copy().view(np.float16)[..., 0]).float()


def test_scales_are_exact_in_float16_or_refused():
    exact = torch.tensor([[0.0, FP16_MIN_NORMAL], [0.0123, 1.0], [100.5, 65280.0]]).bfloat16()
    assert torch.equal(packed_scales(exact), exact.float())
    for value in (FP16_MIN_NORMAL / 2, 2.0**-30, 65536.0):
        scales = torch.ones(3, 2).bfloat16()
        scales[2, 1] = value
        with pytest.raises(ValueError, match="group 1 of row 2 of blk.7 has the scale"):
            packed_scales(scales)


def test_every_normal_bfloat16_scale_survives():
    bits = torch.arange(1, 2**15 - 1, dtype=torch.int16)
    values = bits.view(torch.bfloat16)
    values = values[(values.float() >= FP16_MIN_NORMAL) & (values.float() <= FP16_MAX)]
    assert len(values) > 3000
    assert torch.equal(packed_scales(values[:, None])[:, 0], values.float())


@pytest.mark.parametrize(
    ("in_features", "group_size", "expected"),
    [
        (512, 128, "Q2_0"),
        (576, 64, "Q2_0"),
        (576, 192, "Q2_0"),
        (576, 96, "Q4_0"),
        (576, 32, "Q4_0"),
        (512, 256, "TQ1_0"),
        (1536, "channel", "TQ1_0"),
        (1536, "tensor", "TQ1_0"),
        (576, "channel", "Q2_0"),
        (96, "tensor", "Q4_0"),
    ],
)
def test_the_smallest_exact_type_is_chosen(in_features, group_size, expected):
    chosen = choose_block_type(NAMES, in_features, group_size, "layer")
    assert chosen.name == expected
    smaller = NAMES[: NAMES.index(expected)]
    assert not any(BLOCK_TYPES[name].fits(in_features, group_size) for name in smaller)
    assert choose_block_type(("Q4_0",), in_features, group_size, "layer").name == "Q4_0"


EXCLUDE = r"""set quantizer.exclude='\["\*.up_proj"\]' and train again$"""


@pytest.mark.parametrize(
    ("names", "in_features", "group_size", "levels", "widths", "remedies"),
    [
        # Another type holds the groups; or groups of another size fit the type.
        (["TQ2_0", "Q2_0"], 576, 96, TERNARY, [], ["convert.block_type=Q4_0", "group_size=64"]),
        (["TQ2_0"], 512, 128, TERNARY, [], ["convert.block_type=Q2_0", "group_size=256"]),
        # 256 does not divide 640, and 64 divides both.
        (["Q2_0"], 1280, 32, TERNARY, [640], ["convert.block_type=Q4_0", "group_size=128"]),
        (["TQ2_0"], 1280, 128, TERNARY, [640], ["convert.block_type=Q2_0", None]),
        # Q4_0 is the type that was asked for, so it is no remedy.
        (["Q4_0"], 576, 16, TERNARY, [1536], [None, "group_size=64"]),
        (["Q2_0", "Q4_0"], 96, 16, TERNARY, [], [None, "group_size=32"]),
        (["Q4_0"], 160, 10, TERNARY, [48], [None, None]),
        (["Q4_0"], 172, "channel", TERNARY, [], [None, None]),
        (["Q2_0"], 512, 128, SYMMETRIC, [], ["convert.block_type=Q4_0", None]),
        (["TQ2_0"], 512, 256, TWO_BIT, [], ["convert.block_type=Q2_0", None]),
        (["Q2_0"], 96, 48, TERNARY, [], [None, "group_size=32 and convert.block_type=Q4_0"]),
    ],
)
def test_a_refusal_names_what_helps_and_is_not_set(
    names, in_features, group_size, levels, widths, remedies
):
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=EXCLUDE) as caught:
        choose_block_type(names, in_features, group_size, name, levels, widths=widths)
    text = str(caught.value).partition("; ")[2]
    found = [f"use {remedies[0]}"] if remedies[0] else []
    found += [f"train again with quantizer.{remedies[1]}"] if remedies[1] else []
    assert text.split(", or ")[:-1] == found


def test_the_layer_has_the_name_that_exclude_knows():
    with pytest.raises(ValueError, match=r"""exclude='\["\*.w2"\]'"""):
        choose_block_type(["Q4_0"], 40, "channel", "model.mlp.down_proj.weight", layer="0.mlp.w2")
