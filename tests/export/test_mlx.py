"""Tests MLX folders: the hard model in stock mlx-lm, the layout, and errors."""

import json
import sys

import numpy as np
import pytest
import torch
from families import KINDS, NESTED_ROPE, SOME_WINDOWS, WINDOW, make_family, with_rope
from gguf_models import DEMO, edit_json, naive, random_qwen2, ternarize
from readers import mlx_logits, transformers_logits
from safetensors.torch import load_file, save_file

from hestia_tune.errors import InputError
from hestia_tune.export import mlx as mlx_export
from hestia_tune.export.huggingface import write_huggingface
from hestia_tune.export.mlx import write_mlx
from hestia_tune.methods.groups import BINARY, SYMMETRIC, TERNARY, TWO_BIT, round_scale
from hestia_tune.models.folder import ModelFolder
from hestia_tune.tensors import read_hard

transformers = pytest.importorskip("transformers")
mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm.utils")
TOKENS = torch.arange(2, 42)[None]
METHODS = {
    BINARY: "even, codebook=binary",
    TERNARY: "ternary",
    TWO_BIT: "two_bit",
    SYMMETRIC: "even, codebook=int2",
}


@pytest.mark.parametrize("levels", METHODS)
@pytest.mark.parametrize("group_size", [32, 64, 128, "channel"])
def test_logits_equal_the_hard_models(tmp_path, group_size, levels):
    source = naive(DEMO, group_size, METHODS[levels])
    summary = write_mlx(source, tmp_path / "out")
    write_huggingface(source, tmp_path / "hard")
    found, expected = (
        mlx_logits(tmp_path / "out", TOKENS),
        transformers_logits(tmp_path / "hard", TOKENS),
    )
    assert (found - expected).norm() < 1e-5 * expected.norm()
    block = group_size if isinstance(group_size, int) else 128
    bits = 1 if levels == BINARY else 2
    assert summary["quantized_bits_per_weight"] == bits + 32 / block
    layout = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert layout == {"group_size": block, "bits": bits, "mode": "affine"}


@pytest.mark.parametrize("levels", METHODS)
def test_every_code_of_every_scale_is_exact(levels):
    """Run through all significands of bfloat16, at several exponents, in MLX's own arithmetic."""
    significands = torch.arange(128, 256).float() / 128
    scales = torch.cat([significands * 2.0**e for e in (-20, -7, 0, 5)])
    scales = round_scale(scales, levels).unique().bfloat16()
    scales = torch.cat([scales, -scales]) if levels == TWO_BIT else scales
    codes = torch.tensor(levels).repeat(32)[:32]
    weight = codes.bfloat16() * scales[:, None]  # (scales, 32)
    assert torch.equal(weight.double(), codes.double() * scales[:, None].double())
    parts = mlx_export._affine(read_hard(weight, 32, levels), 32)
    arrays = [mx.array(v.view(torch.int32).numpy().view(np.uint32)) for v in [parts["weight"]]]
    arrays += [mx.array(parts[k].float().numpy()).astype(mx.bfloat16) for k in ("scales", "biases")]
    dense = mx.dequantize(*arrays, group_size=32, bits=1 if levels == BINARY else 2)
    assert dense.dtype == mx.bfloat16
    assert torch.equal(torch.from_numpy(np.array(dense.astype(mx.float32))), weight.float())


def test_fields_scales_and_biases_by_hand(tmp_path):
    folder = tmp_path / "model"
    write_mlx(ModelFolder(folder, ternarize(DEMO, folder, 128)), tmp_path / "out")
    hard, state = (load_file(tmp_path / f / "model.safetensors") for f in ("model", "out"))
    name = "model.layers.1.mlp.down_proj"
    words = state[f"{name}.weight"].view(torch.int32)
    scales, biases = (state[f"{name}.{part}"].float() for part in ("scales", "biases"))
    assert torch.equal(scales, -biases)
    for row in (0, 77):
        for column in (0, 17, 300):
            field = int(words[row, column // 16]) >> 2 * (column % 16) & 3
            group = column // 128
            weight = field * scales[row, group] + biases[row, group]
            assert weight == hard[f"{name}.weight"][row, column]


def test_layers_that_differ_have_entries_of_their_own(tmp_path):
    """Some layers are dense, one has another group size, biases and a group of zeros are kept."""
    folder, name = tmp_path / "model", "model.layers.1.mlp.down_proj.weight"
    quantized = random_qwen2(folder, 64, intermediate_size=96 * 2)
    quantized = {n: 64 for n in quantized if "o_proj" not in n} | {name: "channel"}
    state = load_file(folder / "model.safetensors")
    state[name] = (state[name].sign() * 0.25).bfloat16()
    state["model.layers.0.mlp.up_proj.weight"][3, :64] = 0
    save_file(state, folder / "model.safetensors")
    quantized["model.layers.0.mlp.down_proj.weight"] = 32
    write_mlx(ModelFolder(folder, quantized), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    odd = {"group_size": 32, "bits": 2, "mode": "affine"}
    assert config["quantization"] == {
        "group_size": 64,
        "bits": 2,
        "mode": "affine",
        "model.layers.0.mlp.down_proj": odd,
    }
    found, expected = mlx_logits(tmp_path / "out", TOKENS), transformers_logits(folder, TOKENS)
    assert (found - expected).norm() < 1e-5 * expected.norm()
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written["model.layers.0.self_attn.o_proj.weight"].dtype == torch.bfloat16
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("a b").input_ids


@pytest.mark.parametrize(
    "family",
    [
        "Llama 3 (scaled rotary)",
        "Qwen3",
        "Mistral",
        "Gemma 2",
        "Gemma 3",
        "Phi-3",
        "Phi",
        "StableLM",
    ],
)
def test_families(tmp_path, family):
    layers = {"num_hidden_layers": 6} if family == "Gemma 3" else {}  # every sixth is global
    if family == "Gemma 2":
        layers = {"sliding_window": 64}  # as long as the longest text, so that it changes nothing
    source = naive(make_family(tmp_path / "model", family, **layers), 32)
    write_mlx(source, tmp_path / "out")  # this compares the logits


LAST = [*KINDS, "full_attention"]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", with_rope("linear")),
        ("Llama", with_rope("dynamic")),
        ("Qwen2", with_rope("yarn")),
        ("Qwen2", SOME_WINDOWS | {"use_sliding_window": False}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Gemma 3", {"num_hidden_layers": 6, "rope_parameters": NESTED_ROPE} | WINDOW),
        ("Gemma 3", {"num_hidden_layers": 4, "layer_types": KINDS * 2} | WINDOW),
        ("SmolLM3", {"use_sliding_window": True, "layer_types": KINDS * 2} | WINDOW),
        ("GPT-NeoX", {"intermediate_size": 256}),
    ],
)
def test_configs_that_mlx_lm_computes(tmp_path, family, changes):
    source = naive(make_family(tmp_path / "model", family, **changes), 32)
    write_mlx(source, tmp_path / "out")
    tokens = torch.randint(2, 264, (1, 200), generator=torch.Generator().manual_seed(1))
    write_huggingface(source, tmp_path / "hard")
    expected = transformers_logits(tmp_path / "hard", tokens)
    found = mlx_logits(tmp_path / "out", tokens)
    assert (found - expected).norm() < 1e-3 * expected.norm()


BEHIND = (
    r"at most 0\.001 behind the window of 24 tokens; measured on a small random model with the "
)


@pytest.mark.parametrize(
    ("family", "changes", "match"),
    [
        (
            "Qwen2",
            SOME_WINDOWS,
            BEHIND + "use_sliding_window True, sliding_window 24 of",
        ),
        ("Qwen3", SOME_WINDOWS | {"max_window_layers": 0}, BEHIND),
        ("Mistral", WINDOW, BEHIND + "sliding_window 24"),
        ("Gemma 2", WINDOW, BEHIND),
        ("Phi-3", WINDOW, BEHIND + "sliding_window 24 of config.json; leave mlx out of"),
        ("Llama", with_rope("longrope"), r"model with the rope_type longrope of config\.json"),
        ("Gemma", with_rope("linear"), "rope_type linear"),
        ("StableLM", with_rope("linear"), "rope_type linear"),
        ("Qwen3", {"attention_bias": True}, "it raises: Received 8 parameters not in model"),
        ("Gemma 3", {"num_hidden_layers": 6, "layer_types": LAST * 2} | WINDOW, "difference is"),
    ],
)
def test_configs_that_mlx_lm_ignores_are_refused_before_training(tmp_path, family, changes, match):
    """`mlx_blocks` reads config.json only: the weights are those of a small random model."""
    source = naive(make_family(tmp_path / "model", family, **changes), 32)
    source.read = None  # no weight of the model is read
    with pytest.raises(InputError, match=match):
        mlx_export.mlx_blocks(source)


def refuse(source, tmp_path, error, match):
    target = tmp_path / "out" / "model"
    target.parent.mkdir(exist_ok=True)
    with pytest.raises(error, match=match):
        write_mlx(source, target)
    assert list(target.parent.iterdir()) == []


def test_what_does_not_fit_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    quantized = ternarize(DEMO, folder, 16)
    message = r"multiple of 32 weights; model\.layers\.0\..* has 16; export to another format"
    refuse(ModelFolder(folder, quantized), tmp_path, InputError, message)
    refuse(ModelFolder(folder, {}), tmp_path, InputError, "at least one linear layer; got none")
    edit_json(folder / "config.json", model_type="opt")
    message = "mlx-lm does not know the model_type opt"
    refuse(ModelFolder(folder, quantized), tmp_path, InputError, message)
    for package in ("mlx_lm", "mlx.core"):
        monkeypatch.setitem(sys.modules, package, None)
        remedy = r"pip install 'hestia-tune\[mlx\]'"
        refuse(ModelFolder(folder, quantized), tmp_path, InputError, remedy)


def test_a_model_that_mlx_computes_otherwise_is_refused(tmp_path):
    """mlx-lm ignores the activation function of a Llama, so its logits differ."""
    source = naive(DEMO, 128)
    folder = tmp_path / "model"
    write_huggingface(source, folder)
    edit_json(folder / "config.json", hidden_act="relu")
    message = "logits; their relative difference is .* with the hidden_act relu of .* leave mlx out"
    refuse(ModelFolder(folder, source.quantized), tmp_path, InputError, message)


def test_a_weight_that_mlx_reads_otherwise_is_found(tmp_path, monkeypatch):
    folder, honest = tmp_path / "model", mlx_export._affine
    quantized = ternarize(DEMO, folder, 128)

    def damaged(hard, block):
        parts = honest(hard, block)
        parts["weight"].view(torch.int32)[0, 0] ^= 1
        return parts

    monkeypatch.setattr(mlx_export, "_affine", damaged)
    source = ModelFolder(folder, quantized)
    message = r"layers\.0\.mlp\.down_proj\.weight dequantized by MLX differs from its source"
    refuse(source, tmp_path, RuntimeError, message)
