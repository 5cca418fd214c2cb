"""Test that bad input of every command ends in one line, before anything is written.

Each case has exit code 1 and one line on stderr with the key or file, the rule or the remedy.
"""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_config, make_model_dir, write_config

from hestia_tune.commands.convert import run_convert
from hestia_tune.commands.evaluate import run_evaluation
from hestia_tune.commands.launch import main
from hestia_tune.commands.qat import run_qat, run_reconstruct, run_sensitivity, run_tokenize

COMMANDS = {
    "qat": run_qat,
    "eval": run_evaluation,
    "convert": run_convert,
    "tokenize": run_tokenize,
    "sensitivity": run_sensitivity,
    "reconstruct": run_reconstruct,
}
STREAM = "STREAM"  # the dataset is a stream of text
TEXT = "eval.models=[pretrained] eval.tasks=[] eval.perplexity.t.source=TEXT "
PRETRAINED = "convert.source=pretrained "

# Command and overrides -> text that the line must contain. test_errors.py has more cases.
CASES = {
    "qat clip_grad_norm=0": "clip_grad_norm must be in [1e-09, 1e+30]; got 0; null switches it off",
    "qat clip_grad_norm=abc": "clip_grad_norm must be a number; got 'abc'",
    "qat frozen_modules=[tok_embedding]": "did you mean tok_embeddings?",
    "qat reconstruction=auto frozen_modules=[nope]": "the model has no module nope",
    "qat sensitivity=auto frozen_modules=[nope]": "the model has no module nope",
    "qat init=random frozen_modules=[norm]": "init: random does not go with frozen_modules",
    "qat frozen_modules=[layers.0]": "layers.0 has quantized linears, which must be trained",
    "qat checkpointer.model_type=QWEN2": "model_type llama; use LLAMA2 or LLAMA3 or LLAMA3_2",
    "qat checkpointer.model_type=MISTRAL": "checkpointer.model_type is MISTRAL, ",
    "qat checkpointer.model_type=FOO": "checkpointer.model_type must be one of GEMMA, ",
    "qat checkpointer.checkpoint_dir=null": "checkpointer.checkpoint_dir must be a folder; got No",
    "qat checkpointer.checkpoint_files=[../../x.safetensors]": "reaches outside of ",
    "qat checkpointer.checkpoint_files=[/etc/passwd]": "/etc/passwd reaches outside of ",
    "qat num_workers=500": "num_workers must be at most ",
    "qat num_workers=-1": "num_workers must be at least 0; got -1",
    "qat reconstruct.output=${output_dir}": "reconstruct.output must be a folder that training",
    "qat reconstruction=${output_dir}/hard_model": "reconstruction must be a folder that training",
    f"qat {STREAM} dataset.seq_len=4096": "dataset.seq_len must be at most the model's max_seq_len",
    f"qat {STREAM} dataset.source=parquett": "there is no source parquett; did you mean parquet?",
    f"qat {STREAM} dataset.source=parquet dataset.data_files=/nope/*.parquet": "/nope/*.parquet",
    f"qat {STREAM} dataset.data_files=/nope/*.txt": "/nope/*.txt holds no rows",
    f"qat {STREAM} dataset.data_files=null": "source text needs data_files; give a path",
    f"qat {STREAM} dataset.column=words": "column 'words' holds NoneType, not text; columns: text",
    f"qat {STREAM} dataset.split=test": "test",
    f"qat {STREAM} epochs=2": "a stream has epochs of its own; leave out epochs",
    f"qat {STREAM} dataset.seqlen=4": "unknown key dataset.seqlen; did you mean seq_len",
    f"qat {STREAM} dataset.source=token_shards dataset.data_files=FOLDER": "holds no tokenized set",
    "qat quantizer.group_size=16 convert.formats=[mlx]": "MLX needs groups, or whole rows",
    "qat quantizer.group_size=16 convert.formats=[onnx]": "ONNX export needs groups, or whole rows",
    f"convert {PRETRAINED} quantizer.group_size=16 convert.formats=[all,mlx]": "MLX needs groups",
    "qat device=cuda": "device cuda: torch finds no GPU here; set device=auto or",
    "qat device=tpu": "device must be auto, cpu, cuda or cuda:NUMBER; got tpu",
    "qat optimizer.lr=abc": "check its options {'_component_': 'torch.optim.AdamW', 'lr': 'abc'",
    "qat optimizer.lr=-1": "optimizer: Invalid learning rate: -1; check its options",
    "qat optimizer.betas=3": "'betas': 3",
    "qat optimizer._component_=torch.optim.Adamm": "optimizer: there is no torch.optim.Adamm",
    "qat loss._component_=torch.nope": "loss: there is no torch.nope",
    "qat metric_logger._component_=nope": "metric_logger: there is no nope",
    "qat lr_scheduler._component_=nope": "lr_scheduler: there is no nope",
    "qat lr_scheduler.warmup_ratio=2": "warmup_ratio",
    "qat tokenizer._component_=nope.Nope": "tokenizer: there is no nope.Nope",
    "qat profiler._component_=nope": "profiler must be torchtune.training.setup_torch_profiler",
    "qat seed=1.5": "seed must be a whole number; got 1.5",
    "qat seed=-1": "seed must be in [0, 2.14748e+09]; got -1; numpy takes 32 bits",
    "qat epochs=0": "epochs must be at least 1; got 0",
    "qat max_steps=0": "max_steps must be at least 1; got 0",
    "qat max_steps_per_epoch=0": "max_steps_per_epoch must be at least 1; got 0",
    "qat gradient_accumulation_steps=0": "gradient_accumulation_steps must be at least 1; got 0",
    "qat save_every_n_steps=0": "save_every_n_steps must be at least 1; got 0",
    "qat run_val_every_n_steps=-1": "run_val_every_n_steps must be at least 1; got -1",
    "qat keep_last_checkpoints=0": "keep_last_checkpoints must be at least 1; got 0",
    "qat log_every_n_steps=often": "log_every_n_steps must be a whole number; got 'often'",
    "qat batch_size_val=0": "batch_size_val must be at least 1; got 0",
    "qat compile=3.5": "compile must be true, false or auto; got 3.5",
    "qat enable_activation_offloading=True": "enable_activation_offloading needs device cuda",
    "qat reconstruction=/nope": "/nope holds no finished reconstruction; run hestia_reconst",
    "qat cage_strength=1": "unknown key cage_strength",
    "qat init=scratch": "init must be one of pretrained, random; got scratch",
    "qat init=random sensitivity=auto": "does not go with sensitivity, which is for pretrained",
    "qat init=random reconstruction=auto": "set reconstruction=null",
    "qat distillation.weight=2": "distillation.weight must be in [0, 1]; got 2",
    "qat distillation.loss=foo": "distillation.loss must be one of kl, kl_reverse, mixed; got foo",
    "qat distillation.temperature=2": "unknown key distillation.temperature",
    "qat eval.at_end=True": "unknown key eval.at_end",
    "qat distillation.weight=1 distillation.teacher=/nope": "/nope has no config.json; give",
    "qat schedule=foo": "schedule must be a mapping of options",
    "qat schedule.tau_init=hot": "schedule.tau_init must be a number or one of auto; got hot",
    "qat schedule.hard_fraction=0.95": "schedule.hard_fraction must be in [0, 0.9]; got 0.95",
    "qat schedule.hard_fraction=0.9 schedule.rho=0.5": "must be at most 1; got 0.5 + 0.9",
    "qat quantizer.scale=foo": 'scale must be "absmean" or "learned"; got',
    "qat quantizer.start=foo": 'start must be "absmean" or "least_squares"; got',
    "qat model.num_layers=two": "model.num_layers is two, ",
    "qat eval.models=[]": "eval.models must name at least one model",
    "qat sensitivity=[1]": "sensitivity",
    "qat optimizer=null": "the config lacks optimizer; add these keys",
    "qat quantizer=null": "the config lacks quantizer; add these keys",
    "qat dataset=null": "the config lacks dataset; add these keys",
    "qat ~checkpointer": "the config lacks checkpointer; add these keys",
    "qat ~tokenizer": "the config lacks tokenizer; add these keys",
    "qat ~optimizr": "~optimizr: the config has no such key; did you mean optimizer?",
    "qat foo": "an override must be KEY=VALUE or ~KEY; got 'foo'",
    "qat profiler=foo": "error: profiler must be a section; got 'foo'",
    "qat dataset.seq_len=abc": "error: dataset.seq_len must be a number; got 'abc'",
    "qat loss._component_=torch.nn.MSELoss": "loss must be a cross-entropy over tokens",
    "qat device=meta": "device must be auto, cpu, cuda or cuda:NUMBER; got meta",
    "qat output_dir=5": "output_dir must be a folder; got 5",
    "qat shuffle=5": "shuffle must be true or false; got 5",
    "qat compile=5": "compile must be true, false or auto; got 5",
    "qat optimizer.lrr=1": "unexpected keyword argument 'lrr'; did you mean lr?",
    "qat quantizer.groupsize=5": "unknown option groupsize; did you mean group_size?",
    "qat quantizer.include=foo": "include must be a list of patterns; got the string 'foo'",
    "qat batchsize=4": "unknown key batchsize; did you mean batch_size?",
    "qat schedule.rho=nan": "schedule.rho must be in [0, 1]; got nan",
    "qat frozen_modules=foo": "frozen_modules: give a list, such as [a, b]",
    "convert convert.overwrite=5": "convert.overwrite must be true or false; got 5",
    "eval eval.limit=1.5": "eval.limit must be a whole number of documents, or a share below 1",
    f"eval {TEXT} eval.perplexity.t.window=5000": "eval.perplexity.t.window must be in [1, 64]",
    "sensitivity sensitivity_estimation.num_samples=100000000": "must be in [1, 1e+06]",
    "convert convert.formats=[foo]": "convert.formats must be one of torchao, intx, hugg",
    "convert convert.formats=[]": "convert.formats must name at least one",
    "convert convert.formats=gguf": "convert.formats: give a list, such as [a, b]",
    "convert convert.foo=1": "unknown key convert.foo",
    "convert convert.source=/nope": "there is no model in /nope (no config.json); train first",
    "convert convert.source=trained": "train first, or convert.source=pretrained",
    "convert convert.block_type=Q9": "convert.block_type must be one of auto, Q4_0, Q2_0, TQ2_0",
    "convert convert.block_type=[Q4_0,auto]": "set convert.block_type=auto, or leave auto out",
    "convert convert.block_type=[]": "convert.block_type must name at least one",
    f"convert {PRETRAINED} convert.formats=[gguf] convert.block_type=TQ2_0": "no block of TQ2_0",
    f"convert {PRETRAINED} convert.output=/proc/x": "convert.output /proc/x cannot be written",
    f"convert {PRETRAINED} quantizer.group_size=48": "group_size 48 does not divide in_features 64",
    f"convert {PRETRAINED} checkpointer.model_type=QWEN2": "checkpointer.model_type is QWEN2",
    f"eval {TEXT} checkpointer.model_type=QWEN2": "checkpointer.model_type is QWEN2",
    "eval eval.models=[nope]": "model 'nope': no config.json in nope; give a folder, or",
    "eval eval.models=[packed]": "model 'packed': no config.json in ",
    "eval eval.models=[checkpoint]": "no complete checkpoint in",
    "eval eval.models=[pretrained] eval.tasks=[] dataset_val=null": (
        "eval needs tasks or perplexity; both are empty"
    ),
    "eval eval.tasks=[] eval.perplexity.t.window=5": "eval.perplexity.t.source must be given",
    f"eval {TEXT} eval.perplexity.t.source=/nope.txt": "/nope.txt",
    f"eval {TEXT} eval.perplexity.t.stride=9 eval.perplexity.t.window=5": "stride 9 must not be ab",
    f"eval {TEXT} eval.output=FOLDER": "eval.output must be a file whose name ends in .json; got",
    f"eval {TEXT} eval.output=/proc/x/y.json": "/proc/x/y cannot be written",
    "eval eval.models=[pretrained] eval.tasks=[] eval.perplexity.t.source=FOLDER/bad.parquet": (
        "bad.parquet could not be read: "
    ),
    f"eval {TEXT} device=cuda": "torch finds no GPU here",
    "eval eval.limit=0": "eval.limit must be at least 1e-06; got 0",
    "eval eval.batch_size=big": "eval.batch_size must be a number or one of auto; got big",
    "eval eval.models=[pretrained] eval.include_path=/nope": "include_path /nope is not a folder",
    "tokenize": "got {'_component_': 'tiny.random_dataset'",
    f"tokenize {STREAM} dataset.max_tokens=0": "dataset.max_tokens must be at least 1; got 0",
    f"tokenize {STREAM} output_dir=/proc/x": "output_dir /proc/x cannot be written",
    f"tokenize {STREAM} tokenize.output=x": "unknown key tokenize",
    f"tokenize {STREAM} output_dir=FOLDER": "tokens holds no tokenized set: no index.json",
    f"tokenize {STREAM} dataset.data_files=/nope.txt": "/nope.txt does not exist; check",
    f"tokenize {STREAM} dataset.source=token_shards": "'source': 'token_shards'",
    "sensitivity sensitivity_estimation.num_samples=0": "num_samples must be in [1, 1e+06]; got 0",
    "sensitivity sensitivity_estimation.curvature=foo": "curvature must be one of hessian, fisher",
    "sensitivity sensitivity_estimation.rank=10 sensitivity_estimation.curvature=fisher": (
        "rank is the sketch of Hutch++, which the fisher trace does not need"
    ),
    "sensitivity sensitivity_estimation.num_probes=1": "num_probes must be at least 2; got 1",
    "sensitivity sensitivity_estimation.output=/proc/x.json": "/proc cannot be written",
    "sensitivity sensitivity_estimation.rank=-1": "rank must be at least 0; got -1",
    "sensitivity sensitivity_estimation.target_standard_error=1": "in [1e-06, 0.5]; got 1",
    "sensitivity sensitivity_estimation.kappa=-1": "kappa must be in [0, 1000]; got -1",
    "sensitivity dataset.num=0": "dataset could not be loaded: it has no samples",
    "sensitivity device=cuda": "torch finds no GPU here",
    "reconstruct reconstruct.num_samples=0": "reconstruct.num_samples must be at least 1; got 0",
    "reconstruct reconstruct.num_samples=4": "num_samples 4 must be at least batch_size 8",
    "reconstruct reconstruct.lr=-1": "reconstruct.lr must be in [0, 1]; got -1",
    "reconstruct reconstruct.output=/proc/x": "reconstruct.output /proc/x cannot be written",
    "reconstruct reconstruct.epochs=0": "reconstruct.epochs must be at least 1; got 0",
    "reconstruct reconstruct.memory=1": "unknown key reconstruct.memory",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a folder with a model, a text, and a folder that holds other files."""
    folder = tmp_path_factory.mktemp("files")
    make_model_dir(folder / "model")
    (folder / "text.txt").write_text("Some words in a row. " * 200)
    (folder / "folder" / "tokens").mkdir(parents=True)
    (folder / "folder" / "mine.txt").write_text("kept")
    (folder / "folder" / "bad.parquet").write_bytes(b"PAR1" + b"x" * 100 + b"PAR1")
    (folder / "folder" / "tokens" / "mine.txt").write_text("kept")
    return folder


@pytest.fixture
def command(files, tmp_path, monkeypatch, capsys):
    """Return a function that runs a command line: (exit code, its errors on stderr)."""

    def run(line: str, model=files / "model") -> tuple[int, list[str]]:
        name, *overrides = line.replace("TEXT", str(files / "text.txt")).split()
        cfg = make_config(model, tmp_path / "run")
        if STREAM in overrides:
            overrides.remove(STREAM)
            section = {"_component_": "hestia_tune.data.streaming_text_dataset", "source": "text"}
            section |= {"data_files": str(files / "text.txt"), "seq_len": 16}
            cfg.dataset, cfg.max_steps = section, 4
        config = write_config(cfg, tmp_path / "config.yaml")
        overrides = [override.replace("FOLDER", str(files / "folder")) for override in overrides]
        monkeypatch.setattr(sys, "argv", [f"hestia_{name}", "--config", config, *overrides])
        for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(variable, raising=False)
        code = main(COMMANDS[name], f"hestia_{name}")
        assert not torch.distributed.is_initialized()
        lines = capsys.readouterr().err.splitlines()
        return code, [line for line in lines if line.startswith(f"hestia_{name}: error:")]

    return run


@pytest.mark.parametrize("line", CASES)
def test_one_line(line, command, files, tmp_path):
    code, errors = command(line)
    assert code == 1 and len(errors) == 1 and CASES[line] in errors[0], errors
    written = {path.name for path in (tmp_path / "run").rglob("*") if path.is_file()}
    written = {name for name in written if not name.startswith("log_")}
    assert not written - {".lock", "torchtune_config.yaml"}
    assert (files / "folder" / "mine.txt").read_text() == "kept"


def test_there_are_enough_cases():
    assert len(CASES) >= 100


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", '{"model_type": ', "config.json is damaged (Expecting value"),
        ("config.json", "[1]", "config.json is damaged (it must hold a mapping, and holds a list)"),
        ("tokenizer.json", '{"version": ', "tokenizer.json is damaged"),
        ("tokenizer_config.json", "", "tokenizer_config.json is damaged"),
        ("model.safetensors", "no tensors", "safetensors"),
    ],
)
@pytest.mark.parametrize("line", ["qat", f"eval {TEXT}", f"convert {PRETRAINED}"])
def test_damaged_model_folders(command, tmp_path, name, content, message, line):
    if line.startswith("convert") and name.startswith("tokenizer"):
        pytest.skip("copied, not read")
    model = make_model_dir(tmp_path / "model")
    (model / name).write_text(content)
    code, errors = command(line, model)
    assert code == 1 and len(errors) == 1, errors
    assert message in errors[0]


def test_weights_that_are_already_quantized(command, tmp_path):
    model = make_model_dir(tmp_path / "model")
    state = load_file(model / "model.safetensors")
    state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 64, dtype=torch.int8)
    save_file(state, model / "model.safetensors")
    code, (error,) = command("qat", model)
    assert code == 1 and "layers.0.mlp.up_proj.weight is torch.int8; give the folder of" in error


def test_an_index_that_leads_outside(command, tmp_path):
    model = make_model_dir(tmp_path / "model")
    index = {"weight_map": {"model.norm.weight": "../other/model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "model.safetensors").unlink()  # it would be read instead
    code, (error,) = command(f"convert {PRETRAINED}", model)
    assert code == 1 and "../other/model.safetensors reaches outside of" in error
