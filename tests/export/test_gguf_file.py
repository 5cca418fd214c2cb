"""Tests the content of whole GGUF files with the reader of the gguf package."""

import json

import gguf
import numpy as np
import pytest
import torch
from gguf_models import (
    DEMO,
    assert_same,
    edit_json,
    expected_tensors,
    is_linear,
    random_qwen2,
    read_stock,
    read_tensor_infos,
    ternarize,
)
from safetensors.torch import load_file, save_file

from hestia_tune.export.gguf import BLOCK_TYPES, write_gguf
from hestia_tune.export.gguf_families import ROPE_FACTORS, LlamaModel
from hestia_tune.functional import hard_ternary
from hestia_tune.methods.straight_through import round_embedding
from hestia_tune.models.folder import ModelFolder


def fields(path) -> dict[str, object]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


@pytest.mark.parametrize(
    ("group_size", "block_type"),
    [(128, "Q4_0"), (32, "Q4_0"), ("channel", "TQ1_0,Q4_0"), ("tensor", "TQ2_0,Q4_0")],
)
def test_llama_comes_back_through_the_stock_reader(tmp_path, group_size, block_type):
    quantized = ternarize(DEMO, tmp_path / "model", group_size)
    path = tmp_path / "model.gguf"
    choice = block_type.split(",") if "," in block_type else block_type
    write_gguf(ModelFolder(tmp_path / "model", quantized), path, block_type=choice)
    assert_same(read_stock(path), expected_tensors(tmp_path / "model"))


@pytest.mark.parametrize("group_size", [256, "channel", "tensor"])
@pytest.mark.parametrize("block_type", ["TQ1_0", "TQ2_0"])
def test_qwen2_comes_back_through_the_stock_reader(tmp_path, group_size, block_type):
    quantized = random_qwen2(tmp_path / "model", group_size)
    path = tmp_path / "model.gguf"
    summary = write_gguf(ModelFolder(tmp_path / "model", quantized), path, block_type=block_type)
    assert_same(read_stock(path), expected_tensors(tmp_path / "model"))
    assert summary["types"][block_type] == len(quantized) == 14


@pytest.mark.parametrize(
    ("group_size", "block_type", "expected"),
    [
        ("channel", None, "TQ2_0"),
        (256, None, "TQ2_0"),
        (128, None, "Q2_0"),
        (64, "auto", "Q2_0"),
        ("channel", ("Q2_0", "Q4_0"), "Q2_0"),
        (256, "Q2_0", "Q2_0"),
        (32, ["Q2_0", "Q4_0"], "Q4_0"),
        (32, None, "Q4_0"),
        ("channel", tuple(BLOCK_TYPES), "TQ1_0"),
        (128, tuple(BLOCK_TYPES), "Q2_0"),
        (128, ("TQ2_0", "Q4_0"), "Q4_0"),
    ],
)
def test_block_types_in_the_file(tmp_path, group_size, block_type, expected):
    quantized = random_qwen2(tmp_path / "model", group_size)
    path = tmp_path / "m.gguf"
    options = {} if block_type is None else {"block_type": block_type}
    summary = write_gguf(ModelFolder(tmp_path / "model", quantized), path, **options)
    assert summary["types"] == {"BF16": 2, "F32": 11, expected: 14}


@pytest.mark.parametrize(
    ("embedding", "kind"), [("int4", "Q4_0"), ("int5", "Q5_0"), ("int8", "Q8_0")]
)
def test_rounded_embeddings_get_a_block_type(demo, tmp_path, embedding, kind):
    folder, quantized = demo
    source = ModelFolder(folder, quantized, embedding=embedding)
    summary = write_gguf(source, tmp_path / "tied.gguf", block_type="Q2_0")
    assert summary["types"] == {kind: 1, "F32": 9, "Q2_0": 28}
    quantized = random_qwen2(tmp_path / "untied", "channel")
    source = ModelFolder(tmp_path / "untied", quantized, embedding=embedding)
    assert len(source.embeddings) == 2
    write_gguf(source, tmp_path / "untied.gguf")
    found = read_stock(tmp_path / "untied.gguf")
    expected = expected_tensors(tmp_path / "untied")
    for name in ("token_embd.weight", "output.weight"):
        expected[name] = round_embedding(expected[name].float(), embedding)
    assert_same(found, expected)


def test_q2_0_does_not_need_the_packages_enum(demo, tmp_path):
    folder, quantized = demo
    members = list(gguf.GGMLQuantizationType)
    path = tmp_path / "model.gguf"
    summary = write_gguf(ModelFolder(folder, quantized), path, block_type="Q2_0")
    assert list(gguf.GGMLQuantizationType) == members
    assert summary["types"] == {"F16": 1, "F32": 9, "Q2_0": 28}
    expected, data = expected_tensors(folder), path.read_bytes()
    for name, (type_id, shape, position) in read_tensor_infos(path).items():
        assert shape == expected[name].shape
        if type_id != 42:
            continue
        blocks = np.frombuffer(data, np.uint8, shape.numel() // 64 * 18, position).reshape(-1, 18)
        scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        codes = np.stack([(blocks[:, 2 + j // 4] >> (j % 4 * 2)) & 3 for j in range(64)], 1)
        found = torch.from_numpy((codes.astype(np.float32) - 1) * scales).view(shape)
        assert torch.equal(found, expected[name]), name


def test_metadata(demo, tmp_path):
    folder, quantized = demo
    edit_json(folder / "tokenizer_config.json", chat_template="{{ messages }}")
    path = tmp_path / "model.gguf"
    write_gguf(ModelFolder(folder, quantized), path, block_type="Q4_0")
    found = fields(path)
    vocab = json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"]
    assert found["tokenizer.ggml.tokens"] == sorted(vocab, key=vocab.get)
    assert found["tokenizer.ggml.token_type"] == [3] + [1] * 1023
    assert len(found["tokenizer.ggml.merges"]) == 767
    expected = {
        "general.architecture": "llama",
        "general.file_type": 2,
        "llama.block_count": 4,
        "llama.context_length": 256,
        "llama.embedding_length": 128,
        "llama.feed_forward_length": 384,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 32,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": "{{ messages }}",
    }
    assert {key: found[key] for key in expected} == expected


def test_ids_without_a_token_become_unused_tokens(tmp_path):
    quantized = random_qwen2(tmp_path / "model", "channel")
    write_gguf(ModelFolder(tmp_path / "model", quantized), tmp_path / "m.gguf", block_type="TQ2_0")
    found = fields(tmp_path / "m.gguf")
    assert found["general.architecture"] == "qwen2"
    assert found["tokenizer.ggml.tokens"][1024:] == [f"[PAD{i}]" for i in range(1024, 1100)]
    assert found["tokenizer.ggml.token_type"][1024:] == [5] * 76


def test_summary_counts_bits(demo, tmp_path):
    folder, quantized = demo
    path = tmp_path / "model.gguf"
    summary = write_gguf(ModelFolder(folder, quantized), path, block_type="Q2_0")
    shapes = {k: v.shape for k, v in load_file(folder / "model.safetensors").items()}
    total = sum(shape.numel() for shape in shapes.values())
    assert summary["bytes"] == path.stat().st_size
    assert summary["parameters"] == total
    assert summary["quantized_parameters"] == sum(shapes[name].numel() for name in quantized)
    assert summary["quantized_bits_per_weight"] == 2.25
    assert summary["whole_bits_per_weight"] == 8 * path.stat().st_size / total
    dense = write_gguf(ModelFolder(folder, {}), tmp_path / "dense.gguf")
    assert dense["quantized_bits_per_weight"] is None and dense["types"] == {"F16": 29, "F32": 9}


def test_dense_matrices_keep_every_value(demo, tmp_path):
    folder, quantized = demo
    state = load_file(folder / "model.safetensors")
    state["model.embed_tokens.weight"][5, 7] = 1.0078125 * 2.0**-20  # too fine for float16
    save_file(state, folder / "model.safetensors")
    path = tmp_path / "m.gguf"
    summary = write_gguf(ModelFolder(folder, quantized), path, block_type="Q4_0")
    assert summary["types"] == {"BF16": 1, "F32": 9, "Q4_0": 28}
    assert_same(read_stock(path), expected_tensors(folder))


def test_a_float32_folder_and_shards_with_an_index(demo, tmp_path):
    folder, quantized = demo
    state = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    state["model.embed_tokens.weight"][0, 0] = 1 / 3
    save_file(state, folder / "model.safetensors")
    expected = expected_tensors(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in halves.items():
        save_file({name: state[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in halves.items() for name in members}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    summary = write_gguf(ModelFolder(folder, quantized), tmp_path / "m.gguf", block_type="Q4_0")
    assert summary["types"] == {"F32": 10, "Q4_0": 28}
    assert_same(read_stock(tmp_path / "m.gguf"), expected)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ValueError, match="b.safetensors"):
        write_gguf(ModelFolder(folder, quantized), tmp_path / "other.gguf")


def test_a_copy_of_tied_embeddings_is_left_out(demo, tmp_path):
    folder, quantized = demo
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, folder / "model.safetensors")
    write_gguf(ModelFolder(folder, quantized), tmp_path / "m.gguf")
    assert "output.weight" not in read_tensor_infos(tmp_path / "m.gguf")


def test_a_head_of_its_own_is_kept_though_config_json_says_tied(demo, tmp_path):
    """transformers uses it too."""
    folder, quantized = demo
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = -state["model.embed_tokens.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    write_gguf(ModelFolder(folder, quantized), tmp_path / "m.gguf", block_type="Q4_0")
    assert_same(read_stock(tmp_path / "m.gguf"), expected_tensors(folder))
    assert "output.weight" in read_tensor_infos(tmp_path / "m.gguf")


def test_llama3_rope_factors(demo):
    folder, _ = demo
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }

    def rope_factors(**rope: object) -> torch.Tensor:
        edit_json(folder / "config.json", head_dim=64, rope_theta=500000.0, **rope)
        found = dict(LlamaModel(ModelFolder(folder, {})).tensors())
        return found.get(ROPE_FACTORS)

    factors = rope_factors(rope_scaling=scaling)
    expected = []
    for i in range(32):
        wavelength = 2 * np.pi * 500000.0 ** (i / 32)
        if wavelength < 8192 / 4:
            expected.append(1.0)
        elif wavelength > 8192 / 1:
            expected.append(32.0)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected.append(1 / ((1 - smooth) / 32 + smooth))
    torch.testing.assert_close(factors, torch.tensor(expected))
    assert sum(1 < f < 32 for f in expected) > 1
    newer = scaling | {"rope_theta": 500000.0}
    assert torch.equal(rope_factors(rope_scaling=None, rope_parameters=newer), factors)
    assert rope_factors(rope_scaling=None, rope_parameters=None) is None


def test_rope_factors_are_in_the_file(demo, tmp_path):
    folder, quantized = demo
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    edit_json(folder / "config.json", rope_scaling=scaling)
    write_gguf(ModelFolder(folder, quantized), tmp_path / "m.gguf", block_type="Q4_0")
    found = read_stock(tmp_path / "m.gguf")
    assert found.pop(ROPE_FACTORS).shape == (16,)
    assert_same(found, expected_tensors(folder))


def test_biases_of_queries_are_reordered_like_their_rows(demo, tmp_path):
    folder, quantized = demo
    edit_json(folder / "config.json", attention_bias=True)
    state = load_file(folder / "model.safetensors")
    for name in [n for n in state if "self_attn" in n]:
        bias = torch.randn(state[name].shape[0])
        state[name.replace(".weight", ".bias")] = bias.bfloat16()
    save_file(state, folder / "model.safetensors")
    write_gguf(ModelFolder(folder, quantized), tmp_path / "m.gguf", block_type="Q4_0")
    assert_same(read_stock(tmp_path / "m.gguf"), expected_tensors(folder))


def test_a_group_of_zeros_and_a_part_of_the_linears(demo, tmp_path):
    folder, quantized = demo
    state = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    state[name][0, :128] = 0
    other = "model.layers.1.mlp.down_proj.weight"
    state[other] = hard_ternary(torch.randn(128, 384), group_size=96).bfloat16()
    save_file(state, folder / "model.safetensors")
    summary = write_gguf(
        ModelFolder(folder, {name: 128, other: 96}),
        tmp_path / "m.gguf",
        block_type=("TQ2_0", "Q4_0"),
    )
    assert summary["types"]["Q4_0"] == 2
    assert sum(map(is_linear, state)) - 2 + 1 == summary["types"]["F16"]
    assert_same(read_stock(tmp_path / "m.gguf"), expected_tensors(folder))
