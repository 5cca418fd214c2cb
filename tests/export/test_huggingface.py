"""Tests dense Hugging Face folders: their content, their logits in transformers, and errors."""

import functools
import json
import resource
import shutil
from pathlib import Path

import pytest
import references
import torch
from gguf_models import DEMO, edit_json, is_linear, random_qwen2, ternarize
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hestia_tune.errors import InputError
from hestia_tune.export import huggingface as folder_export
from hestia_tune.export.huggingface import write_huggingface
from hestia_tune.models.folder import ModelFolder, SafetensorsFolder

transformers = pytest.importorskip("transformers")

NAME = "model.layers.1.mlp.up_proj.weight"


def logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=dtype)
    assert next(model.parameters()).dtype == dtype
    with torch.no_grad():
        return model(torch.arange(2, 42)[None]).logits


def same_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], tensor.to(torch.bfloat16)), name


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() if p.is_file() else b"" for p in sorted(root.rglob("*"))}


def refuse(folder, tmp_path, quantized, error, match, **options):
    """Check that the export fails, leaves nothing behind, and keeps the old folder."""
    root = tmp_path / "out"
    ternarize(DEMO, root / "old", 64) if not root.exists() else None
    before = snapshot(root)
    for target, overwrite in ((root / "new", False), (root / "old", True)):
        with pytest.raises(error, match=match):
            source = ModelFolder(folder, quantized, **options)
            write_huggingface(source, target, overwrite=overwrite)
        assert snapshot(root) == before


@pytest.mark.parametrize("group_size", [32, "channel", "tensor"])
@pytest.mark.parametrize("kind", ["demo", "qwen2"])
def test_a_hard_model_comes_back_bit_for_bit(tmp_path, kind, group_size):
    folder, target = tmp_path / "model", tmp_path / "deep" / "out"
    make = random_qwen2 if kind == "qwen2" else lambda f, g: ternarize(DEMO, f, g)
    quantized = make(folder, group_size)
    summary = write_huggingface(ModelFolder(folder, quantized), target)
    expected = load_file(folder / "model.safetensors")
    same_state(load_file(target / "model.safetensors"), expected)
    total = sum(t.numel() for t in expected.values())
    assert summary == {
        "bytes": (target / "model.safetensors").stat().st_size,
        "parameters": total,
        "quantized_parameters": sum(expected[name].numel() for name in quantized),
        "quantized_bits_per_weight": 16.0,
        "whole_bits_per_weight": pytest.approx(16.0, rel=5e-3),
        "types": {"BF16": len(expected)},
    }
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(logits(target, dtype), logits(folder, dtype))


@pytest.mark.parametrize("name", ["LICENSE", "additional_chat_templates/tools.jinja"])
def test_a_link_out_of_the_folder_is_not_followed(demo, tmp_path, name):
    folder, quantized = demo
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).symlink_to(secret)
    with pytest.raises(ValueError, match=f"{name} is a link to .*secret, outside"):
        write_huggingface(ModelFolder(folder, quantized), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_of_the_hubs_cache_are_followed_and_code_stays_behind(demo, tmp_path):
    folder, quantized = demo
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "hub" / "blobs"
    shutil.copytree(folder, snapshot)
    blobs.mkdir()
    (blobs / "123").write_text("Apache")
    (snapshot / "LICENSE").symlink_to(blobs / "123")
    (snapshot / "modeling_own.py").write_text("import os")
    write_huggingface(ModelFolder(snapshot, quantized), tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE").read_text() == "Apache"
    assert not list((tmp_path / "out").rglob("*.py"))


def test_side_files_and_config(demo, tmp_path):
    folder, quantized = demo
    for name in ("chat_template.jinja", "LICENSE.txt", "generation_config.json"):
        (folder / name).write_text(f"{{}} {name}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("tools")
    for name in ("optimizer.bin", "README.md"):
        (folder / name).write_text("not for the copy")
    (folder / "hestia.json").write_text('{"step": 7}')
    (folder / "tokenizer.json").chmod(0o444)
    edit_json(folder / "config.json", torch_dtype="float32", dtype="float32")
    write_huggingface(ModelFolder(folder, quantized), tmp_path / "out")
    written = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*.*")}
    assert written == {
        "config.json",
        "model.safetensors",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tools.jinja",
        "LICENSE.txt",
        "hestia.json",
    }
    for name in written - {"config.json", "model.safetensors", "hestia.json"}:
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    config["torch_dtype"] = "bfloat16"
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    assert json.loads((tmp_path / "out" / "hestia.json").read_text()) == {"step": 7}
    write_huggingface(ModelFolder(folder, quantized), tmp_path / "own", description={"step": 8})
    assert json.loads((tmp_path / "own" / "hestia.json").read_text()) == {"step": 8}
    write_huggingface(ModelFolder(folder, quantized, quantize=True), tmp_path / "naive")
    assert not (tmp_path / "naive" / "hestia.json").exists()
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "file").touch()
    for made, plain in (("out", "plain"), ("out/model.safetensors", "plain/file")):
        assert (tmp_path / made).stat().st_mode == (tmp_path / plain).stat().st_mode


@pytest.mark.parametrize("group_size", [64, "channel", "tensor"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_naive_ternarization_follows_the_rule_of_training(tmp_path, group_size, stored):
    folder, target = tmp_path / "latent", tmp_path / "out"
    shutil.copytree(DEMO, folder)
    torch.manual_seed(0)
    latent = {}
    for name, tensor in load_file(DEMO / "model.safetensors").items():
        latent[name] = (tensor.float() * (1 + 0.01 * torch.rand_like(tensor.float()))).to(stored)
    save_file(latent, folder / "model.safetensors")
    quantized = {name: group_size for name in latent if is_linear(name)}
    write_huggingface(ModelFolder(folder, quantized, quantize=True), target)
    expected = {
        name: references.eq2_hard(tensor, group_size) if name in quantized else tensor
        for name, tensor in latent.items()
    }
    same_state(load_file(target / "model.safetensors"), expected)
    # The result is a hard model, so it can be exported as a hard model without a change.
    write_huggingface(ModelFolder(target, quantized), tmp_path / "again")
    same_state(load_file(tmp_path / "again" / "model.safetensors"), expected)


@pytest.mark.parametrize("shard_bytes", [1, 100_000, 500_000])
def test_shards(demo, tmp_path, monkeypatch, shard_bytes):
    folder, quantized = demo
    target = tmp_path / "out"
    save = functools.partial(folder_export.save_torch_state_dict, max_shard_size=shard_bytes)
    with monkeypatch.context() as patch:
        patch.setattr(folder_export, "save_torch_state_dict", save)
        summary = write_huggingface(ModelFolder(folder, quantized), target)
    expected = load_file(folder / "model.safetensors")
    files = sorted(target.glob("*.safetensors"))
    count = len(files)
    assert [f.name for f in files] == [
        f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)
    ]
    assert summary["bytes"] == sum(f.stat().st_size for f in files)
    found, weight_map = {}, {}
    for file in files:
        state = load_file(file)
        assert len(state) == 1 or sum(2 * t.numel() for t in state.values()) <= shard_bytes
        found |= state
        weight_map |= dict.fromkeys(state, file.name)
    same_state(found, expected)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    total = sum(2 * t.numel() for t in expected.values())
    assert index == {"metadata": {"total_size": total}, "weight_map": weight_map}
    assert torch.equal(logits(target, torch.float32), logits(folder, torch.float32))
    # A folder of shards can be exported again.
    write_huggingface(ModelFolder(target, quantized), tmp_path / "one")
    same_state(load_file(tmp_path / "one" / "model.safetensors"), expected)


def test_files_have_the_format_pt(demo, tmp_path):
    folder, quantized = demo
    write_huggingface(ModelFolder(folder, quantized), tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_a_hard_model_of_another_dtype_must_be_exact(demo, tmp_path, dtype):
    folder, quantized = demo
    state = load_file(folder / "model.safetensors")
    # bfloat16 values that float16 holds too
    state = {name: t.clamp(-100, 100) * (t.abs() > 1e-3) for name, t in state.items()}
    save_file({name: t.to(dtype) for name, t in state.items()}, folder / "model.safetensors")
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(16)}
    save_file(buffers, folder / "old.safetensors")
    write_huggingface(ModelFolder(folder, quantized), tmp_path / "exact")
    same_state(load_file(tmp_path / "exact" / "model.safetensors"), state)
    name = "model.norm.weight"
    state[name] = state[name].to(dtype)
    state[name][3] = 1 + 2**-9
    save_file({name: t.to(dtype) for name, t in state.items()}, folder / "model.safetensors")
    refuse(folder, tmp_path, quantized, ValueError, f"exact in bfloat16; {name}")
    write_huggingface(ModelFolder(folder, quantized, quantize=True), tmp_path / "rounded")


def test_overwrite_replaces_the_whole_folder(demo, tmp_path):
    folder, quantized = demo
    target = tmp_path / "out"
    ternarize(DEMO, target, 32)
    (target / "stale.json").write_text("old")
    with pytest.raises(ValueError, match="overwrite=True"):
        write_huggingface(ModelFolder(folder, quantized), target)
    write_huggingface(ModelFolder(folder, quantized), target, overwrite=True)
    assert not (target / "stale.json").exists()
    same_state(load_file(target / "model.safetensors"), load_file(folder / "model.safetensors"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]


def test_a_folder_without_a_model_is_never_replaced(demo, tmp_path):
    folder, quantized = demo
    home, file, link = tmp_path / "home", tmp_path / "file", tmp_path / "link"
    home.mkdir()
    (home / "thesis.tex").write_text("mine")
    file.write_text("mine")
    link.symlink_to(folder)
    for target in (home, file, link, folder, tmp_path):
        before = snapshot(tmp_path)
        with pytest.raises(ValueError):
            write_huggingface(ModelFolder(folder, quantized), target, overwrite=True)
        assert snapshot(tmp_path) == before


@pytest.mark.parametrize("file", ["tokenizer.json", "config.json", "model.safetensors"])
def test_missing_files(demo, tmp_path, file):
    folder, quantized = demo
    (folder / file).unlink()
    refuse(folder, tmp_path, quantized, InputError, file)


def test_wrong_options(demo, tmp_path):
    folder, quantized = demo
    wrong = {NAME.replace("up_proj", "upproj"): 128}
    refuse(folder, tmp_path, wrong, ValueError, "upproj.weight is none of")
    refuse(folder, tmp_path, {"model.norm.weight": 128}, ValueError, "only matrices")
    refuse(folder, tmp_path, {NAME: 100}, ValueError, f"100 does not divide .*{NAME}")
    refuse(folder, tmp_path, {NAME: 0}, ValueError, "positive int")
    refuse(folder, tmp_path, {}, ValueError, "got none", quantize=True)
    edit_json(folder / "config.json", quantization_config={"quant_method": "awq"})
    refuse(folder, tmp_path, quantized, ValueError, r"is quantized \(awq\)")


@pytest.mark.parametrize(
    ("value", "match"),
    [(0.123, f"{NAME} is not a hard weight: .* row 5, group 0"), (float("nan"), f"finite; {NAME}")],
)
def test_weights_that_are_not_hard(demo, tmp_path, value, match):
    folder, quantized = demo
    state = load_file(folder / "model.safetensors")
    state[NAME][5, 7] = value
    save_file(state, folder / "model.safetensors")
    refuse(folder, tmp_path, quantized, ValueError, match)


def test_integer_weights_are_refused(demo, tmp_path):
    folder, quantized = demo
    state = load_file(folder / "model.safetensors") | {"mask": torch.ones(2, dtype=torch.int8)}
    save_file(state, folder / "model.safetensors")
    refuse(folder, tmp_path, quantized, ValueError, "mask is torch.int8")


@pytest.mark.parametrize("name", [NAME, "model.embed_tokens.weight", "model.norm.weight"])
def test_a_difference_in_the_file_is_found(demo, tmp_path, monkeypatch, name):
    folder, quantized = demo
    save = folder_export.save_torch_state_dict

    def flip_a_bit(state, staging, **options):
        save(state, staging, **options)
        written = load_file(staging / "model.safetensors")
        bits = written[name].view(-1)[-1:].view(torch.int16)
        bits ^= 1
        save_file(written, staging / "model.safetensors")

    monkeypatch.setattr(folder_export, "save_torch_state_dict", flip_a_bit)
    refuse(folder, tmp_path, quantized, RuntimeError, f"{name} .* differs")


def test_a_full_disk_leaves_nothing(demo, tmp_path):
    folder, quantized = demo
    ternarize(DEMO, tmp_path / "out" / "old", 64)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # writing past the limit fails as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
        refuse(folder, tmp_path, quantized, InputError, "too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_old_folder_comes_back_if_the_new_one_cannot_be_renamed(demo, tmp_path, monkeypatch):
    folder, quantized = demo

    def fail(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr("hestia_tune.files.os.replace", fail)
    refuse(folder, tmp_path, quantized, KeyboardInterrupt, "^$")


def test_a_hard_model_in_bfloat16_stays_mapped(demo, tmp_path, monkeypatch):
    """Tensors that do not change are written from the mapped source and take no memory."""
    folder, quantized = demo
    read, save = SafetensorsFolder.read, folder_export.save_torch_state_dict
    seen: dict[str, int] = {}

    def watched(self, name):
        tensor = read(self, name)
        seen.setdefault(name, tensor.data_ptr())
        return tensor

    def check(state, staging, **options):
        assert {name: tensor.data_ptr() for name, tensor in state.items()} == seen
        save(state, staging, **options)

    monkeypatch.setattr(SafetensorsFolder, "read", watched)
    monkeypatch.setattr(folder_export, "save_torch_state_dict", check)
    write_huggingface(ModelFolder(folder, quantized), tmp_path / "out")
    assert len(seen) == 38
