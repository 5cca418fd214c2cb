"""Tests OpenVINO folders: the hard model on OpenVINO's CPU, the layout, generation, and errors."""

import sys

import pytest
import torch
from families import make_family
from gguf_models import DEMO, edit_json, naive, random_qwen2, ternarize
from readers import openvino_session, transformers_logits
from safetensors.torch import load_file, save_file

from hestia_tune.errors import InputError
from hestia_tune.export import openvino as openvino_export
from hestia_tune.export.huggingface import write_huggingface
from hestia_tune.export.openvino import write_openvino
from hestia_tune.models.folder import ModelFolder

transformers = pytest.importorskip("transformers")
ov = pytest.importorskip("openvino")
pytest.importorskip("openvino_tokenizers")
TOKENS = torch.arange(2, 42).view(2, 20)
NAME = "model.layers.1.mlp.up_proj"


def assert_near(found, expected, tolerance=1e-5):
    assert found.shape == expected.shape
    assert (found - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize(
    ("group_size", "key"),
    [
        (128, "ternary"),
        pytest.param("channel", "ternary", marks=pytest.mark.slow),
        pytest.param("tensor", "ternary", marks=pytest.mark.slow),
        pytest.param(32, "even, codebook=binary", marks=pytest.mark.slow),
        (64, "even, codebook=int2"),
    ],
)
def test_logits_equal_the_hard_models(tmp_path, group_size, key):
    source = naive(DEMO, group_size, key)
    summary = write_openvino(source, tmp_path / "out")
    write_huggingface(source, tmp_path / "hard")
    assert_near(
        openvino_session(tmp_path / "out", DYNAMIC_QUANTIZATION_GROUP_SIZE="0")(TOKENS, 0, [0, 1]),
        transformers_logits(tmp_path / "hard", TOKENS),
    )
    # By default the processor rounds activations, and the file must run nevertheless.
    found = openvino_session(tmp_path / "out", DYNAMIC_QUANTIZATION_GROUP_SIZE="32")(
        TOKENS, 0, [0, 1]
    )
    assert_near(found, transformers_logits(tmp_path / "hard", TOKENS), 0.05)
    scales = 16 / group_size if isinstance(group_size, int) else 0.1
    assert summary["quantized_bits_per_weight"] == pytest.approx(2 + scales, abs=0.02)
    files = [tmp_path / "out" / f"openvino_model.{end}" for end in ("xml", "bin")]
    assert summary["bytes"] == sum(file.stat().st_size for file in files)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a folder with the ternary demo: "hard", and "out" for OpenVINO."""
    folder = tmp_path_factory.mktemp("openvino")
    source = naive(DEMO, 128)
    write_openvino(source, folder / "out")
    write_huggingface(source, folder / "hard")
    return folder


def test_the_cache_continues_the_sequences_that_beams_name(written):
    run = openvino_session(written / "out", DYNAMIC_QUANTIZATION_GROUP_SIZE="0")
    run(TOKENS[:, :12], 0, [0, 1])
    run(TOKENS[:, 12:13], 12, [1, 0])  # every row continues the other row's past
    swapped = torch.cat([TOKENS.flip(0)[:, :12], TOKENS[:, 12:]], 1)
    expected = transformers_logits(written / "hard", swapped)
    assert_near(run(TOKENS[:, 13:], 13, [0, 1]), expected[:, 13:])


def test_two_bit_codes_are_in_the_file_and_in_memory(written):
    hard = load_file(written / "hard" / "model.safetensors")[f"{NAME}.weight"].float()
    graph = ov.Core().read_model(written / "out" / "openvino_model.xml")
    constants = {op.friendly_name: op for op in graph.get_ops()}
    codes, scale = (constants[f"self.model.{NAME}.{part}"] for part in ("codes", "scale"))
    assert codes.get_element_type() == ov.Type.u2 and scale.get_element_type() == ov.Type.f16
    packed = codes.data.reshape(len(hard), -1)
    for row, column in ((0, 0), (5, 17), (383, 127)):
        field = int(packed[row, column // 4]) >> 2 * (column % 4) & 3
        assert (field - 1) * float(scale.data[row, 0, 0]) == hard[row, column]
    runtime = ov.Core().compile_model(graph, "CPU").get_runtime_model()
    kinds = [node.get_rt_info()["outputPrecisions"].astype(str) for node in runtime.get_ops()]
    assert kinds.count("u2") == 28


def test_biases_dense_layers_zeros_and_scales_that_float16_rounds(tmp_path):
    folder = tmp_path / "model"
    quantized = random_qwen2(folder, 64)
    quantized = {name: 64 for name in quantized if "o_proj" not in name}
    state = load_file(folder / "model.safetensors")
    state[f"{NAME}.weight"][3, :64] = 0
    state[f"{NAME}.weight"][4] *= 2.0**-20
    save_file(state, folder / "model.safetensors")
    write_openvino(ModelFolder(folder, quantized), tmp_path / "out")
    run = openvino_session(tmp_path / "out", DYNAMIC_QUANTIZATION_GROUP_SIZE="0")
    assert_near(run(TOKENS, 0, [0, 1]), transformers_logits(folder, TOKENS))
    graph = ov.Core().read_model(tmp_path / "out" / "openvino_model.xml")
    constants = [op for op in graph.get_ops() if op.get_type_name() == "Constant"]
    kinds = {op.friendly_name: op.get_element_type() for op in constants}
    assert kinds[f"self.model.{NAME}.scale"] == ov.Type.bf16
    assert kinds["self.model.lm_head.weight"] == ov.Type.bf16


def test_generation_equals_transformers(written):
    genai = pytest.importorskip("openvino_genai")
    prompt = "The assert statement"
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokenizer = transformers.AutoTokenizer.from_pretrained(written / "hard")
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    options = {"max_new_tokens": 20, "do_sample": False}
    (expected,) = load(written / "hard", dtype=torch.float32).generate(ids, **options)
    pipeline = genai.LLMPipeline(written / "out", "CPU", INFERENCE_PRECISION_HINT="f32")
    found = pipeline.generate(prompt, max_new_tokens=20)
    assert found == tokenizer.decode(expected[ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["Llama 3 (scaled rotary)", "Qwen3", "Mistral", "Gemma 2", "Gemma 3", "SmolLM3"]
)
def test_families(tmp_path, family):
    source = naive(make_family(tmp_path / "model", family), 32)
    write_openvino(source, tmp_path / "out")
    write_huggingface(source, tmp_path / "hard")
    run = openvino_session(tmp_path / "out", DYNAMIC_QUANTIZATION_GROUP_SIZE="0")
    assert_near(run(TOKENS, 0, [0, 1]), transformers_logits(tmp_path / "hard", TOKENS))


def refuse(source, tmp_path, error, match):
    target = tmp_path / "out" / "model"
    target.parent.mkdir(exist_ok=True)
    with pytest.raises(error, match=match):
        write_openvino(source, target)
    assert list(target.parent.iterdir()) == []


def test_what_does_not_fit_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    quantized = ternarize(DEMO, folder, 128)
    refuse(ModelFolder(folder, {}), tmp_path, InputError, "at least one linear layer; got none")
    embedding = ModelFolder(folder, {"model.embed_tokens.weight": 128})
    refuse(embedding, tmp_path, InputError, "only linear layers .* leave out model.embed_tokens")
    edit_json(folder / "config.json", hidden_act="unknown")
    refuse(ModelFolder(folder, quantized), tmp_path, KeyError, "unknown")
    for package in ("openvino_tokenizers", "openvino"):
        monkeypatch.setitem(sys.modules, package, None)
        remedy = r"pip install 'hestia-tune\[openvino\]'"
        refuse(ModelFolder(folder, quantized), tmp_path, InputError, remedy)


@pytest.mark.parametrize("what", ["codes", pytest.param("logits", marks=pytest.mark.slow)])
def test_a_difference_is_found(tmp_path, monkeypatch, what):
    source, honest = naive(DEMO, 128), openvino_export.make_graph

    def damaged(model, source, tokens, past):
        if what == "logits":
            model.model.norm.weight.data.mul_(torch.linspace(0.9, 1.1, 128))
            return honest(model, source, tokens, past)
        weight = source.read_hard(f"{NAME}.weight").clone()
        weight[0, :128] = weight[0, :128].flip(0)
        read = source.read_hard
        other = lambda name: weight if name == f"{NAME}.weight" else read(name)  # noqa: E731
        with monkeypatch.context() as patch:
            patch.setattr(source, "read_hard", other)
            return honest(model, source, tokens, past)

    monkeypatch.setattr(openvino_export, "make_graph", damaged)
    if what == "codes":
        monkeypatch.setattr(openvino_export, "_LOGITS_TOLERANCE", 1.0)
        error, message = RuntimeError, f"{NAME}.weight read back by OpenVINO differs"
    else:
        error, message = InputError, "run a llama with the hard model's logits; their relative"
    refuse(source, tmp_path, error, message)


def test_an_existing_target_is_kept(written):
    before = {file: file.read_bytes() for file in (written / "out").iterdir()}
    with pytest.raises(InputError, match="overwrite=True"):
        write_openvino(naive(DEMO, 128), written / "out")
    assert {file: file.read_bytes() for file in (written / "out").iterdir()} == before
