"""Tests that a format is one object and one line: the toy in this file goes through everything."""

import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from families import make_family
from safetensors.torch import load_file, save_file

from hestia_tune import export
from hestia_tune.__main__ import main
from hestia_tune.errors import InputError
from hestia_tune.export import format as formats
from hestia_tune.export.format import Format, holding, python_line, suggested_group_size
from hestia_tune.export.huggingface import sizes
from hestia_tune.methods import Method
from hestia_tune.methods.groups import TERNARY
from hestia_tune.models.folder import ModelFolder

transformers = pytest.importorskip("transformers")


class Toy(Format):
    """A file of numpy with the codes and scales of ternary weights."""

    name = "toy"
    about = "codes and scales in one file of numpy"
    runs_in = "numpy"
    library = "numpy"
    file = "model.npz"
    codes = frozenset({TERNARY})
    group_multiple = 16
    architectures = ("LlamaForCausalLM",)
    preferred_group = (16, "16 weights share a scale, because this is a toy")
    loading = "With numpy: `numpy.load('MODEL/model.npz')`."
    checked = 0

    def check(self, source, settings):
        Toy.checked += 1
        if (kind := source.config["architectures"][0]) not in self.architectures:
            raise InputError(f"toys are Llamas; got {kind}; leave toy out of convert.formats")

    def write(self, conversion, target):
        source, arrays = conversion.source, {}
        for name in source.shapes:
            weight = source.read_hard(name)
            if name in source.quantized:
                hard = source.pack(name, weight)
                arrays[f"{name}.codes"] = hard.codes().numpy()
                arrays[f"{name}.scale"] = hard.scale.float().numpy()
            else:
                arrays[name] = weight.float().numpy()
        np.savez(target, **arrays)
        self.verify(source, target)
        parts = [array.nbytes for name, array in arrays.items() if name not in source.shapes]
        return sizes(source.shapes, source.quantized, target.stat().st_size, sum(parts))

    def verify(self, source, path):
        arrays = np.load(path)
        for name in source.quantized:
            codes, scale = (torch.tensor(arrays[f"{name}.{part}"]) for part in ("codes", "scale"))
            found = codes.unflatten(1, (scale.shape[1], -1)) * scale.unsqueeze(-1)
            if not torch.equal(found.flatten(1), source.read_hard(name).float()):
                raise RuntimeError(f"{name} differs")

    def run_lines(self, path, name, *, is_chat=False):
        return [python_line(f"import numpy; print(sorted(numpy.load({str(path)!r}))[-1])")]

    def notes(self, conversion, path):
        return f"a note on {len(conversion.source.quantized)} weights"


TOY = Toy()


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """Register the toy format, in an empty folder."""
    monkeypatch.setitem(formats.FORMATS, "toy", f"{__name__}:TOY")
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Toy, "checked", 0)


def hestia(capsys, *words):
    """Run a command and return (exit code, stdout, stderr)."""
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def test_a_toy_format_goes_through_every_command(toy, tmp_path, capsys):
    folder = make_family(tmp_path / "model", "Llama")
    (tmp_path / "data.txt").write_text("\n".join(f"Document {n} has few words." for n in range(40)))

    asked = ("--format", "toy,torchao", "--output", "mine.yaml")
    code, out, err = hestia(capsys, "init", folder, "data.txt", "--device", "cpu", *asked)
    assert code == 0, err
    assert "formats: toy, torchao" in out and "because this is a toy" in " ".join(out.split())
    assert Toy.checked > 1 and "formats: [toy, torchao]" in (tmp_path / "mine.yaml").read_text()

    Toy.checked = 0
    code, _, err = hestia(capsys, "validate", "mine.yaml")
    assert code == 0 and Toy.checked == 1, err
    code, _, err = hestia(capsys, "validate", "mine.yaml", "convert.formats=[tory]")
    assert code == 1 and "openvino, toy, all; got tory" in err

    options = ("convert.source=pretrained", "convert.output=out", "convert.formats=[toy]")
    code, out, err = hestia(capsys, "convert", "mine.yaml", *options)
    assert code == 0, err
    assert "| toy | " in out and "\n  # toy\n" in out and "a note on " in out
    (line,) = [line for line in out.splitlines() if "import numpy" in line]
    _, *arguments = shlex.split(line)
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "model.norm.weight", done.stderr
    card = (tmp_path / "out" / "README.md").read_text()
    assert "numpy.load('MODEL/model.npz')" in card and "library_name: numpy" in card

    code, _, err = hestia(capsys, "convert", "mine.yaml", *options)
    assert code == 1 and "model.npz exists; set convert.overwrite=True" in err

    wrong = ("quantizer.codebook=binary", "~quantizer.scale", "~quantizer.scale_lr")
    wrong += ("~quantizer.start", "convert.overwrite=True")
    code, _, err = hestia(capsys, "convert", "mine.yaml", *options, *wrong)
    rule = "codebook=binary can only be written as torchao, huggingface, "
    assert code == 1 and rule in err and "; got toy; remove toy, or set convert.formats=[" in err


def test_a_toy_format_is_left_out_where_it_does_not_fit(toy, tmp_path, capsys):
    folder = make_family(tmp_path / "model", "Qwen2")
    (tmp_path / "data.txt").write_text("\n".join(f"Document {n} has few words." for n in range(40)))
    code, _, err = hestia(capsys, "init", folder, "data.txt", "--device", "cpu", "--format", "toy")
    assert code == 1 and "--format toy: toys are Llamas; got Qwen2ForCausalLM" in err


def test_a_toy_format_in_the_table_of_the_documentation(toy):
    from formats_table import columns, registry_table

    row = f"| `toy` | {TOY.about} | numpy | ternary | multiples of 16 | no |"
    assert row in registry_table()
    assert columns()["toy"] == ["convert.formats=[toy]"]


def test_no_toy_is_left():
    assert "toy" not in formats.FORMATS


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("even, group_size=32, codebook=binary", "torchao huggingface ct gguf onnx mlx openvino"),
        ("ternary, group_size=32", "torchao intx huggingface ct gguf onnx mlx openvino"),
        ("two_bit, group_size=32", "torchao intx huggingface ct gguf onnx mlx openvino"),
        ("even, group_size=32, codebook=int2", "torchao huggingface ct gguf mlx openvino"),
        ("int4, group_size=32", "torchao huggingface ct gguf openvino"),
        ("dlt, group_size=32, start=absmax", "huggingface"),
        ("fairy2i, num_stages=2, granularity=tensor", "torchao"),
    ],
)
def test_the_codes_of_a_method_decide_which_formats_hold_it(key, expected):
    names = expected.replace("ct", "compressed_tensors").split()
    assert holding(Method.from_key(key)) == names


def test_an_error_names_the_layer_and_formats_that_hold_every_layer():
    keys = {"a.q_proj": "ternary, group_size=32", "a.down_proj": "int4, group_size=32"}
    methods = {name: Method.from_key(key) for name, key in keys.items()}
    with pytest.raises(
        InputError, match=r"^a\.down_proj: a model of int4, group_size=32 can "
    ) as e:
        formats.load_format("mlx").check_layers(methods)
    fitting = "torchao, huggingface, compressed_tensors, gguf, openvino"
    assert str(e.value).endswith(f"; got mlx; remove mlx, or set convert.formats=[{fitting}]")
    methods["a.up_proj"] = Method.from_key("dlt, group_size=32, start=absmax")
    with pytest.raises(InputError, match=r"a\.up_proj: .* can only be written as huggingface") as e:
        formats.load_format("gguf").check_layers(methods)
    assert str(e.value).endswith("or set convert.formats=[huggingface]")
    methods["a.v_proj"] = Method.from_key("fairy2i, num_stages=2, granularity=tensor")
    with pytest.raises(InputError, match=r"; got torchao; remove torchao$"):  # nothing holds both
        formats.load_format("torchao").check_layers(methods)
    experts = ["a.experts.gate_up_proj"]
    with pytest.raises(InputError, match=r"set convert.formats=\[torchao,huggingface\], or leave"):
        formats.load_format("openvino").check_layers(dict([*methods.items()][:1]), experts)


def test_every_format_says_what_the_commands_and_pages_need(tmp_path):
    for name, form in zip(formats.FORMATS, formats.all_formats(), strict=True):
        assert form.name == name and formats.load_format(name) is form
        assert form.about and form.runs_in and form.loading and form.run_lines(tmp_path, "m")
    assert suggested_group_size([512], ["gguf", "mlx"]) == 256


PACKAGES = {"gguf": "gguf", "mlx": "mlx_lm", "onnx": "onnxruntime_genai"}
PACKAGES |= {"openvino": "openvino_tokenizers", "compressed_tensors": "compressed_tensors"}


@pytest.mark.parametrize("name", PACKAGES)
def test_what_was_written_is_compared_with_the_model(name, tmp_path, demo):
    pytest.importorskip(PACKAGES[name])
    folder, quantized = demo
    source, other = ModelFolder(folder, quantized), tmp_path / "other"
    path = tmp_path / "out" / (formats.load_format(name).file or name)
    getattr(export, f"write_{name}")(source, path)
    formats.load_format(name).verify(source, path)
    shutil.copytree(folder, other)
    state = load_file(other / "model.safetensors")
    state["model.layers.0.mlp.up_proj.weight"] *= -1
    save_file(state, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((RuntimeError, InputError), match="differ"):
        formats.load_format(name).verify(ModelFolder(other, quantized), path)
