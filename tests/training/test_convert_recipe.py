"""Test ``hestia_convert``: every format, naive conversion, errors, torchtune's own generate."""

import json
import shutil
import sys
from unittest.mock import Mock

import pytest
import torch
from omegaconf import OmegaConf
from ranks import run_forked
from safetensors.torch import load_file, save_file
from tiny import NUM_QUANTIZED, SHAPE, make_config, run, tune_run, write_config
from torchao.quantization import IntxUnpackedToInt8Tensor
from torchtune import training
from torchtune.data import Message
from torchtune.models.convert_weights import hf_to_tune

import hestia_tune
from hestia_tune import TernaryTensor
from hestia_tune.commands.convert import ConvertRecipe, run_convert
from hestia_tune.errors import InputError
from hestia_tune.export import huggingface as folder_export
from hestia_tune.functional import hard_ternary
from hestia_tune.methods.straight_through import round_embedding
from hestia_tune.models import llama
from hestia_tune.models.folder import SafetensorsFolder
from hestia_tune.models.sources import folder_tensors, names_in_files
from hestia_tune.models.tokenizers import HuggingFaceTokenizer

TOKENS = torch.tensor([[5, 9, 200, 13, 42], [1, 2, 3, 4, 5]])


@pytest.fixture(scope="module")
def trained(model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run(make_config(model_dir, folder, "dataset_val=null", "max_steps_per_epoch=2"))
    return folder


@pytest.fixture
def output_dir(trained, tmp_path):
    """Return an output folder that holds the trained hard model."""
    shutil.copytree(trained / "hard_model", tmp_path / "run" / "hard_model")
    return tmp_path / "run"


def weights_file(folder):
    (file,) = folder.glob("*.safetensors")
    return file


def torchtune_state(folder) -> dict[str, torch.Tensor]:
    state = load_file(weights_file(folder))
    heads = {k: SHAPE[k] for k in ("num_heads", "num_kv_heads")}
    return hf_to_tune(state, dim=SHAPE["embed_dim"], **heads)


def dense_model(folder, dtype):
    with training.set_default_dtype(dtype):
        model = llama(**SHAPE).eval()
    model.load_state_dict(torchtune_state(folder))
    return model


def convert(model_dir, output_dir, *overrides):
    recipe = ConvertRecipe(make_config(model_dir, output_dir, *overrides))
    return recipe.output, recipe.run()


def packed_layers(model, kind):
    return [name for name, p in model.named_parameters() if isinstance(p, kind)]


def test_all_formats_and_the_table(model_dir, output_dir, capsys):
    formats = "convert.formats=[torchao,huggingface,compressed_tensors,gguf]"
    assert run_convert(make_config(model_dir, output_dir, formats)) == 0
    converted = output_dir / "converted"
    assert sorted(p.name for p in converted.iterdir()) == [
        "Modelfile",
        "README.md",
        "compressed_tensors",
        "huggingface",
        "model.gguf",
        "sizes.json",
        "torchao",
    ]
    sizes = json.loads((converted / "sizes.json").read_text())
    assert sizes["torchao"]["quantized_bits_per_weight"] == 2 + 16 / 32
    assert sizes["huggingface"]["quantized_bits_per_weight"] == 16
    weights = torchtune_state(output_dir / "hard_model").items()
    quantized = sum(w.numel() for name, w in weights if "proj" in name or ".mlp.w" in name)
    assert {s["quantized_parameters"] for s in sizes.values()} == {quantized}
    table = capsys.readouterr().out
    assert all(f"| {name} |" in table for name in sizes)
    assert "| Q4_0 (written) |" in table  # the types that hold groups of 32


def test_all_writes_what_is_possible_and_says_what_is_missing(
    model_dir, output_dir, monkeypatch, capsys
):
    for package in ("onnxruntime_genai", "openvino"):
        monkeypatch.setitem(sys.modules, package, None)
    # A format that turns out to be impossible while it is written is left out too.
    refused = InputError("a scale is too small")
    monkeypatch.setattr("hestia_tune.export.gguf.write_gguf", Mock(side_effect=refused))
    assert run_convert(make_config(model_dir, output_dir, "convert.formats=[all]")) == 0
    sizes = json.loads((output_dir / "converted" / "sizes.json").read_text())
    assert list(sizes) == ["torchao", "intx", "huggingface", "compressed_tensors", "mlx"]
    lines = capsys.readouterr().out.splitlines()
    missing = dict(line.split(": ")[1:3] for line in lines if line.startswith("not written: "))
    assert missing.keys() == {"onnx", "openvino", "gguf"}
    assert missing["gguf"] == "a scale is too small"
    assert "pip install 'hestia-tune[openvino]'" in missing["openvino"]
    # A format that is named beside "all" is still refused.
    for name, message in (("onnx", r"hestia-tune\[onnx\]"), ("gguf", "too small")):
        formats = f"convert.formats=[all,{name}]"
        with pytest.raises(InputError, match=message):
            convert(model_dir, output_dir, formats, "convert.overwrite=True")


@pytest.mark.parametrize("source", ["trained", "pretrained"])
def test_every_format_has_the_same_rounded_embedding(model_dir, output_dir, source):
    overrides = ["convert.formats=[huggingface,torchao,gguf]", "bits.embedding=int8"]
    converted, sizes = convert(model_dir, output_dir, f"convert.source={source}", *overrides)
    folder = output_dir / "hard_model" if source == "trained" else model_dir
    embedding = torchtune_state(folder)["tok_embeddings.weight"]
    expected = round_embedding(embedding, "int8").bfloat16()
    assert not torch.equal(expected, embedding.bfloat16())
    found = torchtune_state(converted / "huggingface")["tok_embeddings.weight"]
    assert torch.equal(found, expected)
    model = hestia_tune.load_quantized(converted / "torchao")
    assert torch.equal(model.tok_embeddings.weight.bfloat16(), expected)
    assert sizes["gguf"]["types"]["Q8_0"] == 1


def test_all_of_a_method_with_one_format(model_dir, tmp_path):
    config = make_config(model_dir, tmp_path, "convert.source=pretrained", "convert.formats=[all]")
    del config.quantizer.group_size
    config.quantizer._component_ = "hestia_tune.Fairy2iQATQuantizer"
    recipe = ConvertRecipe(config)
    assert [*recipe.formats] == ["torchao"]
    assert "can only be written as torchao; got gguf" in recipe.missing["gguf"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("name", "kind"), [("torchao", TernaryTensor), ("intx", IntxUnpackedToInt8Tensor)]
)
def test_the_packed_model_is_the_hard_model(model_dir, output_dir, name, kind, dtype):
    converted, _ = convert(model_dir, output_dir, f"convert.formats=[{name}]")
    model = hestia_tune.load_quantized(converted / name, dtype=dtype, kernel="dequantize")
    assert len(packed_layers(model, kind)) == NUM_QUANTIZED
    with torch.no_grad():
        expected = dense_model(output_dir / "hard_model", dtype)(TOKENS)
        assert torch.equal(model(TOKENS), expected)
        fast = hestia_tune.load_quantized(converted / name, dtype=dtype, kernel="int4pack")
        assert (fast(TOKENS) - expected).norm() < 0.02 * expected.norm()
    kernels = [p.kernel for p in fast.parameters() if isinstance(p, TernaryTensor)]
    assert all(kernels) and len(kernels) == (NUM_QUANTIZED if kind is TernaryTensor else 0)


def test_naive_conversion_of_the_pretrained_model(model_dir, tmp_path):
    converted, _ = convert(
        model_dir, tmp_path, "convert.source=pretrained", "convert.formats=[torchao,huggingface]"
    )
    found = torchtune_state(converted / "huggingface")
    for name, weight in torchtune_state(model_dir).items():
        expected = weight.to(torch.bfloat16)
        if "proj" in name or ".mlp." in name:
            expected = hard_ternary(weight.float(), group_size=32).to(torch.bfloat16)
        assert torch.equal(found[name], expected), name
    assert not list(converted.glob(".hard_*"))
    # The next conversion reads the written folder as a hard model.
    source = f"convert.source={converted / 'huggingface'}"
    again, _ = convert(model_dir, tmp_path / "again", source)
    folder = again / "torchao"
    model = hestia_tune.load_quantized(folder, dtype=torch.float32, kernel="dequantize")
    with torch.no_grad():
        expected = dense_model(converted / "huggingface", torch.float32)(TOKENS)
        assert torch.equal(model(TOKENS), expected)


def test_existing_files_are_not_overwritten_without_the_option(model_dir, output_dir):
    converted, _ = convert(model_dir, output_dir, "convert.formats=[gguf]")
    before = (converted / "model.gguf").read_bytes()
    with pytest.raises(ValueError, match=r"model.gguf exists; set convert.overwrite=True"):
        convert(model_dir, output_dir, "convert.formats=[torchao,gguf]")
    assert not (converted / "torchao").exists()
    assert (converted / "model.gguf").read_bytes() == before
    convert(model_dir, output_dir, "convert.formats=[gguf]", "convert.overwrite=True")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torchao", "torchao exists; choose another name .overwrite=True replaces other models"),
        ("model.gguf", "model.gguf is a folder; remove it, or set convert.output"),
    ],
)
def test_what_overwrite_may_not_replace_is_refused_before_anything_is_written(
    model_dir, output_dir, name, message
):
    (output_dir / "converted" / name).mkdir(parents=True)
    formats = "convert.formats=[huggingface,torchao,gguf]"
    with pytest.raises(InputError, match=message):
        convert(model_dir, output_dir, formats, "convert.overwrite=True")
    assert [path.name for path in (output_dir / "converted").iterdir()] == [name]


def test_a_readme_of_the_user_stays(model_dir, output_dir):
    readme = output_dir / "converted" / "README.md"
    readme.parent.mkdir()
    readme.write_text("# My project")
    with pytest.raises(InputError, match="README.md exists, and the file's model card has this"):
        convert(model_dir, output_dir, "convert.formats=[gguf]")
    assert readme.read_text() == "# My project" and len([*readme.parent.iterdir()]) == 1
    convert(model_dir, output_dir, "convert.formats=[gguf]", "convert.overwrite=True")
    assert "hestia_tune" in readme.read_text()


def test_sizes_of_earlier_conversions_stay(model_dir, output_dir):
    for name in ("gguf", "huggingface", "intx"):
        converted, _ = convert(model_dir, output_dir, f"convert.formats=[{name}]")
        if name == "huggingface":
            (converted / "model.gguf").unlink()
    assert json.loads((converted / "sizes.json").read_text()).keys() == {"huggingface", "intx"}


def test_several_processes_are_refused(model_dir, output_dir, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="runs in one process, not in 2; run hestia convert"):
        convert(model_dir, output_dir, "convert.formats=[gguf]")
    assert not (output_dir / "converted").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["quantizer.group_size=16"], "was trained with quantizer ternary, group_size=32"),
        (["quantizer.include=['layers.*.mlp.*']"], "on 14 layers, but the config has"),
        (["convert.source=/nowhere"], "there is no model in /nowhere"),
        (["convert.formats=[guf]"], "one of torchao, intx, .*; got guf"),
        (["convert.formats=[]"], "convert.formats must name at least one"),
        (["convert.formats=gguf"], "convert.formats: give a list"),
        (["quantizer.groupsize=32"], "quantizer: .*groupsize"),
        (["convert.overwite=True"], "did you mean overwrite"),
        (["convert.formats=[torchao,gguf]", "convert.block_type=Q8_0"], "TQ2_0, TQ1_0; got Q8_0"),
        (["convert.block_type=[Q2_0,Q2_K]"], "no Q2_K any more.*set convert.block_type=auto"),
        (
            ["convert.formats=[torchao,gguf]", "convert.block_type=[TQ2_0,Q2_0]"],
            "no block of TQ2_0 or Q2_0 holds .*; use convert.block_type=Q4_0",
        ),
        (["checkpointer.model_type=GEMMA"], "model_type GEMMA is not supported"),
    ],
)
def test_errors_come_before_anything_is_written(model_dir, output_dir, overrides, message):
    with pytest.raises(InputError, match=message):
        convert(model_dir, output_dir, *overrides)
    assert not any((output_dir / "converted").glob("*"))


def test_the_error_without_a_trained_model_names_the_remedy(model_dir, tmp_path):
    with pytest.raises(ValueError, match="train first, or convert.source=pretrained"):
        convert(model_dir, tmp_path)


@pytest.mark.parametrize("name", ["torchao", "huggingface", "compressed_tensors", "gguf", "onnx"])
def test_a_weight_that_is_not_ternary_stops_the_conversion(model_dir, output_dir, name):
    file = weights_file(output_dir / "hard_model")
    state = load_file(file)
    state["model.layers.1.mlp.up_proj.weight"][3, 40] = 0.123
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.(up_proj|w3)"):
        convert(model_dir, output_dir, f"convert.formats=[{name}]")
    assert not any((output_dir / "converted").iterdir())


def test_a_file_that_reads_back_differently_is_not_kept(model_dir, output_dir, monkeypatch):
    read = folder_export.read_state

    def damaged(path):
        state = read(path)
        if path.suffix == ".pt":
            state["layers.1.mlp.w2.weight"].qdata[0, 0] ^= 1
        return state

    monkeypatch.setattr(folder_export, "read_state", damaged)
    with pytest.raises(RuntimeError, match=r"layers.1.mlp.w2.weight read back differs"):
        convert(model_dir, output_dir)
    assert not any((output_dir / "converted").iterdir())


@pytest.mark.parametrize("damage", ["empty", "half", "byte"])
def test_the_error_names_a_damaged_weights_file(model_dir, output_dir, tmp_path, damage):
    convert(model_dir, output_dir)
    folder = tmp_path / "packed"
    shutil.copytree(output_dir / "converted" / "torchao", folder)
    (file,) = folder.glob("*.pt")
    content = bytearray(file.read_bytes())
    content[content.index(b"TernaryTensor")] ^= 0x80  # in the names that the file calls
    length = {"empty": 0, "half": len(content) // 2, "byte": len(content)}[damage]
    file.write_bytes(content[:length])
    with pytest.raises(ValueError, match=rf"{file.name} cannot be read, or is damaged \("):
        hestia_tune.load_quantized(folder)


def test_load_quantized_names_the_missing_file(model_dir, output_dir, tmp_path):
    with pytest.raises(ValueError, match="give a folder that `tune run hestia_convert`"):
        hestia_tune.load_quantized(tmp_path)
    with pytest.raises(ValueError, match="holds no packed model"):
        hestia_tune.load_quantized(output_dir / "hard_model")
    converted, _ = convert(model_dir, output_dir)
    folder = converted / "torchao"
    about = json.loads((folder / "hestia.json").read_text())
    (folder / "hestia.json").write_text(json.dumps(about | {"format_version": 99}))
    with pytest.raises(ValueError, match="format_version 99"):
        hestia_tune.load_quantized(folder)
    (folder / "hestia.json").write_text(json.dumps(about))
    (folder / "model.pt").unlink()
    with pytest.raises(ValueError, match="model.pt"):
        hestia_tune.load_quantized(folder)


@pytest.mark.parametrize(
    "section",
    [
        {"_component_": "os.system", "command": "touch {marker}"},
        {
            "_component_": "torchtune.models.convert_weights.torch.os.system",
            "command": "touch {marker}",
        },
        {"_component_": "hestia_tune.models.folder.shutil.rmtree", "path": "{marker}"},
        {
            "_component_": "hestia_tune.models.llama",
            "vocab_size": {"_component_": "os.system", "command": "touch {marker}"},
        },
        {},
    ],
)
def test_a_packed_folder_can_call_only_builders(tmp_path, section):
    marker = tmp_path / "marker"
    text = json.dumps({"format_version": 1, "weights": "model.pt", "model": section})
    (tmp_path / "hestia.json").write_text(text.replace("{marker}", str(marker)))
    with pytest.raises(ValueError, match="as the model's builder; only functions of"):
        hestia_tune.load_quantized(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("model_type", ["LLAMA3_2", "QWEN2"])
def test_names_map_back(model_dir, model_type):
    state = load_file(model_dir / "model.safetensors")
    by_name = names_in_files(model_type, model_dir)
    assert sorted(sum(by_name.values(), [])) == sorted(state)
    for ours, weight in folder_tensors(model_type, SafetensorsFolder(model_dir)):
        assert torch.equal(weight.sort(0).values, state[by_name[ours][0]].sort(0).values)


def test_the_tokenizer_takes_messages(model_dir, tmp_path):
    messages = [Message(role="user", content="ab"), Message(role="assistant", content="")]
    plain = HuggingFaceTokenizer(str(model_dir))
    expected = plain.encode("ab", add_bos=False, add_eos=False)
    assert plain({"messages": messages}, inference=True)["tokens"] == expected
    assert plain.stop_tokens == [0]

    folder = tmp_path / "chat"
    shutil.copytree(model_dir, folder)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    chat = HuggingFaceTokenizer(str(folder))
    tokens = chat({"messages": messages}, inference=True)["tokens"]
    assert chat.decode(tokens) == "<user>ab<assistant>"

    (folder / "chat_template.jinja").unlink()  # as older folders have several
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "tools", "template": "no"},
        {"name": "default", "template": template},
    ]
    config["pad_token"] = "<none>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    older = HuggingFaceTokenizer(str(folder))
    assert older({"messages": messages}, inference=True)["tokens"] == tokens
    assert older.pad_id == older.eos_id


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchao", "intx"])
def test_torchtunes_own_generate_runs_it(model_dir, output_dir, tmp_path, name):
    path = write_config(make_config(model_dir, output_dir), tmp_path / "config.yaml")
    done = run_forked("--config", path, f"convert.formats=[{name}]", recipe="hestia_convert")
    assert done.returncode == 0, done.stderr
    yaml = output_dir / "converted" / name / "generate.yaml"
    assert OmegaConf.load(yaml).dtype == "bf16"
    arguments = ("prompt.user=abc", "top_k=1", "max_new_tokens=8")
    done = tune_run("--config", str(yaml), *arguments, recipe="generate")
    assert done.returncode == 0 and "kernels: " in done.stderr, done.stderr
    exact = "quantizer.kernel=dequantize"
    done = tune_run("--config", str(yaml), *arguments, exact, recipe="generate")
    assert done.returncode == 0, done.stderr
    tokenizer = HuggingFaceTokenizer(str(model_dir))
    tokens = tokenizer.encode("abc", add_bos=False, add_eos=False)
    model = dense_model(output_dir / "hard_model", torch.bfloat16)
    with torch.inference_mode():
        for _ in range(8):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
            if tokens[-1] in tokenizer.stop_tokens:
                break
    assert tokenizer.decode(tokens).strip() in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {"Q2_0": NUM_QUANTIZED - 2, "Q4_0": 2}),
        (("convert.block_type=Q4_0",), {"Q4_0": NUM_QUANTIZED}),
        # The rows of the down projections have 96 weights, which blocks of 64 do not divide.
        (("convert.block_type=[Q2_0,Q4_0]",), {"Q2_0": NUM_QUANTIZED - 2, "Q4_0": 2}),
    ],
)
def test_gguf_takes_the_first_block_type_that_holds_a_weight(
    model_dir, tmp_path, overrides, expected
):
    options = ("quantizer.group_size=channel", "convert.source=pretrained", *overrides)
    _, summaries = convert(model_dir, tmp_path, "convert.formats=[gguf]", *options)
    assert summaries["gguf"]["types"].items() >= expected.items()
