"""Test ``hestia init``: what it writes, that a run accepts it, what it refuses."""

import json
import re
import shlex
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from families import make_family
from omegaconf import OmegaConf
from tiny import make_model_dir

from hestia_tune.__main__ import main
from hestia_tune.commands import init
from hestia_tune.commands.convert import run_convert
from hestia_tune.commands.qat import run_qat
from hestia_tune.config.run_config import RunConfig, load_config
from hestia_tune.memory import MemoryPlan

transformers = pytest.importorskip("transformers")
TEXTS = [f"Document {n} has a few words about number {n}." for n in range(40)]


def write_data(path, column="text", **others):
    """Write the texts as a parquet, JSON-lines or text file, and return its path."""
    rows = [{column: text} | {k: v[n] for k, v in others.items()} for n, text in enumerate(TEXTS)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".txt":
        path.write_text("\n".join(TEXTS))
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Run every test in an empty folder, as the only process."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert not torch.distributed.is_initialized()


@pytest.fixture(autouse=True)
def no_estimates(request, monkeypatch):
    """Estimating memory takes most of the time; the fixture ``estimates`` does it."""
    if "estimates" not in request.fixturenames:
        check = init.check_run
        monkeypatch.setattr(init, "check_run", lambda config, **_: check(config, estimates=False))


@pytest.fixture
def estimates():
    """Estimate memory and time, as the command does."""


@pytest.fixture
def data(tmp_path):
    """The path of a text file."""
    return write_data(tmp_path / "data.txt")


def run_init(capsys, *arguments):
    """Run the command and return (exit code, stdout, the error)."""
    code = main(["init", *map(str, arguments), "--device", "cpu"])
    out, err = capsys.readouterr()
    return code, out, "\n".join(x for x in err.splitlines() if x.startswith("init: error:"))


@pytest.mark.parametrize(
    ("family", "ending"),
    [
        ("Llama", "parquet"),
        ("Falcon", "jsonl"),
        ("Qwen3-MoE", "txt"),
    ],
)
def test_the_written_config_is_valid_and_its_commands_are_printed(
    family, ending, tmp_path, capsys, monkeypatch
):
    folder = make_family(tmp_path / "my model", family)
    data = write_data(tmp_path / f"data.{ending}")
    code, out, error = run_init(capsys, folder, data)
    assert (code, error) == (0, "")
    steps = [shlex.split(line, comments=True) for line in out.splitlines()[-4:]]
    commands = ["validate", "qat", "eval", "convert"]
    assert steps == [["hestia", command, "my model.yaml"] for command in commands]
    assert main(steps[0][1:]) == 0
    assert "Next: hestia qat 'my model.yaml'" in capsys.readouterr().out
    config = RunConfig.parse(load_config("my model.yaml"))
    assert config.dataset["source"] == {"jsonl": "json", "txt": "text"}.get(ending, ending)
    assert config.dataset["seq_len"] == 64  # the model's longest sequence
    assert config.quantizer["group_size"] == (64 if family == "Falcon" else 32)
    kind = "HestiaQATQuantizer" if family == "Qwen3-MoE" else "TwoBit"
    assert config.quantizer["_component_"] == f"hestia_tune.{kind}"
    assert config.output_dir == "./runs/my model"
    # transformers' own tokenizer of Qwen2 adds a token.
    end = config.tokenizer.get("eos_token")  # without the key it is the tokenizer's own
    assert end == ("<|endoftext|>" if family == "Qwen2" else None)
    assert config.reconstruction == "auto" and config.frozen_modules == ["tok_embeddings"]
    assert (config.device, config.batch_size, config.max_steps) == ("cpu", 4, 4 * 720)
    text = (tmp_path / "my model.yaml").read_text()
    for form in ("compressed_tensors", "gguf", "onnx"):
        written = form in config.convert.formats
        assert written != (f"# {form} is left out: " in text)
        assert written != (f"\n  not {form}: " in out)
    assert f"\n  formats: {', '.join(config.convert.formats)}\n" in re.sub(r"\n {4}", " ", out)
    assert {"torchao", "huggingface"} <= {*config.convert.formats}
    assert ("gguf" in config.convert.formats) == (
        family in ("Llama", "Qwen2", "Phi-3", "Qwen3-MoE")
    )
    assert ("scale" in config.quantizer) == (family != "Qwen3-MoE")  # experts learn no scales
    no_packed = family in ("Falcon", "Qwen3-MoE")
    assert ("compressed_tensors" in config.convert.formats) != no_packed


def test_a_written_config_trains_and_converts(tmp_path, capsys, data):
    make_model_dir(tmp_path / "model")
    assert run_init(capsys, tmp_path / "model", data)[0] == 0
    small = "reconstruct: {num_samples: 4, epochs: 1, kl_epochs: 1}\nmax_steps: 2\ncompile: False"
    config = OmegaConf.merge(load_config("model.yaml"), OmegaConf.create(small))
    assert run_qat(config) == 0
    formats = ["torchao", "huggingface", "compressed_tensors", "gguf", "onnx", "mlx", "openvino"]
    assert config.convert.formats == formats
    config.convert.formats = ["torchao", "gguf"]  # the others take seconds
    assert run_convert(config) == 0
    sizes = json.loads((tmp_path / "runs/model/converted/sizes.json").read_text())
    assert [*sizes] == ["torchao", "gguf"]
    # A second config does not take the folder of this run.
    assert run_init(capsys, tmp_path / "model", data, "--overwrite")[0] == 0
    assert load_config("model.yaml").output_dir == "./runs/model_2"


def test_it_never_takes_the_folder_of_a_packaged_config(model_dir, capsys, data):
    assert run_init(capsys, model_dir, data, "--output", "demo.yaml")[0] == 0
    assert load_config("demo.yaml+evening").output_dir == "./runs/demo_2"


def test_an_existing_file_stays_unless_it_may_be_replaced(tmp_path, model_dir, capsys, data):
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    code, _, error = run_init(capsys, model_dir, data, "--output", file)
    assert code == 1 and "mine.yaml exists; use --overwrite" in error
    assert file.read_text() == "mine"
    assert run_init(capsys, model_dir, data, "--output", file, "--overwrite")[0] == 0
    assert "hestia_tune.models.hugging_face" in file.read_text()
    assert sorted(path.name for path in tmp_path.glob("mine*")) == ["mine.yaml"]


@pytest.mark.parametrize(
    ("widths", "expected"),
    [((256, 512), 256), ((256, 384), 128), ((64, 192), 64), ((64, 96), 32), ((64, 80), "channel")],
)
def test_the_group_size_divides_every_row(widths, expected, tmp_path, capsys, data):
    hidden, intermediate = widths
    make_model_dir(tmp_path / "model", embed_dim=hidden, intermediate_dim=intermediate)
    code, out, error = run_init(capsys, tmp_path / "model", data)
    assert (code, error) == (0, "")
    config = load_config("model.yaml")
    assert config.quantizer.group_size == expected
    kind, reason = ("TwoBit", "four levels"), "a lower loss than ternary ones at the same size"
    if expected == 256:
        kind, reason = ("HestiaQATQuantizer", "ternary"), "for llama.cpp's type TQ2_0"
    assert config.quantizer._component_ == f"hestia_tune.{kind[0]}"
    # A reconstruction with learned scales begins at least squares, whatever the levels.
    assert (config.quantizer.scale, config.quantizer.start) == ("learned", "least_squares")
    text = " ".join(out.split())
    assert f"weights: {kind[1]} (-1, 0" in text and reason in text
    assert ("gguf" in config.convert.formats) == (expected != "channel")
    assert ("llama.cpp's type TQ2_0 holds the model" in " ".join(out.split())) == (expected == 256)


def test_the_text_between_documents_is_the_vocabularys_end_of_text(tmp_path, capsys, data):
    folder = make_model_dir(tmp_path / "chat")
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["added_tokens"] = [
        {"id": 258 + n, "content": token, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for n, token in enumerate(["<|endoftext|>", "<|im_end|>"])
    ]
    file.write_text(json.dumps(tokenizer))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "<|im_end|>"}))
    assert run_init(capsys, tmp_path / "chat", data)[0] == 0
    assert load_config("chat.yaml").tokenizer.eos_token == "<|endoftext|>"
    assert "own end token, <|im_end|>, ends a turn" in (tmp_path / "chat.yaml").read_text()


def test_it_finds_the_column_and_the_files_of_a_folder_or_a_glob(tmp_path, model_dir, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "README.md").write_text("about the texts")
    titles = {"title": ["short"] * len(TEXTS), "number": [*range(len(TEXTS))]}
    for name in ("a", "b"):
        write_data(folder / f"{name}.jsonl", "content", **titles)
    for given in (f"{folder}/", f"{folder}/*.jsonl"):
        code, _, error = run_init(capsys, model_dir, given, "--output", "mine.yaml", "--overwrite")
        assert (code, error) == (0, "")
        dataset = load_config("mine.yaml").dataset
        assert (dataset.data_files, dataset.column) == (f"{folder}/*.jsonl", "content")
    assert "columns with text are content, title." in (tmp_path / "mine.yaml").read_text()
    write_data(folder / "a.jsonl", "text", content=["a longer text than the text"] * len(TEXTS))
    assert run_init(capsys, model_dir, folder / "a.jsonl", "--output", "b.yaml")[0] == 0
    assert "column" not in load_config("b.yaml").dataset  # text is the default


def test_without_a_chain_of_blocks_there_is_no_reconstruction(
    tmp_path, model_dir, capsys, data, monkeypatch
):
    monkeypatch.setattr(init, "record_blocks", lambda *_: 1 / 0)
    assert run_init(capsys, model_dir, data, "--output", "mine.yaml")[0] == 0
    config = RunConfig.parse(load_config("mine.yaml"))
    assert config.reconstruction is None and config.schedule.tau_init == 0.3
    assert config.distillation.weight == 1 and config.frozen_modules is None
    assert config.max_steps == 2 * 4 * 720


@pytest.mark.parametrize(
    ("gib", "batch_size", "fits"), [(80, 32, True), (0.01, 16, True), (0.001, 1, False)]
)
def test_the_batch_fits_into_the_memory_of_a_gpu(
    gib, batch_size, fits, tmp_path, model_dir, capsys, data, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, gib * 2**30))
    monkeypatch.setattr(init, "check_run", lambda config, **_: RunConfig.parse(config) and [])
    assert main(["init", str(model_dir), data, "--output", "mine.yaml"]) == 0
    config = RunConfig.parse(load_config("mine.yaml"))
    assert load_config("mine.yaml").device == "auto"
    assert (config.device, config.dtype, config.batch_size) == ("cuda", "bf16", batch_size)
    assert config.batch_size * config.gradient_accumulation_steps == 128
    # The numbers are those of the overlay.
    evening = load_config("demo+evening")
    assert config.max_steps == evening.max_steps and config.optimizer["fused"]
    for key in ("num_samples", "epochs", "tau_init", "kl_epochs", "kl_rate"):
        assert getattr(config.reconstruct, key) == evening.reconstruct[key]
    assert config.enable_activation_checkpointing == config.fsdp_cpu_offload == (not fits)
    assert (config.reconstruct.kl_blocks > 0) == fits


def test_a_processor_without_bfloat16_gets_float32(model_dir, capsys, data, monkeypatch):
    monkeypatch.setattr(init, "is_slow_in_bf16", lambda: True)
    monkeypatch.setattr(init, "_PARAMETERS", 1e4)  # a model of this size took three hours
    assert run_init(capsys, model_dir, data, "--output", "mine.yaml")[0] == 0
    config = load_config("mine.yaml")
    assert (config.max_steps, config.reconstruct.num_samples) == (720, 1200)
    assert "doubled" in Path("mine.yaml").read_text()
    monkeypatch.setattr(init, "is_slow_in_bf16", lambda: False)
    assert run_init(capsys, model_dir, data, "--output", "mine.yaml", "--overwrite")[0] == 0
    assert "doubled" not in Path("mine.yaml").read_text()


def gpt2(folder):
    make_family(folder, "Llama")
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=264)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


def encoder_decoder(folder):
    make_family(folder, "Llama")
    config = {"model_type": "t5", "is_encoder_decoder": True}
    (folder / "config.json").write_text(json.dumps(config))


def without(*names):
    def make(folder):
        make_family(folder, "Llama")
        for name in names:
            (folder / name).unlink()

    return make


def of_another_shape(folder):
    make_family(folder, "Llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (gpt2, "are not linears but Conv1D"),
        (encoder_decoder, "the t5 in .* has parts besides a text decoder"),
        (without("config.json"), "has no config.json; give the folder of a model"),
        (without("tokenizer.json", "tokenizer_config.json"), "no tokenizer in .* can be loaded"),
        (without("model.safetensors"), "has no model.safetensors"),
        (of_another_shape, "the checkpoint in .* is of another model"),
    ],
    ids=["gpt2", "encoder-decoder", "config", "tokenizer", "weights", "shape"],
)
def test_it_refuses_models_that_cannot_be_trained(make, message, tmp_path, capsys, data):
    make(tmp_path / "model")
    code, out, error = run_init(capsys, tmp_path / "model", data)
    assert (code, out) == (1, "")
    assert re.search(message, error), error
    assert [*tmp_path.glob("*.yaml*")] == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "none.txt does not exist; give a file, a folder or a glob"),
        ("no/such/*.txt", None, r"no/such/\*.txt does not exist; give"),
        ("data.csv", "a,b", "found none"),
        ("a.txt", "", "a.txt is empty; give a file with chats or text"),
        ("a.txt", "\n\n", "a.txt holds neither chats .* nor a column with text"),
        ("a.jsonl", '{"id": 1, "text": null}', "it has the columns id, text; put the text"),
        ("a.jsonl", "no JSON", "a.jsonl cannot be read: .*; every line must be a JSON object"),
        ("a.parquet", "not parquet", "a.parquet cannot be read"),
    ],
)
def test_it_refuses_data_without_text(name, content, message, tmp_path, model_dir, capsys):
    if content is not None:
        (tmp_path / name).write_text(content)
    code, _, error = run_init(capsys, model_dir, name)
    assert code == 1 and re.search(message, error), error
    assert [*tmp_path.glob("*.yaml*")] == []


def test_it_refuses_files_of_several_kinds(tmp_path, model_dir, capsys):
    write_data(tmp_path / "a.txt"), write_data(tmp_path / "a.parquet")
    code, _, error = run_init(capsys, model_dir, tmp_path, "--output", "mine.yaml")
    assert code == 1 and "found parquet and txt" in error


def test_it_refuses_wrong_outputs_and_devices(model_dir, capsys, data, monkeypatch):
    code, _, error = run_init(capsys, model_dir, data, "--output", "mine")
    assert code == 1 and "a file whose name ends in .yaml; got mine" in error
    Path("folder.yaml").mkdir()
    code, _, error = run_init(capsys, model_dir, data, "--output", "folder.yaml", "--overwrite")
    assert code == 1 and "folder.yaml is a folder" in error
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, message in {
        ("--device", "cuda"): "there is no GPU here, so its memory is unknown; .* --gpu-memory 24",
        ("--device", "cpu", "--gpu-memory", "24"): "leave out --device cpu",
        ("--gpu-memory", "0"): "must be a number of gigabytes, such as 24; got 0",
        ("--gpu-memory", "nan"): "must be a number of gigabytes, such as 24; got nan",
    }.items():
        assert main(["init", str(model_dir), data, *words]) == 1
        assert re.search(message, capsys.readouterr().err)


def test_a_failed_check_leaves_no_file(tmp_path, model_dir, capsys, data, monkeypatch):
    monkeypatch.setattr(init, "_fill_template", lambda values: "batch_size: 0")
    code, _, error = run_init(capsys, model_dir, data, "--output", "mine.yaml")
    assert code == 1 and "the config lacks" in error
    assert [*tmp_path.glob("mine*")] == []


def test_a_tokenizer_that_llama_cpp_lacks_leaves_gguf_out(tmp_path, capsys, data):
    folder = make_model_dir(tmp_path / "model")
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["pre_tokenizer"]["add_prefix_space"] = True
    file.write_text(json.dumps(tokenizer))
    assert run_init(capsys, tmp_path / "model", data)[0] == 0
    assert "gguf" not in load_config("model.yaml").convert.formats
    assert (
        "# gguf is left out: GGUF export knows the tokenizers"
        in (tmp_path / "model.yaml").read_text()
    )


def uncommented(text):
    """Return the text with the first # of every commented block of options removed."""
    return re.sub(r"(?m)^#(?=[a-z_]+:|  [a-z_]+:)", "", text)


@pytest.mark.parametrize("ending", ["parquet", "txt"])
def test_the_held_out_block_can_be_used_as_its_comment_says(
    ending, tmp_path, model_dir, capsys, data
):
    train, held_out = (write_data(tmp_path / f"{n}.{ending}", "words") for n in ("one", "two"))
    code, out, error = run_init(capsys, model_dir, train, "--output", "mine.yaml")
    assert (code, error) == (0, "") and "held out: none" in out
    file = tmp_path / "mine.yaml"
    text = file.read_text()
    assert "dataset_val" not in load_config("mine.yaml")
    assert "remove the first # of these lines:\n#dataset_val:\n" in text
    file.write_text(uncommented(text).replace("HELD_OUT_FILE", held_out))
    assert main(["validate", "mine.yaml"]) == 0
    config = RunConfig.parse(load_config("mine.yaml"))
    assert config.dataset_val["data_files"] == held_out and config.eval.tasks == []
    code, _, error = run_init(capsys, model_dir, train, "--validation", train, "--output", "b.yaml")
    assert code == 1 and "is the training data" in error
    # --validation writes the same.
    options = ("--validation", held_out, "--output", "other.yaml")
    code, out, error = run_init(capsys, model_dir, train, *options)
    assert (code, error) == (0, "") and "held out: text" in out
    other = RunConfig.parse(load_config("other.yaml"))
    assert (other.dataset_val, other.eval.tasks) == (config.dataset_val, [])
    assert (
        f"hestia init {model_dir} {train} --validation {held_out} --device cpu"
        in Path("other.yaml").read_text()
    )


def test_a_format_that_must_be_written(model_dir, capsys, data, estimates):
    options = ("--format", "gguf,torchao", "--format", "gguf", "--output", "mine.yaml")
    code, out, error = run_init(capsys, model_dir, data, *options)
    assert (code, error) == (0, "")
    assert load_config("mine.yaml").convert.formats == ["gguf", "torchao"]
    assert "formats: gguf, torchao" in out and "\n  not " not in out
    for line in ("memory: at most", "memory of the reconstruction: about", "time: "):
        assert f"\n  {line}" in out


def test_a_gguf_file_has_an_embedding_of_8_bits(model_dir, capsys, data):
    """Other formats hold the rounded embedding in 16 or 32 bits, and then nothing is gained."""
    pytest.importorskip("gguf")
    for formats, bits in (("gguf", {"embedding": "int8"}), ("gguf,torchao", None)):
        options = ("--format", formats, "--output", "mine.yaml", "--overwrite")
        code, out, error = run_init(capsys, model_dir, data, *options)
        assert (code, error) == (0, "")
        assert load_config("mine.yaml").get("bits") == bits
        assert ("embedding: 8 bits in the file" in out) == (bits is not None)


@pytest.mark.parametrize(
    ("make", "form", "message"),
    [
        ("Llama", "guff", r"there is no format 'guff'; did you mean gguf\?; the formats are"),
        ("Falcon", "gguf", "--format gguf: "),
        ("Falcon", "compressed_tensors", "--format compressed_tensors: "),
        ({"embed_dim": 64, "intermediate_dim": 80}, "gguf", "--format gguf: .*in_features 80"),
    ],
)
def test_a_format_that_cannot_be_written_is_an_error(make, form, message, tmp_path, capsys, data):
    folder = tmp_path / "model"
    make_family(folder, make) if isinstance(make, str) else make_model_dir(folder, **make)
    code, out, error = run_init(capsys, folder, data, "--format", form)
    assert (code, out) == (1, "") and re.search(message, error), error
    assert [*tmp_path.glob("*.yaml")] == []


def test_a_missing_package_of_a_format_is_named(model_dir, capsys, data, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    for name in [name for name in sys.modules if name.startswith("gguf.")]:
        monkeypatch.delitem(sys.modules, name)
    code, out, error = run_init(capsys, model_dir, data, "--format", "gguf")
    assert code == 1 and "pip install 'hestia-tune[gguf]'" in error
    assert run_init(capsys, model_dir, data, "--output", "mine.yaml")[0] == 0
    assert "gguf" not in load_config("mine.yaml").convert.formats


def test_a_short_text_is_reported(tmp_path, model_dir, capsys, caplog):
    (tmp_path / "short.txt").write_text("This text has very few words in it, and no more.\n")
    code, out, error = run_init(capsys, model_dir, "short.txt", "--output", "mine.yaml")
    text = " ".join(out.split())
    rows = r"data: text, a line a document, 1 row; the run reads \S+ tokens"
    assert code == 0 and re.search(rows, text), text
    told = " ".join((error + caplog.text).split())
    assert re.search(r"short.txt is short .*: the run will read it [\d,]+ times", told), told


def test_other_files_of_the_folder_are_suggested(tmp_path, model_dir, capsys, data):
    code, _, error = run_init(capsys, model_dir, "dat.txt")
    assert code == 1 and "dat.txt does not exist; did you mean data.txt?" in error


def test_a_path_that_looks_like_a_glob(tmp_path, model_dir, capsys):
    folder = tmp_path / "run [1]"
    folder.mkdir()
    path = write_data(folder / "data.jsonl")
    assert run_init(capsys, model_dir, path, "--output", "mine.yaml")[0] == 0
    assert load_config("mine.yaml").dataset.data_files == path


def test_with_values_keeps_the_comments():
    text = "a: 1   # one\n\nb:   # two\n  c: 3   # three\n\n# of d\nd: {e: 1}\n"
    changes = {"a": 2, "b.c": "x", "b.new": True, "d": None, "f": 1.5, "g.h": [1]}
    changed = init.with_values(text, changes)
    assert OmegaConf.create(changed) == {
        "a": 2, "b": {"c": "x", "new": True}, "d": None, "f": 1.5, "g": {"h": [1]}
    }  # fmt: skip
    for comment in ("a: 2   # one", "b:   # two", '  c: "x"   # three', "# of d\nd: null"):
        assert comment in changed


CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] + m['content'] + '<eos>' }}{% endfor %}"
FORMS = {
    "messages": lambda q, a: {
        "messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]
    },
    "conversations": lambda q, a: {
        "conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]
    },
    "prompt + completion": lambda q, a: {"prompt": q, "completion": a},
    "instruction + input + output": lambda q, a: {"instruction": q, "input": "", "output": a},
}


@pytest.mark.parametrize("form", FORMS)
def test_chats_are_recognized(form, tmp_path, capsys):
    folder = make_model_dir(tmp_path / "model")
    rows = [FORMS[form](f"What is {n}?", f"A number, {n}.") for n in range(30)]
    for name in ("chats", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, _, error = run_init(capsys, folder, "chats.jsonl", "--output", "mine.yaml")
    assert code == 1 and "chats.jsonl holds chats, and" in error and "no chat template" in error
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": CHAT_TEMPLATE}))
    options = ("--validation", "held_out.jsonl", "--output", "mine.yaml")
    code, out, error = run_init(capsys, folder, "chats.jsonl", *options)
    assert (code, error) == (0, "") and f"data: chats ({form}), 30 rows;" in out
    config = RunConfig.parse(load_config("mine.yaml"))
    assert config.dataset["_component_"] == "hestia_tune.data.streaming_chat_dataset"
    assert config.dataset["loss_on"] == "replies" and "column" not in config.dataset
    assert config.dataset_val["_component_"] == "hestia_tune.data.chat_dataset"
    assert "each with its own weight" in Path("mine.yaml").read_text()


def test_text_for_a_chat_model_is_noted(tmp_path, capsys, data):
    folder = make_model_dir(tmp_path / "model")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": CHAT_TEMPLATE}))
    code, out, _ = run_init(capsys, folder, data)
    assert code == 0 and "plain text alone makes it forget how to" in " ".join(out.split())


@pytest.mark.parametrize("recipe", ["hestia_qat", "hestia_reconstruct"])
def test_a_plan_for_a_gpu_that_is_not_here(recipe, model_dir, capsys, data, monkeypatch):
    given = []

    def fit(config, gigabytes):
        given.append((config.batch_size, config.reconstruct.kl_blocks, gigabytes))
        changes = {"batch_size": 8, "optimizer._component_": "torchao.optim.AdamW8bit"}
        options = {"peak": {"blocks": 5_000_000}, "reasons": ["Less is more."], "recipe": recipe}
        return MemoryPlan(changes=changes, gigabytes=gigabytes, **options)

    monkeypatch.setattr(init, "fit_to_memory", fit)
    words = [str(model_dir), data, "--gpu-memory", "24", "--output", "mine.yaml"]
    assert main(["init", *words]) == 0
    out = capsys.readouterr().out
    assert given == [(32, 1000, 24.0)]
    assert "  memory of the GPU, 24 GB: blocks 5.0 MB\n  Less is more.\n" in out
    config = load_config("mine.yaml")
    assert (config.device, config.batch_size, config.global_batch_size) == ("cuda", 8, 128)
    assert config.optimizer._component_ == "torchao.optim.AdamW8bit"
    command = recipe.removeprefix("hestia_")
    assert f"\n  hestia {command} mine.yaml " in out
    assert f"hestia {command} mine.yaml " in Path("mine.yaml").read_text()
    hard = "./runs/mine/reconstruction/hard_model"
    is_alone = command == "reconstruct"
    assert (config.convert.get("source") == hard) == is_alone
    assert (hard in OmegaConf.to_container(config).get("eval", {}).get("models", [])) == is_alone


def test_too_little_memory_is_an_error(tmp_path, model_dir, capsys, data):
    words = [str(model_dir), data, "--gpu-memory", "0.00001", "--output", "mine.yaml"]
    assert main(["init", *words]) == 1
    assert "GB are too little for" in capsys.readouterr().err
    assert [*tmp_path.glob("mine*")] == []
