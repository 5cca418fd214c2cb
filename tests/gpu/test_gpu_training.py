"""Test training on a CUDA device, real or simulated: methods, options, resuming, all configs."""

import shutil

import pytest
from families import make_family
from omegaconf import OmegaConf
from tiny import SHAPE, logged, make_config, make_model_dir, run

from hestia_tune.commands.qat import run_qat
from hestia_tune.config.run_config import load_config, packaged_configs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("end_process_group")]

STEPS = ("max_steps=2", "gradient_accumulation_steps=2", "dataset_val.num=4")
GROUP = {"group_size": 32}
METHODS = {
    "hestia": {"_component_": "hestia_tune.HestiaQATQuantizer", **GROUP},
    "hestia, tensor": {"_component_": "hestia_tune.HestiaQATQuantizer", "group_size": "tensor"},
    "hestia, learned": {
        "_component_": "hestia_tune.HestiaQATQuantizer",
        "scale": "learned",
        "scale_lr": 1e-3,
        **GROUP,
    },
    "binary": {"_component_": "hestia_tune.HestiaQATQuantizer", "codebook": "binary", **GROUP},
    "int2 codes": {"_component_": "hestia_tune.HestiaQATQuantizer", "codebook": "int2", **GROUP},
    "fairy2i": {"_component_": "hestia_tune.Fairy2iQATQuantizer"},
    "fairy2i, rows": {"_component_": "hestia_tune.Fairy2iQATQuantizer", "granularity": 1},
    "absmean": {"_component_": "hestia_tune.AbsMean", **GROUP},
    "twn": {"_component_": "hestia_tune.TWN", "group_size": "channel"},
    "int2": {"_component_": "hestia_tune.INT2", "start": "least_squares", **GROUP},
    "lsq": {"_component_": "hestia_tune.LSQ", "scale_lr": 1e-3, **GROUP},
    "seq": {"_component_": "hestia_tune.SEQ", "bits": 2, **GROUP},
    "two bits": {"_component_": "hestia_tune.TwoBit", **GROUP},
    "dlt": {"_component_": "hestia_tune.DLT", "start": "least_squares", **GROUP},
    "tequila": {"_component_": "hestia_tune.Tequila", "epsilon": 0.05, **GROUP},
}


def config(model_dir, output_dir, *overrides, quantizer="hestia"):
    cfg = make_config(model_dir, output_dir, *STEPS, *overrides)
    cfg.quantizer = METHODS[quantizer]
    return cfg


def assert_same_losses(output, expected, rel=1e-3):
    for key in ("loss", "grad_norm", "val_loss_hard"):
        assert logged(output, key) == pytest.approx(logged(expected, key), rel=rel), key


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_as_on_the_cpu(model_dir, tmp_path, name):
    for device in ("cpu", "cuda"):
        run(config(model_dir, tmp_path / device, f"device={device}", quantizer=name))
    assert_same_losses(tmp_path / "cuda", tmp_path / "cpu")


@pytest.fixture(scope="module")
def plain(model_dir, tmp_path_factory):
    """Return the folder of a run on the CPU."""
    folder = tmp_path_factory.mktemp("plain")
    run(config(model_dir, folder))
    return folder


@pytest.mark.parametrize(
    "options",
    [
        ("enable_activation_checkpointing=True",),
        ("enable_activation_checkpointing=True", "enable_activation_offloading=True"),
        ("fsdp_cpu_offload=True",),
        ("fsdp_reshard_after_forward=False",),
        ("compile=True", "optimizer.fused=True"),
        ("fsdp_cpu_offload=True", "compile=True"),
        ("num_workers=1",),
    ],
    ids=lambda options: " ".join(options).replace("=True", ""),
)
def test_options_do_not_change_the_result(model_dir, plain, tmp_path, options):
    run(config(model_dir, tmp_path, "device=cuda", *options))
    assert_same_losses(tmp_path, plain)


@pytest.mark.parametrize("name", ["hestia, learned", "tequila", "fairy2i", "hestia, tensor"])
def test_methods_with_parameters_of_their_own_train_offloaded(model_dir, tmp_path, name):
    for folder, options in {"plain": (), "offloaded": ("fsdp_cpu_offload=True",)}.items():
        more = ("device=cuda", "dtype=bf16", "distillation.weight=0.5")
        run(config(model_dir, tmp_path / folder, *more, *options, quantizer=name))
    assert_same_losses(tmp_path / "offloaded", tmp_path / "plain", rel=1e-2)


@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")], ids=str)
def test_a_run_resumes_on_the_other_device(model_dir, plain, tmp_path, devices):
    first, second = (f"device={device}" for device in devices)
    run(config(model_dir, tmp_path / "first", first, "save_every_n_steps=1"))
    checkpoints = tmp_path / "second" / "checkpoints"
    shutil.copytree(tmp_path / "first" / "checkpoints" / "step_1", checkpoints / "step_1")
    run(config(model_dir, tmp_path / "second", second, "resume_from_checkpoint=True"))
    assert logged(tmp_path / "second")[2] == pytest.approx(logged(plain)[2], rel=1e-3)


FAMILY = {"qwen2_5": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3", "gemma3": "Gemma 3"}
PARTS = ("base", "distil", "evening", "2bit")


@pytest.mark.usefixtures("draws_of_the_cpu")
@pytest.mark.parametrize("name", [name for name in packaged_configs() if name not in PARTS])
def test_packaged_configs_train_small_models(name, tmp_path):
    """Every option of the config stays, but the model has two blocks and is tiny."""
    family = next((FAMILY[key] for key in FAMILY if name.startswith(key)), None)
    folder = tmp_path / "model"
    make_family(folder, family) if family else make_model_dir(folder)
    cfg = load_config(name)
    if cfg.model._component_ == "hestia_tune.models.hugging_face":
        cfg.model.path = str(folder)
    elif family == "Qwen2":
        shape = {**SHAPE, "tie_word_embeddings": True}
        cfg.model = {"_component_": "torchtune.models.qwen2.qwen2", **shape}
        cfg.model.rope_base = 10000.0
        cfg.model.norm_eps = 1e-6
    else:
        cfg.model = {"_component_": "hestia_tune.models.llama", **SHAPE}
    tokenizer = {"_component_": "hestia_tune.models.HuggingFaceTokenizer", "path": str(folder)}
    small = {
        "tokenizer": tokenizer,
        "dataset": {"_component_": "tiny.random_dataset", "num": 24},
        "sensitivity_estimation": {"num_samples": 4, "num_probes": 2, "batch_size": 2},
        "output_dir": str(tmp_path / "run"),
        "device": "cuda",
        "dtype": "bf16",
        "batch_size": 2,
        "global_batch_size": 4,
        "max_steps": 2,
        # One config with compilation is enough, which takes seconds.
        "compile": name == "llama3_2_1b",
    }
    for key in ("dataset", "dataset_val", "tokenizer", "gradient_accumulation_steps"):
        cfg.pop(key, None)
    cfg = OmegaConf.merge(cfg, small)
    if "checkpointer" in cfg:
        cfg.checkpointer.checkpoint_dir = str(folder)
        cfg.checkpointer.checkpoint_files = ["model.safetensors"]
    if "group_size" in cfg.quantizer:
        cfg.quantizer.group_size = 32
    assert run_qat(cfg) == 0
    assert list((tmp_path / "run" / "hard_model").glob("*.safetensors"))
