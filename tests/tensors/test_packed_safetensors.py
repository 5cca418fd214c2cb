"""Packed weights in safetensors files: round trips, the documented layout, damaged files."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from hestia_tune.functional import ternary_codes
from hestia_tune.tensors import TernaryTensor, load_safetensors, save_safetensors

PACKINGS = ["2bit", "base3"]
packings = pytest.mark.parametrize("packing", PACKINGS)


def packed(group_size, shape=(6, 96), dtype=torch.bfloat16, seed=0) -> TernaryTensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    return TernaryTensor.from_codes(*ternary_codes(weight, group_size=group_size), dtype=dtype)


def state() -> dict[str, torch.Tensor]:
    return {
        "a.weight": packed(32),
        "a.bias": torch.arange(6.0),
        "b.weight": packed("channel", (3, 7), torch.float32),
        "weight": packed("tensor", (2, 5), torch.float16),
        "norm": torch.ones(4, dtype=torch.bfloat16),
    }


def assert_same(actual, expected) -> None:
    assert type(actual) is type(expected) and actual.dtype == expected.dtype
    if isinstance(expected, TernaryTensor):
        assert actual.shape == expected.shape and actual.block_size == expected.block_size
        assert torch.equal(actual.qdata, expected.qdata)
        assert torch.equal(actual.scale, expected.scale)
    else:
        assert torch.equal(actual, expected)


@packings
def test_round_trip(tmp_path, packing):
    path = tmp_path / "model.safetensors"
    save_safetensors(state(), path, {"source": "a test"}, packing=packing)
    loaded, metadata = load_safetensors(path)
    assert loaded.keys() == state().keys() and metadata == {"source": "a test"}
    for name, value in state().items():
        assert_same(loaded[name], value)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


@packings
def test_the_documented_layout_can_be_read_without_this_package(tmp_path, packing):
    weight = packed(32)
    save_safetensors({"w": weight}, tmp_path / "m", packing=packing)
    entries = load_file(tmp_path / "m")
    with safe_open(tmp_path / "m", "pt") as file:
        document = json.loads(file.metadata()["hestia_tune"])
    assert document == {
        "format_version": 1,
        "packed": {
            "w": {
                "shape": [6, 96],
                "block_size": [1, 32],
                "dtype": "bfloat16",
                "packing": packing,
            }
        },
    }
    assert entries.keys() == {"w.qdata", "w.scale"}
    base, per_byte = (4, 4) if packing == "2bit" else (3, 5)
    codes = [
        [entries["w.qdata"][i, j // per_byte].item() // base ** (j % per_byte) % base - 1]
        for i in range(6)
        for j in range(96)
    ]
    assert torch.equal(torch.tensor(codes, dtype=torch.int8).view(6, 96), weight.codes())
    assert torch.equal(entries["w.scale"], weight.scale)


def test_base_3_is_a_fifth_smaller(tmp_path):
    weight = packed(128, (64, 1280))
    sizes = {}
    for packing in PACKINGS:
        save_safetensors({"w": weight}, tmp_path / packing, packing=packing)
        stored = load_file(tmp_path / packing)
        sizes[packing] = sum(value.nbytes for value in stored.values()) / weight.numel()
    assert sizes["2bit"] == 1 / 4 + 2 / 128 and sizes["base3"] == 1 / 5 + 2 / 128


def test_a_loaded_state_dict_goes_into_a_plain_model(tmp_path):
    linear = nn.Linear(96, 6, device="meta").requires_grad_(False)
    save_safetensors({"weight": packed(32), "bias": torch.ones(6).bfloat16()}, tmp_path / "m")
    linear.load_state_dict(load_safetensors(tmp_path / "m")[0], assign=True)
    x = torch.ones(2, 96, dtype=torch.bfloat16)
    expected = torch.nn.functional.linear(x, packed(32).dequantize(), linear.bias)
    assert torch.equal(linear(x), expected)


def test_parameters_views_and_shared_memory(tmp_path):
    weight, plain = packed(32), torch.arange(12.0).view(3, 4)
    saved = {
        "a": nn.Parameter(weight, requires_grad=False),
        "b": weight[2:4],
        "c": weight[:, 32:],
        "d": nn.Parameter(plain),
        "e": plain.t(),
    }
    save_safetensors(saved, tmp_path / "m")
    loaded, _ = load_safetensors(tmp_path / "m")
    dense = weight.dequantize()
    for name, expected in (("a", dense), ("b", dense[2:4]), ("c", dense[:, 32:])):
        assert torch.equal(loaded[name].dequantize(), expected)
    assert torch.equal(loaded["d"], plain) and torch.equal(loaded["e"], plain.t())


@pytest.mark.parametrize(
    ("saved", "options", "error", "message"),
    [
        ({"w": packed(32).t()}, {}, TypeError, "w must be a plain tensor or a TernaryTensor"),
        ({"w": packed(32)}, {"packing": "5bit"}, ValueError, "one of 2bit, base3; got '5bit'"),
        ({"w": packed(32)}, {"metadata": {"hestia_tune": ""}}, ValueError, "format's own"),
        ({"w": packed(32), "w.scale": torch.ones(1)}, {}, ValueError, "two tensors .* w.scale"),
        ({"w.scale": torch.ones(1), "w": packed(32)}, {}, ValueError, "two tensors .* w.scale"),
    ],
)
def test_what_cannot_be_saved_leaves_no_file(tmp_path, saved, options, error, message):
    with pytest.raises(error, match=message):
        save_safetensors(saved, tmp_path / "m", **options)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    import hestia_tune.tensors.serialization as serialization

    path = tmp_path / "m"
    save_safetensors({"w": packed(32)}, path)

    def full_disk(entries, temporary, metadata):
        temporary.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(serialization, "save_file", full_disk)
    with pytest.raises(OSError, match="cannot write .*m: .*No space left"):
        save_safetensors({"w": packed("channel")}, path)
    assert [file.name for file in tmp_path.iterdir()] == ["m"]
    assert_same(load_safetensors(path)[0]["w"], packed(32))
    with pytest.raises(OSError, match="cannot write"):
        save_safetensors({"w": packed(32)}, tmp_path / "no folder" / "m")


def rewrite(path, change):
    """Saves the file anew with its entries and its document changed by ``change``."""
    with safe_open(path, "pt") as file:
        document = json.loads(file.metadata()["hestia_tune"])
    entries = load_file(path)
    change(entries, document)
    save_file(entries, path, metadata={"hestia_tune": json.dumps(document)})


CHANGES = {
    "w lacks 'w.scale'": lambda entries, document: entries.pop("w.scale"),
    "w lacks 'block_size'": lambda entries, document: document["packed"]["w"].pop("block_size"),
    "format_version must be 1; got 2": lambda entries, document: document.update(format_version=2),
    "packed weights is missing": lambda entries, document: document.pop("packed"),
    "unknown packing '7bit'": lambda e, document: document["packed"]["w"].update(packing="7bit"),
    "w: qdata must hold 4": lambda e, document: document["packed"]["w"].update(shape=[6, 97]),
    "w: scale.shape times": lambda e, document: document["packed"]["w"].update(block_size=[1, 16]),
    "w: a TernaryTensor presents": lambda e, doc: doc["packed"]["w"].update(dtype="int8"),
    "w: qdata must be uint8": lambda e, doc: e.update({"w.qdata": e["w.qdata"].to(torch.int8)}),
    "w: its layout must": lambda entries, document: document["packed"].update(w=3),
    "w: no ternary codes": lambda entries, document: entries["w.qdata"].fill_(255),
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_file_whose_parts_do_not_fit_is_refused(tmp_path, message):
    path = tmp_path / "m"
    save_safetensors({"w": packed(32)}, path)
    rewrite(path, CHANGES[message])
    with pytest.raises(ValueError, match=f"m cannot be read as packed weights: .*{message}"):
        load_safetensors(path)


def test_damaged_base_3_is_refused(tmp_path):
    path = tmp_path / "m"
    save_safetensors({"w": packed(32)}, path, packing="base3")
    rewrite(path, lambda entries, document: entries["w.qdata"].fill_(243))
    with pytest.raises(ValueError, match="w: no ternary codes"):
        load_safetensors(path)
    rewrite(path, lambda entries, document: document["packed"]["w"].update(shape=[6, 101]))
    with pytest.raises(ValueError, match="cannot be read"):
        load_safetensors(path)


def test_foreign_and_damaged_files(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "foreign")
    with pytest.raises(ValueError, match="written by something else"):
        load_safetensors(tmp_path / "foreign")
    (tmp_path / "text").write_text("no tensors here")
    with pytest.raises(ValueError, match="cannot be read"):
        load_safetensors(tmp_path / "text")
    save_safetensors({"w": packed(32)}, tmp_path / "cut")
    (tmp_path / "cut").write_bytes((tmp_path / "cut").read_bytes()[:-10])
    with pytest.raises(ValueError, match="cannot be read"):
        load_safetensors(tmp_path / "cut")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_safetensors(tmp_path / "nothing")
