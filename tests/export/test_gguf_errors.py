"""Tests the errors of the GGUF export. No error may change the folder of the target."""

import resource
import sys
from pathlib import Path

import gguf
import pytest
from gguf_models import edit_json, read_tensor_infos
from safetensors.torch import load_file, save_file

from hestia_tune.errors import InputError
from hestia_tune.export.gguf import TensorType, write_gguf
from hestia_tune.models.folder import ModelFolder


def refuse(folder, tmp_path, quantized, error, match, **options):
    target = tmp_path / "out" / "m.gguf"
    target.parent.mkdir(exist_ok=True)
    with pytest.raises(error, match=match):
        write_gguf(ModelFolder(folder, quantized), target, **options)
    assert list(target.parent.iterdir()) == []


def test_an_existing_target_is_kept(demo, tmp_path):
    folder, quantized = demo
    target = tmp_path / "m.gguf"
    target.write_text("mine")
    with pytest.raises(ValueError, match="overwrite=True"):
        write_gguf(ModelFolder(folder, quantized), target)
    assert target.read_text() == "mine"
    write_gguf(ModelFolder(folder, quantized), target, overwrite=True)
    assert target.read_bytes()[:4] == b"GGUF"


def test_a_failed_overwrite_keeps_the_old_file(demo, tmp_path):
    folder, quantized = demo
    target = tmp_path / "m.gguf"
    target.write_text("mine")
    wrong = dict.fromkeys(quantized, "channel")
    with pytest.raises(ValueError, match="is not a hard weight"):
        write_gguf(ModelFolder(folder, wrong), target, overwrite=True)
    assert target.read_text() == "mine" and not (tmp_path / "m.gguf.tmp").exists()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "LlamaForCausalLM or Mistral.*Qwen2.*MambaForCausalLM",
        ),
        ({"architectures": None}, "LlamaForCausalLM or Mistral.*Qwen2"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "mistral", "sliding_window": 64}, "without sliding windows"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "'dynamic'"),
        ({"num_hidden_layers": 3}, "layers.3.* has no place"),
        ({"num_hidden_layers": 5}, "layers.4.* is missing"),
        ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
        ({"vocab_size": 1000}, "ids up to 1023"),
    ],
)
def test_unsupported_configs(demo, tmp_path, changes, match):
    folder, quantized = demo
    edit_json(folder / "config.json", **changes)
    refuse(folder, tmp_path, quantized, ValueError, match)


@pytest.mark.parametrize("file", ["tokenizer.json", "config.json", "model.safetensors"])
def test_missing_files(demo, tmp_path, file):
    folder, quantized = demo
    (folder / file).unlink()
    refuse(folder, tmp_path, quantized, InputError, file)


def test_wrong_options(demo, tmp_path):
    folder, quantized = demo
    name = next(iter(quantized))
    for wrong in ("Q8_0", ["Q4_0", "auto"], ["Q4_0", "Q8_0"], []):
        match = "block_type must be auto, or one or several of TQ1_0, TQ2_0"
        refuse(folder, tmp_path, quantized, ValueError, match, block_type=wrong)
    refuse(folder, tmp_path, quantized, ValueError, "no block of TQ2_0 holds", block_type="TQ2_0")
    refuse(folder, tmp_path, {"nothing": 128}, ValueError, "nothing")
    refuse(folder, tmp_path, {name: 100}, ValueError, f"100 does not divide .*{name}")
    refuse(folder, tmp_path, {name: 16}, ValueError, "no block of .* quantizer.exclude")
    refuse(folder, tmp_path, {name: 0}, ValueError, "positive int")
    embedding = "model.embed_tokens.weight"
    refuse(folder, tmp_path, {embedding: 128}, ValueError, "only weights of linear layers")


@pytest.mark.parametrize("value", [2.0**-15, 131072.0])
def test_a_scale_outside_float16_names_the_layer(demo, tmp_path, value):
    folder, quantized = demo
    name = "model.layers.2.mlp.up_proj.weight"
    state = load_file(folder / "model.safetensors")
    state[name][9, :128] = state[name][9, :128].sign() * value
    save_file(state, folder / "model.safetensors")
    match = f"group 0 of row 9 of {name} has the scale .*convert.formats, or .*quantizer.exclude"
    refuse(folder, tmp_path, quantized, ValueError, match)


def test_weights_that_are_not_finite_name_the_tensor(demo, tmp_path):
    folder, quantized = demo
    state = load_file(folder / "model.safetensors")
    state["model.embed_tokens.weight"][3, 3] = float("nan")
    save_file(state, folder / "model.safetensors")
    refuse(folder, tmp_path, quantized, ValueError, "finite; model.embed_tokens.weight")


def test_weights_with_more_digits_than_float32(demo, tmp_path):
    folder, quantized = demo
    state = load_file(folder / "model.safetensors")
    name = "model.embed_tokens.weight"
    state[name] = state[name].double()
    state[name][0, 0] = 1 / 3
    save_file(state, folder / "model.safetensors")
    refuse(folder, tmp_path, quantized, ValueError, f"{name} has more digits")


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.layers.1.mlp.up_proj.weight", "blk.1.ffn_up.weight"),
        ("model.embed_tokens.weight", "token_embd.weight"),
    ],
)
def test_a_difference_in_the_file_is_found(demo, tmp_path, monkeypatch, name, tensor):
    folder, quantized = demo
    close = gguf.GGUFWriter.close

    def flip_a_bit(self):
        (path,) = (file.name for file in self.fout)
        close(self)
        content = bytearray(Path(path).read_bytes())
        content[read_tensor_infos(path)[tensor][2] + 101] ^= 1
        Path(path).write_bytes(content)

    monkeypatch.setattr(gguf.GGUFWriter, "close", flip_a_bit)
    refuse(folder, tmp_path, quantized, RuntimeError, f"{name} .* differs")


@pytest.mark.parametrize("name", ["Q2_0", "Q4_0"])
def test_a_difference_in_the_packing_is_found(demo, tmp_path, monkeypatch, name):
    folder, quantized = demo
    pack = TensorType.pack

    def flip_a_bit(self, *arguments):
        blocks = pack(self, *arguments)
        blocks[1, 1, 3] ^= 1
        return blocks

    monkeypatch.setattr(TensorType, "pack", flip_a_bit)
    match = rf"_proj.weight \({name}\) .* differs"
    refuse(folder, tmp_path, quantized, RuntimeError, match, block_type=name)


def test_a_full_disk_leaves_nothing(demo, tmp_path):
    folder, quantized = demo
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # writing past the limit fails as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
        refuse(folder, tmp_path, quantized, OSError, "written|too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_missing_package_names_the_remedy(demo, tmp_path, monkeypatch):
    folder, quantized = demo
    monkeypatch.setitem(sys.modules, "gguf", None)
    refuse(folder, tmp_path, quantized, InputError, r"pip install 'hestia-tune\[gguf\]'")
