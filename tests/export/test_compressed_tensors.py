"""Tests the pack-quantized layout in compressed-tensors and transformers, and its errors."""

import json
import sys
from pathlib import Path

import pytest
import torch
from gguf_models import DEMO, edit_json, random_qwen2, ternarize
from safetensors.torch import load_file, save_file

from hestia_tune.errors import InputError
from hestia_tune.export import huggingface as folder_export
from hestia_tune.export.compressed_tensors import write_compressed_tensors
from hestia_tune.models.folder import ModelFolder

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationConfig  # noqa: E402

NAME = "model.layers.1.mlp.up_proj.weight"
PARTS = ("packed", "scale", "shape")


def load(folder: Path, dtype: torch.dtype, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=dtype, **options)


def dense_on_load() -> dict:
    return {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(torch.arange(2, 42)[None]).logits


def layout(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def unpacked(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Unpack NAME.weight from its parts, one weight after another."""
    words, scales, shape = (state[f"{name}_{part}"] for part in PARTS)
    rows, columns = shape.tolist()
    weight = torch.empty(rows, columns, dtype=torch.bfloat16)
    for row in range(rows):
        for column in range(columns):
            field = (int(words[row, column // 16]) >> 2 * (column % 16)) & 3
            group = column // (columns // scales.shape[1])
            weight[row, column] = (field - 2) * scales[row, group]
    return weight


def refuse(folder, tmp_path, quantized, error, match, **options):
    target = tmp_path / "out" / "model"
    target.parent.mkdir(exist_ok=True)
    with pytest.raises(error, match=match):
        write_compressed_tensors(ModelFolder(folder, quantized), target, **options)
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize("group_size", [32, 128, "channel", "tensor"])
@pytest.mark.parametrize("kind", ["demo", "qwen2"])
def test_logits_equal_the_hard_models(tmp_path, kind, group_size):
    folder, target = tmp_path / "model", tmp_path / "out"
    make = random_qwen2 if kind == "qwen2" else lambda f, g: ternarize(DEMO, f, g)
    quantized = make(folder, group_size)
    summary = write_compressed_tensors(ModelFolder(folder, quantized), target)
    for dtype in (torch.float32, torch.bfloat16):
        expected = logits(load(folder, dtype))
        model = load(target, dtype)
        layer = model.model.layers[0].mlp.up_proj
        assert layer.weight_packed.dtype == torch.int32  # packed until the first call
        assert torch.equal(logits(model), expected)
        dense = load(target, dtype, **dense_on_load())
        assert type(dense.model.layers[0].mlp.up_proj.weight) is torch.nn.Parameter
        assert torch.equal(logits(dense), expected)
        hard = load(folder, dtype).state_dict()
        assert all(torch.equal(tensor, hard[name]) for name, tensor in dense.state_dict().items())
    scales = {32: 16 / 32, 128: 16 / 128}.get(group_size, 0)
    assert summary["quantized_bits_per_weight"] == pytest.approx(2 + scales, abs=0.2)
    assert summary["bytes"] == (target / "model.safetensors").stat().st_size
    assert summary["whole_bits_per_weight"] == 8 * summary["bytes"] / summary["parameters"]
    counts = {"I32": len(quantized), "I64": len(quantized)}
    assert summary["types"] == counts | {"BF16": len(load_file(folder / "model.safetensors"))}


@pytest.mark.parametrize("group_size", [4, "channel", "tensor"])
def test_rows_that_do_not_fill_the_last_int32(tmp_path, group_size):
    folder, target = tmp_path / "model", tmp_path / "out"
    quantized = random_qwen2(folder, group_size, intermediate_size=172)
    write_compressed_tensors(ModelFolder(folder, quantized), target)
    state = load_file(target / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    assert state[f"{name}_packed"].shape == (256, 11)
    expected = logits(load(folder, torch.float32))
    assert torch.equal(logits(load(target, torch.float32)), expected)
    assert torch.equal(logits(load(target, torch.float32, **dense_on_load())), expected)


@pytest.mark.parametrize("group_size", [4, "channel", "tensor"])
def test_every_field_holds_its_code(tmp_path, group_size):
    folder, target = tmp_path / "model", tmp_path / "out"
    small = {"hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
    random_qwen2(folder, group_size, intermediate_size=44, **small)
    layer = "model.layers.0"
    names = {f"{layer}.mlp.down_proj.weight", f"{layer}.self_attn.k_proj.weight"}
    write_compressed_tensors(ModelFolder(folder, dict.fromkeys(names, group_size)), target)
    hard, state = (load_file(f / "model.safetensors") for f in (folder, target))
    parts = {f"{name}_{part}" for name in names for part in PARTS}
    assert state.keys() == (hard.keys() - names) | parts
    for name, tensor in hard.items():
        found = unpacked(state, name) if name in names else state[name]
        assert found.dtype == tensor.dtype == torch.bfloat16
        assert torch.equal(found, tensor), name


@pytest.mark.parametrize("group_size", [64, "channel"])
def test_the_library_writes_equal_parts(tmp_path, group_size):
    """Its compressor makes equal parts from the trained scales; its decompressor inverts them."""
    folder, target = tmp_path / "model", tmp_path / "out"
    quantized = random_qwen2(folder, group_size)
    write_compressed_tensors(ModelFolder(folder, quantized), target)
    scheme = QuantizationConfig.model_validate(layout(target)).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    hard, state = (load_file(f / "model.safetensors") for f in (folder, target))
    for name in quantized:
        parts = {f"weight_{part}": state[f"{name}_{part}"] for part in PARTS}
        assert torch.equal(compressor.decompress(parts, scheme)["weight"], hard[name])
        theirs = compressor.compress(
            {"weight": hard[name], "weight_scale": parts["weight_scale"]}, scheme
        )
        assert theirs.keys() == parts.keys()
        assert all(torch.equal(theirs[key], parts[key]) for key in parts)


def test_groups_of_zeros_are_exact(demo, tmp_path):
    folder, quantized = demo
    state = load_file(folder / "model.safetensors")
    state[NAME][3:9] = 0
    state["model.layers.0.mlp.down_proj.weight"][:] = 0
    save_file(state, folder / "model.safetensors")
    write_compressed_tensors(ModelFolder(folder, quantized), tmp_path / "out")
    expected = logits(load(folder, torch.bfloat16))
    assert torch.equal(logits(load(tmp_path / "out", torch.bfloat16)), expected)


def test_several_group_sizes_and_layers_left_dense(tmp_path):
    folder, target = tmp_path / "model", tmp_path / "out"
    names = ternarize(DEMO, folder, 128)  # most rows are one group: hidden_size is 128
    choices = {"up_proj": 128, "down_proj": 64, "q_proj": "channel", "o_proj": "channel"}
    quantized = {n: choices[k] for n in names if (k := n.split(".")[-2]) in choices}
    write_compressed_tensors(ModelFolder(folder, quantized), target)
    groups = {}
    for group in layout(target)["config_groups"].values():
        assert group["format"] == "pack-quantized"  # older versions read the format here
        weights = group["weights"]
        key = weights.get("group_size") or weights["strategy"]
        groups[key] = set(group["targets"])
        assert (weights["num_bits"], weights["type"], weights["symmetric"]) == (2, "int", True)
    assert groups == {
        size: {n.removesuffix(".weight") for n in quantized if quantized[n] == size}
        for size in (128, 64, "channel")
    }
    dense = {n.removesuffix(".weight") for n in names if n not in quantized} | {"lm_head"}
    assert set(layout(target)["ignore"]) == dense
    expected = logits(load(folder, torch.float32))
    model = load(target, torch.float32)
    assert not hasattr(model.model.layers[0].mlp.gate_proj, "weight_packed")
    assert torch.equal(logits(model), expected)
    # With dequantize=True, transformers handles one int group size, and whole rows beside it.
    quantized = {n: s for n, s in quantized.items() if s != 64}
    write_compressed_tensors(ModelFolder(folder, quantized), target, overwrite=True)
    assert torch.equal(logits(load(target, torch.float32, **dense_on_load())), expected)


def test_tied_embeddings_stay_tied(demo, tmp_path):
    folder, quantized = demo
    write_compressed_tensors(ModelFolder(folder, quantized), tmp_path / "out")
    assert layout(tmp_path / "out")["ignore"] == ["lm_head"]
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    model = load(tmp_path / "out", torch.bfloat16)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_config_and_side_files(demo, tmp_path):
    folder, quantized = demo
    (folder / "hestia.json").write_text('{"step": 7}')
    write_compressed_tensors(ModelFolder(folder, quantized), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    described = config.pop("quantization_config")
    assert config == json.loads((folder / "config.json").read_text())
    assert (described["quant_method"], described["format"], described["quantization_status"]) == (
        "compressed-tensors",
        "pack-quantized",
        "compressed",
    )
    assert json.loads((tmp_path / "out" / "hestia.json").read_text()) == {"step": 7}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("def main():").input_ids


def test_an_existing_target_is_kept(demo, tmp_path):
    folder, quantized = demo
    target = tmp_path / "out"
    write_compressed_tensors(ModelFolder(folder, quantized), target)
    with pytest.raises(ValueError, match="overwrite=True"):
        write_compressed_tensors(ModelFolder(folder, quantized), target)
    before = {file: file.read_bytes() for file in target.iterdir()}
    with pytest.raises(ValueError, match="is not a hard weight"):
        wrong = ModelFolder(folder, dict.fromkeys(quantized, "tensor"))
        write_compressed_tensors(wrong, target, overwrite=True)
    assert {file: file.read_bytes() for file in target.iterdir()} == before
    some = {NAME: 128}
    write_compressed_tensors(ModelFolder(folder, some), target, overwrite=True)
    assert sum(n.endswith("_packed") for n in load_file(target / "model.safetensors")) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]
    write_compressed_tensors(ModelFolder(target, some), tmp_path / "twice")
    once, twice = (load_file(path / "model.safetensors") for path in (target, tmp_path / "twice"))
    assert once.keys() == twice.keys() and all(
        torch.equal(once[name], twice[name]) for name in once
    )
    changed = json.loads((target / "config.json").read_text())
    changed["quantization_config"]["format"] = "marlin-24"
    edit_json(target / "config.json", **changed)
    with pytest.raises(ValueError, match=r"is quantized \(compressed-tensors\)"):
        write_compressed_tensors(ModelFolder(target, some), tmp_path / "thrice")


def test_wrong_names_and_sizes(demo, tmp_path):
    folder, quantized = demo
    refuse(folder, tmp_path, {}, ValueError, "got none")
    refuse(folder, tmp_path, {NAME + "s": 128}, ValueError, f"{NAME}s is none of")
    refuse(folder, tmp_path, {NAME: 96}, ValueError, f"96 does not divide .*{NAME}")
    refuse(folder, tmp_path, {"model.norm.weight": 128}, ValueError, "only matrices")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state = load_file(folder / "model.safetensors")
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        save_file(state, folder / "model.safetensors")
        edit_json(folder / "config.json", tie_word_embeddings=False)
        refuse(folder, tmp_path, {name: 128}, ValueError, f"output head .* leave out {name}")


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "perceptive", "architectures": ["PerceptiveForCausalLM"]},
        {"model_type": "vit", "architectures": ["ViTModel"]},
    ],
)
def test_models_that_transformers_cannot_build(demo, tmp_path, changes):
    folder, quantized = demo
    edit_json(folder / "config.json", **changes)
    refuse(
        folder,
        tmp_path,
        quantized,
        ValueError,
        "Transformers does not|is not a causal language model",
    )


@pytest.mark.parametrize("file", ["tokenizer.json", "config.json", "model.safetensors"])
def test_missing_files(demo, tmp_path, file):
    folder, quantized = demo
    (folder / file).unlink()
    refuse(folder, tmp_path, quantized, InputError, file)


def test_scales_that_bfloat16_cannot_hold(demo, tmp_path):
    folder, quantized = demo
    state = {n: t.float() for n, t in load_file(folder / "model.safetensors").items()}
    save_file(state, folder / "model.safetensors")
    write_compressed_tensors(ModelFolder(folder, quantized), tmp_path / "exact")
    state[NAME][2] *= 1.001
    save_file(state, folder / "model.safetensors")
    refuse(folder, tmp_path, quantized, ValueError, f"exact in bfloat16; {NAME}")


@pytest.mark.parametrize("how", ["raises", "differs"])
def test_a_folder_that_transformers_loads_wrongly_is_refused(demo, tmp_path, monkeypatch, how):
    folder, quantized = demo
    auto = transformers.AutoModelForCausalLM
    genuine = auto.from_pretrained

    def other(*args, **options):
        if how == "raises":
            raise AttributeError("'OddLinear' object has no\nattribute 'weight'")
        model = genuine(*args, **options)
        model.model.norm.weight.data.mul_(torch.linspace(0.9, 1.1, 128))
        return model

    monkeypatch.setattr(auto, "from_pretrained", other)
    reason = {
        "raises": "it raises: 'OddLinear' object has no attribute 'weight'",
        "differs": "their relative difference is 0.*",
    }[how]
    message = f"packed llama .*; {reason}; export to another format"
    refuse(folder, tmp_path, quantized, ValueError, message)


@pytest.mark.parametrize("part", PARTS)
def test_a_difference_in_the_file_is_found(demo, tmp_path, monkeypatch, part):
    folder, quantized = demo
    save = folder_export.save_torch_state_dict

    def flip_a_bit(state, staging, **options):
        save(state, staging, **options)
        written = load_file(staging / "model.safetensors")
        bytes_ = written[f"{NAME}_{part}"].view(-1).view(torch.uint8)
        bytes_[0] ^= 1
        save_file(written, staging / "model.safetensors")

    monkeypatch.setattr(folder_export, "save_torch_state_dict", flip_a_bit)
    refuse(folder, tmp_path, quantized, RuntimeError, f"{NAME}_{part} .* differs")


def test_a_missing_package_names_the_remedy(demo, tmp_path, monkeypatch):
    folder, quantized = demo
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    remedy = r"pip install 'hestia-tune\[compressed-tensors\]'"
    refuse(folder, tmp_path, quantized, InputError, remedy)


def test_a_real_model(tmp_path):
    stories = Path(__file__).parents[3] / "shared" / "models" / "stories260K"
    if not stories.is_dir():
        pytest.skip("needs ../shared")
    quantized = ternarize(stories, tmp_path / "model", "channel")
    write_compressed_tensors(ModelFolder(tmp_path / "model", quantized), tmp_path / "out")
    expected = logits(load(tmp_path / "model", torch.float32))
    assert torch.equal(logits(load(tmp_path / "out", torch.float32)), expected)
