"""Test folders read as they are: packed layouts of other programs, and what `inspect` says."""

import json
import re
import weakref

import pytest
import torch
from hard_folders import assert_same, edit_json, is_linear, make_hard, pack_words, to_mlx
from safetensors.torch import load_file, save_file
from tiny import make_config, make_model_dir

from hestia_tune.__main__ import main
from hestia_tune.commands.convert import ConvertRecipe
from hestia_tune.errors import InputError
from hestia_tune.functional import hard_ternary
from hestia_tune.methods import EvenMethod
from hestia_tune.models.contents import contents_table, read_matrices
from hestia_tune.models.folder import IntegerWeight, SafetensorsFolder

NUM_LINEARS = 14


@pytest.fixture
def ternary(tmp_path):
    return make_hard(tmp_path / "ternary", lambda w: hard_ternary(w, group_size=32))


def kinds(folder):
    matrices, _ = read_matrices(folder)
    found = [m for m in matrices if "embed" not in m.name]
    return {(m.levels and len(m.levels), m.group_size, m.stored) for m in found}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_mlx_folders_are_read(ternary, tmp_path, dtype, bits):
    folder = to_mlx(ternary, tmp_path / "mlx", 32, dtype, bits)
    assert_same(ternary, folder)
    name = str(dtype).removeprefix("torch.")
    assert kinds(folder) == {(3, 32, f"{bits} bits of MLX, {name}")}


def test_general_affine_weights_are_read():
    """Check codes 0 to 3 with any bias against the formula in float64."""
    codes = torch.randint(0, 4, (5, 64))
    scale, bias = torch.randn(2, 5, 2)
    words = pack_words(codes, 2).to(torch.uint32)
    packed = IntegerWeight(
        layout="MLX", shape=codes.shape, bits=2, codes=words, scale=scale, bias=bias
    )
    exact = codes.double().unflatten(1, (2, 32)) * scale.double()[..., None]
    exact = (exact + bias.double()[..., None]).flatten(1)
    assert packed.nbytes == 4 * (5 * 4 + 2 * 5 * 2)
    assert torch.allclose(packed.dequantize().double(), exact, atol=1e-6)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("width", [32, 60])
def test_signed_codes_are_read_with_padded_rows(bits, width):
    half = 2 ** (bits - 1)
    codes = torch.randint(-half, half, (3, width))
    scale = (torch.rand(3, 1) + 1).bfloat16()
    words = pack_words(codes + half, bits).to(torch.uint32).view(torch.int32)
    packed = IntegerWeight(layout="x", shape=codes.shape, bits=bits, codes=words, scale=scale)
    expected = (codes * scale.float()).to(torch.bfloat16)
    assert torch.equal(packed.dequantize(), expected)


@pytest.mark.parametrize(
    ("options", "levels"),
    [
        ([], 3),
        (["quantizer.group_size=channel"], 3),
        (["quantizer.codebook=binary"], 2),
        (["quantizer.codebook=int2"], 4),
        (["quantizer._component_=hestia_tune.TwoBit"], 4),
    ],
)
def test_every_format_that_is_read_says_the_same(model_dir, tmp_path, options, levels):
    pytest.importorskip("compressed_tensors")
    formats = ["huggingface", "compressed_tensors", "torchao"]
    formats += ["intx"] if levels == 3 or "TwoBit" in str(options) else []
    names = f"convert.formats=[{','.join(formats)}]"
    overrides = ("convert.source=pretrained", names, *options)
    recipe = ConvertRecipe(make_config(model_dir, tmp_path, *overrides))
    recipe.run()
    size = "channel" if options and "channel" in options[0] else 32
    for name in formats:
        found = {(levels_, size_) for levels_, size_, _ in kinds(recipe.output / name)}
        assert found == {(levels, size)}, name
    assert_same(recipe.output / "huggingface", recipe.output / "compressed_tensors")
    _, num_bytes = read_matrices(recipe.output / "torchao")
    weights = read_matrices(recipe.output / "torchao")[0]
    bits = {
        round(8 * m.nbytes / m.size - 16 * (1 / 32 if size == 32 else 1 / m.width), 3)
        for m in weights
        if m.levels
    }
    assert bits == {{2: 1, 3: 2, 4: 2}[levels]}
    assert num_bytes <= (recipe.output / "torchao" / "model.pt").stat().st_size


def test_the_table_and_its_last_line(ternary, capsys):
    assert main(["inspect", str(ternary)]) == 0
    lines = capsys.readouterr().out.splitlines()
    state = load_file(ternary / "model.safetensors")
    linears = [w for name, w in state.items() if is_linear(name)]
    zeros = sum((w == 0).sum() for w in linears) / sum(w.numel() for w in linears)
    size = sum(w.nbytes for w in state.values()) / 1e6
    assert len([line for line in lines if "_proj" in line]) == NUM_LINEARS
    assert lines[-1] == (
        f"{NUM_LINEARS} linears: ternary in groups of 32, {zeros:.0%} zeros; "
        f"model.embed_tokens dense bfloat16; {size:.1f} MB"
    )
    weight = state["model.layers.1.mlp.down_proj.weight"]
    share = (weight == 0).double().mean()
    row = f"| model.layers.1.mlp.down_proj | 3 | 32 | 16.000 | {share:.1%} | bfloat16 | 12288 |"
    assert row in lines


def test_layers_are_in_the_order_of_their_numbers(tmp_path):
    make_model_dir(tmp_path / "model", num_layers=11)
    names = [m.name for m in read_matrices(tmp_path / "model")[0]]
    blocks = [int(name.split(".")[2]) for name in names if "layers" in name]
    assert blocks == sorted(blocks) and blocks[-1] == 10


def test_mixed_models_are_counted_by_kind(tmp_path):
    count = iter(range(100))
    even = EvenMethod(group_size="channel")

    def harden(w):
        return even.hard(w) if next(count) % 7 == 0 else hard_ternary(w, group_size=32)

    folder = make_hard(tmp_path / "model", harden)
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.mlp.up_proj.weight"] += 0.123
    save_file(state, folder / "model.safetensors")
    last = contents_table(folder).splitlines()[-1]
    assert "linears: ternary in groups of 32, " in last
    assert "2 linears: binary with one scale per row, 0% zeros" in last
    assert "1 linears: dense bfloat16" in last


def test_a_row_that_is_one_group_is_named_like_the_other_groups(tmp_path):
    folder = make_hard(
        tmp_path / "model", lambda w: hard_ternary(w, group_size=64), intermediate_dim=128
    )
    assert kinds(folder) == {(3, 64, "bfloat16")}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("empty", r"no model.safetensors; copy"),
        ("half", r"model.safetensors cannot be read, or is damaged"),
        ("part", r"q_proj.biases is missing"),
        ("width", r"MLX weights must have codes of 2, 4 or 8 bits"),
        ("gptq", r"is quantized \(gptq\); give a folder with dense weights, or"),
        ("codes", r"down_proj.weight in .* is uint32 and no weight"),
        ("config", r"config.json is damaged"),
    ],
)
def test_a_damaged_or_foreign_folder_is_one_clear_line(ternary, tmp_path, capsys, damage, message):
    folder = to_mlx(ternary, tmp_path / "mlx", 32)
    file = folder / "model.safetensors"
    state = load_file(file)
    stem = "model.layers.0.self_attn.q_proj"
    if damage == "empty":
        file.unlink()
    elif damage == "half":
        file.write_bytes(file.read_bytes()[:5000])
    elif damage == "part":
        del state[f"{stem}.biases"]
        save_file(state, file)
    elif damage == "width":
        state[f"{stem}.weight"] = state[f"{stem}.weight"].view(torch.int32)[:, 1:].contiguous()
        save_file(state, file)
    elif damage == "gptq":
        edit_json(folder / "config.json", quantization_config={"quant_method": "gptq"})
    elif damage == "codes":
        config = json.loads((folder / "config.json").read_text())
        del config["quantization"], config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config))
    else:
        (folder / "config.json").write_text("{")
    assert main(["inspect", str(folder)]) == 1
    (line,) = [
        text for text in capsys.readouterr().err.splitlines() if text.startswith("inspect: error")
    ]
    assert pytest.raises(InputError, read_matrices, folder).match(message)
    assert str(pytest.raises(InputError, read_matrices, folder).value) in line


def test_one_group_size_of_a_layer_may_differ_in_mlx(ternary, tmp_path):
    folder = to_mlx(ternary, tmp_path / "mlx", 32)
    config = json.loads((folder / "config.json").read_text())
    state = load_file(folder / "model.safetensors")
    stem = "model.layers.0.self_attn.q_proj"
    state[f"{stem}.scales"] = state[f"{stem}.scales"][:, :1].contiguous()
    state[f"{stem}.biases"] = -state[f"{stem}.scales"]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(InputError, match="MLX weights"):
        SafetensorsFolder(folder)
    own = {stem: {"group_size": 64, "bits": 2}, "model.embed_tokens": False}
    edit_json(folder / "config.json", quantization=config["quantization"] | own)
    assert SafetensorsFolder(folder).read(f"{stem}.weight").shape == (64, 64)


def test_zero_points_of_compressed_tensors_are_refused(ternary, tmp_path):
    state = load_file(ternary / "model.safetensors")
    stem = "model.layers.0.self_attn.q_proj"
    state[f"{stem}.weight_packed"] = torch.zeros(64, 4, dtype=torch.int32)
    state[f"{stem}.weight_zero_point"] = torch.zeros(64, 1, dtype=torch.int32)
    save_file(state, ternary / "model.safetensors")
    with pytest.raises(InputError, match=f"{stem}.weight_zero_point: only symmetric"):
        SafetensorsFolder(ternary)


def test_reading_holds_one_weight_at_a_time(tmp_path, monkeypatch):
    """Check that no dense weight is alive when the next one is made."""
    alive, made = set(), []
    folder = to_mlx(
        make_hard(tmp_path / "model", lambda w: hard_ternary(w, group_size=32)),
        tmp_path / "mlx",
        32,
    )
    dequantize = IntegerWeight.dequantize

    def counted(self):
        made.append(len(alive))
        weight = dequantize(self)
        alive.add(key := len(made))
        weakref.finalize(weight, alive.discard, key)
        return weight

    monkeypatch.setattr(IntegerWeight, "dequantize", counted)
    read_matrices(folder)
    assert len(made) == NUM_LINEARS and max(made) <= 1


def write_gguf(path, tensors):
    """Write tensors with the package gguf: name -> (values, type)."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    for name, (values, kind) in tensors.items():
        kind = getattr(gguf.GGMLQuantizationType, kind)
        writer.add_tensor(name, gguf.quants.quantize(values.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_described_by_its_types(tmp_path, capsys):
    """Exact ternary blocks have three levels, and other blocks have their type."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 256, generator=generator)
    hard = hard_ternary(weight, group_size=256).half().float()
    path = write_gguf(
        tmp_path / "model.gguf",
        {
            "token_embd.weight": (weight, "F16"),
            "blk.0.attn_q.weight": (hard, "TQ2_0"),
            "blk.0.ffn_down.weight": (weight, "Q4_0"),
            "output_norm.weight": (torch.ones(256), "F32"),
        },
    )
    found, num_bytes = read_matrices(path)
    stored = {m.name: (m.stored, m.levels and len(m.levels), 8 * m.nbytes / m.size) for m in found}
    assert stored == {
        "blk.0.attn_q": ("TQ2_0", 3, 2.0625),
        "blk.0.ffn_down": ("Q4_0", None, 4.5),
        "token_embd": ("F16", None, 16.0),
    }
    assert num_bytes == sum(m.nbytes for m in found) + 4 * 256
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert "| blk.0.attn_q | 3 | 256 | 2.062 |" in out or "| blk.0.attn_q | 3 | channel |" in out
    assert "1 linears: Q4_0" in out and "token_embd dense F16" in out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.gguf", b"GGUF, but no file", "model.gguf cannot be read by the package gguf"),
        ("none.gguf", None, "none.gguf does not exist; give the folder of a model, or a .gguf"),
        ("none", None, "none does not exist"),
        ("model.bin", b"x", "model.bin is no folder and no .gguf file"),
        ("folder/model.gguf", b"x", r"has no safetensors; inspect its GGUF file: .*model.gguf"),
    ],
)
def test_inspect_says_what_it_cannot_read(tmp_path, capsys, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    path = path.parent if path.parent != tmp_path else path
    assert main(["inspect", str(path)]) == 1
    (line,) = [
        text for text in capsys.readouterr().err.splitlines() if text.startswith("inspect: error")
    ]
    assert re.search(message, line), line
