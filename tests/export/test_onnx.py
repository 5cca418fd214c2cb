"""Tests ONNX folders: the hard model in onnxruntime-genai, and errors."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from families import KINDS, NESTED_ROPE, SOME_WINDOWS, WINDOW, make_family, with_rope
from gguf_models import DEMO, edit_json, is_linear, naive, random_qwen2, ternarize
from readers import genai_logits, transformers_logits
from safetensors.torch import load_file, save_file

from hestia_tune.errors import InputError
from hestia_tune.export import onnx as onnx_export
from hestia_tune.export.huggingface import write_huggingface
from hestia_tune.export.onnx import write_onnx
from hestia_tune.methods import Method
from hestia_tune.models.folder import ModelFolder

transformers = pytest.importorskip("transformers")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime_genai")
TOKENS = [*range(2, 42)]


def logits(folder) -> torch.Tensor:
    """Return the logits after a prompt and after three more tokens, with a KV cache: (4, vocab)."""
    return genai_logits(folder, [TOKENS[:-3], *([token] for token in TOKENS[-3:])])


def expected_logits(folder) -> torch.Tensor:
    return transformers_logits(folder, torch.tensor([TOKENS]))[0, -4:]


def make(folder, kind, group_size):
    if kind == "qwen2":
        return random_qwen2(folder, group_size)
    quantized = ternarize(DEMO, folder, group_size)
    (folder / "LICENSE.txt").write_text("as you like")
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(0)
    state = load_file(file)
    for name in quantized:
        if kind == "biases":  # biases of every linear, as Tequila leaves them, and a group of zeros
            bias = 0.3 * torch.randn(len(state[name]), generator=generator)
            state[name.replace("weight", "bias")] = bias.bfloat16()
            state[name][3, :group_size] = 0
        elif kind == "binary":
            unit = state[name].abs().amax(1, keepdim=True)
            signs = 2 * torch.randint(2, state[name].shape, generator=generator) - 1
            state[name] = (unit * signs).bfloat16()
    save_file(state, file, metadata={"format": "pt"})
    edit_json(folder / "config.json", attention_bias=kind == "biases", mlp_bias=kind == "biases")
    return quantized


@pytest.mark.parametrize(
    ("kind", "group_size", "bits", "head", "tolerance"),
    [
        ("demo", 128, 32, "float32", 1e-5),
        pytest.param("demo", "tensor", 8, "int8", 0.03, marks=pytest.mark.slow),
        pytest.param("biases", 32, 32, "float32", 1e-5, marks=pytest.mark.slow),
        pytest.param("binary", "channel", 32, "float32", 1e-5, marks=pytest.mark.slow),
        ("qwen2", 64, 32, "float32", 1e-5),
        ("qwen2", "channel", 8, "int8", 0.03),
    ],
)
def test_logits_equal_the_hard_models(
    tmp_path, monkeypatch, kind, group_size, bits, head, tolerance
):
    folder, target = tmp_path / "model", tmp_path / "out"
    method = Method.from_key("ternary" if kind != "binary" else "even, codebook=binary")
    sizes = make(folder, kind, group_size).items()
    source = ModelFolder(folder, {name: replace(method, group_size=s) for name, s in sizes})
    summary = write_onnx(source, target, head=head, activation_bits=bits)
    found, expected = logits(target), expected_logits(folder)
    assert (found - expected).norm() < tolerance * expected.norm()
    assert list(tmp_path.iterdir()) in ([folder, target], [target, folder])
    assert json.loads((target / "config.json").read_text())["architectures"]
    block = group_size if isinstance(group_size, int) else 128
    assert summary["quantized_bits_per_weight"] == pytest.approx(2 + 32 / block, abs=0.2)
    files = sorted((target / "onnx").iterdir())
    assert [file.name for file in files] == ["model_q2.onnx", "model_q2.onnx_data"]
    assert summary["bytes"] == sum(file.stat().st_size for file in files)
    assert not list(target.glob("model.onnx*"))
    config = json.loads((target / "config.json").read_text())["transformers.js_config"]
    assert config == {"dtype": "q2", "use_external_data_format": {"model_q2.onnx": 1}}
    values = onnx.load(str(files[0])).graph.input  # with the data, by the names in the file
    shapes = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values
    }
    heads, head_dim = shapes["past_key_values.0.key"][1::2]
    assert (heads, head_dim) == (2, 64 if kind == "qwen2" else 32)
    if kind == "demo" and bits == 32:
        assert (target / "LICENSE.txt").read_text() == "as you like"
        with pytest.raises(ValueError, match="overwrite=True replaces"):
            write_onnx(source, target)
        monkeypatch.setattr(onnx_export.ONNX, "verify", failing)
        with pytest.raises(RuntimeError, match="as asked"):
            write_onnx(source, target, overwrite=True)
        assert torch.equal(logits(target), found)
        monkeypatch.undo()
        (target / "of_before").touch()
        write_onnx(source, target, overwrite=True, activation_bits=bits)
        assert torch.equal(logits(target), found) and not (target / "of_before").exists()


def failing(source, folder):
    raise RuntimeError("as asked")


YARN, LONG, LINEAR, DYNAMIC = map(with_rope, ("yarn", "longrope", "linear", "dynamic"))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Qwen2", SOME_WINDOWS | YARN),
        *(
            pytest.param(family, {"max_position_embeddings": 256} | changes, marks=pytest.mark.slow)
            for family, changes in [
                ("Llama 3 (scaled rotary)", {}),
                ("Llama", LINEAR),
                ("Llama", YARN),
                ("Llama", {"attention_bias": True, "hidden_act": "gelu"}),
                ("Mistral", WINDOW),
                ("Qwen3", SOME_WINDOWS | {"max_window_layers": 0}),
                ("Gemma", {}),
                ("Gemma 2", WINDOW),
                ("Gemma 3", {"num_hidden_layers": 6, "rope_parameters": NESTED_ROPE} | WINDOW),
                ("Gemma 3", {"num_hidden_layers": 4, "layer_types": KINDS * 2} | WINDOW),
                ("Granite", {}),
                ("SmolLM3", {"use_sliding_window": True, "layer_types": KINDS * 2} | WINDOW),
                ("Phi-3", WINDOW),
            ]
        ),
    ],
)
def test_families(tmp_path, family, changes):
    """The text is longer than the window and the original context; onnxruntime-genai reads it."""
    source = naive(make_family(tmp_path / "model", family, **changes), 32)
    write_onnx(source, tmp_path / "out", activation_bits=32)
    write_huggingface(source, tmp_path / "hard")
    tokens = torch.randint(2, 264, (1, 200), generator=torch.Generator().manual_seed(1))
    expected = transformers_logits(tmp_path / "hard", tokens)[0, -4:]
    parts = [tokens[0, :-3].tolist(), *([int(token)] for token in tokens[0, -3:])]
    found = genai_logits(tmp_path / "out", parts)
    assert (found - expected).norm() < 1e-5 * expected.norm()
    model = onnx.load(str(tmp_path / "out/onnx/model_q2.onnx"), load_external_data=False)
    attributes = [a.name for node in model.graph.node for a in node.attribute]
    assert "local_window_size" in attributes and "sliding_window_cache" not in attributes


@pytest.mark.parametrize(("family", "rope"), [("Llama", DYNAMIC), ("Qwen3", LONG)])
def test_positions_that_depend_on_the_length_are_refused(tmp_path, family, rope):
    rope = json.loads(json.dumps(rope))
    for key in ("short_factor", "long_factor"):  # one for each pair of dimensions
        rope["rope_parameters"].update({key: [1.0] * 16} if family == "Qwen3" else {})
    source = naive(make_family(tmp_path / "model", family, **rope), 32)
    kind = rope["rope_parameters"]["rope_type"]
    match = f"rope_type {kind} in config.json .* leave onnx out of convert.formats"
    with pytest.raises(InputError, match=match):
        onnx_export.block_of(source)


def test_wrong_positions_are_refused_before_training(tmp_path, monkeypatch):
    """Without the tables of transformers, a small model has other logits in onnxruntime."""
    source = naive(make_family(tmp_path / "model", "Llama", **LINEAR), 32)
    source.read = None  # no weight of the model is read
    monkeypatch.setattr(onnx_export, "_set_positions", lambda *_: None)
    match = "run a llama with .* relative difference is .* with the rope_type linear of config.json"
    with pytest.raises(InputError, match=match):
        onnx_export.block_of(source)


def refused(source, tmp_path, error, match):
    target = tmp_path / "out" / "model"
    target.parent.mkdir(exist_ok=True)
    with pytest.raises(error, match=match):
        write_onnx(source, target)
    assert list(target.parent.iterdir()) == []


def test_models_that_the_builder_cannot_build(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    quantized = ternarize(DEMO, folder, 128)
    some = {name: size for name, size in quantized.items() if "up_proj" not in name}
    part = ModelFolder(folder, some)
    refused(part, tmp_path, ValueError, r"layers\.0\.mlp\.up_proj\.weight differs")
    four = Method.from_key("int2, group_size=128, start=least_squares")
    model = ModelFolder(folder, dict.fromkeys(quantized, four), quantize=True)
    refused(model, tmp_path, ValueError, "codes from -1 to 2")
    small = ModelFolder(folder, dict.fromkeys(quantized, 16))
    refused(small, tmp_path, ValueError, r"a multiple of 32 weights; got \[16\]")
    narrow = tmp_path / "narrow"
    layers = random_qwen2(narrow, "channel", intermediate_size=200)
    wrong = ModelFolder(narrow, dict.fromkeys(layers, "channel"))
    refused(wrong, tmp_path, ValueError, r"multiple of 16; .*gate_proj\.weight has 200")
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", None)
    refused(ModelFolder(folder, quantized), tmp_path, InputError, r"hestia-tune\[onnx\]")


def test_a_weight_that_is_not_hard_is_named(tmp_path):
    folder = tmp_path / "model"
    quantized = ternarize(DEMO, folder, 128)
    file, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    state = load_file(file)
    state[name][3, 40] = 0.123
    save_file(state, file, metadata={"format": "pt"})
    refused(ModelFolder(folder, quantized), tmp_path, ValueError, f"{name} is not a hard weight")


def test_a_wrong_or_failed_build_is_not_kept(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    quantized = ternarize(DEMO, folder, 128)
    assert all(is_linear(name) for name in quantized)
    honest = onnx_export._gptq

    def damaged(hard, block):
        parts = honest(hard, block)
        parts["qweight"][0, 0] ^= 1
        return parts

    with monkeypatch.context() as patch:
        patch.setattr(onnx_export, "_gptq", damaged)
        source = ModelFolder(folder, quantized)
        refused(source, tmp_path, RuntimeError, r"self_attn\.q_proj\.weight read back differs")
    edit_json(folder / "config.json", architectures=["NoSuchForCausalLM"])
    source = ModelFolder(folder, quantized)
    refused(source, tmp_path, ValueError, "knows the architectures Llama.*; got NoSuchForCausalLM")
    # The tensors do not fit this architecture, which has more norms.
    edit_json(folder / "config.json", architectures=["Qwen3ForCausalLM"])
    source = ModelFolder(folder, quantized)
    match = r"could not build the model \(exit status 1\): .*; check memory and disk space"
    refused(source, tmp_path, RuntimeError, match)
    for wrong in ({"head": "fp32"}, {"activation_bits": 4}):
        with pytest.raises(ValueError, match=r"head must be one of float32, int8, activation_bits"):
            write_onnx(source, tmp_path / "out" / "model", **wrong)
