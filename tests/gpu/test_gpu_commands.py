"""Test the commands on a CUDA device, real or simulated: two ranks, and everything but training."""

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from test_gpu_training import assert_same_losses, config
from tiny import make_config, run, tune_run, write_config

from hestia_tune import HestiaConfig, SensitivityArtifact
from hestia_tune.commands.convert import run_convert
from hestia_tune.commands.evaluate import run_evaluation
from hestia_tune.commands.qat import run_qat, run_sensitivity
from hestia_tune.integrations.transformers import HestiaCallback

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("end_process_group")]

FEW = ("sensitivity_estimation.num_samples=5", "sensitivity_estimation.num_probes=4")
RECONSTRUCTION = (
    *("quantizer.scale=learned", "quantizer.start=least_squares", "reconstruct.num_samples=12"),
    *("reconstruct.batch_size=4", "reconstruct.epochs=1", "reconstruct.kl_epochs=1"),
)


def on_two_ranks(cfg, tmp_path, recipe="hestia_qat"):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    path = write_config(cfg, tmp_path / f"{recipe}.yaml")
    done = tune_run("--config", path, torchrun=("--nproc_per_node", "2"), recipe=recipe)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["fairy2i", "hestia, tensor"])
@pytest.mark.parametrize("offload", [False, True], ids=["", "offloaded"])
def test_two_ranks_train_as_one(model_dir, tmp_path, name, offload):
    """Fairy2i exchanges rows between ranks, and scales of whole tensors are sums over ranks."""
    run(config(model_dir, tmp_path / "one", quantizer=name))
    two = ("device=cuda", "batch_size=2", f"fsdp_cpu_offload={offload}")
    on_two_ranks(config(model_dir, tmp_path / "two", *two, quantizer=name), tmp_path)
    assert_same_losses(tmp_path / "two", tmp_path / "one")


def traces(cfg, launch):
    launch(cfg)
    return SensitivityArtifact.load(f"{cfg.output_dir}/sensitivity.json").traces


@pytest.mark.usefixtures("draws_of_the_cpu")
@pytest.mark.parametrize("curvature", ["hessian", "fisher"])
def test_sensitivity(model_dir, tmp_path, curvature):
    def make(device):
        few = (*FEW, f"sensitivity_estimation.curvature={curvature}", f"device={device}")
        return make_config(model_dir, tmp_path / device, *few)

    expected = traces(make("cpu"), run_sensitivity)
    assert traces(make("cuda"), run_sensitivity) == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("curvature", ["hessian", "fisher"])
def test_sensitivity_on_two_ranks(model_dir, tmp_path, curvature):
    """Both runs draw on the GPU. Few draws could leave every trace of the Hessian unresolved."""
    few = (FEW[0], "sensitivity_estimation.num_probes=32", "device=cuda")
    few += (f"sensitivity_estimation.curvature={curvature}",)
    one = traces(make_config(model_dir, tmp_path / "one", *few), run_sensitivity)
    cfg = make_config(model_dir, tmp_path / "two", *few)
    two = traces(cfg, lambda cfg: on_two_ranks(cfg, tmp_path, "hestia_sensitivity"))
    assert two == pytest.approx(one, rel=1e-2)


def test_reconstruction_on_two_ranks(model_dir, tmp_path):
    cfg = make_config(model_dir, tmp_path, *RECONSTRUCTION, "device=cuda")
    assert "reconstructed, hard" in on_two_ranks(cfg, tmp_path, "hestia_reconstruct")


def measured(cfg, launch=run_evaluation):
    """Return the loss of every model, and its divergence from the first model."""
    file = Path(cfg.output_dir) / "evaluation.json"
    file.unlink(missing_ok=True)  # results of another device would be used again
    launch(cfg)
    found = json.loads(file.read_text())
    losses = {name: model["perplexity"]["text"]["nll"] for name, model in found["models"].items()}
    distances = found["tables"]["kl_divergence"]
    return losses | {f"{name}, KL": row["text"]["value"] for name, row in distances.items()}


def test_conversion_and_evaluation(model_dir, tmp_path):
    pytest.importorskip("lm_eval")
    text = tmp_path / "text.txt"
    text.write_text("A held-out text, of some ninety bytes, which the models are to find. " * 4)

    def make(device):
        models = "[pretrained,naive,trained,packed,checkpoint,checkpoint_hard]"
        options = (f"eval.models={models}", "eval.tasks=[]", f"eval.perplexity.text.source={text}")
        more = ("save_every_n_steps=2", f"device={device}")
        return config(model_dir, tmp_path / "run", *options, *more)

    assert run_qat(make("cuda")) == 0
    assert run_convert(make("cuda")) == 0
    on_gpu = measured(make("cuda"))
    assert on_gpu["packed"] == on_gpu["trained"]
    two = measured(make("cuda"), lambda cfg: on_two_ranks(cfg, tmp_path, "hestia_eval"))
    assert two == pytest.approx(on_gpu, rel=1e-4)
    assert measured(make("cpu")) == pytest.approx(on_gpu, rel=1e-3)


def test_training_on_generated_text(model_dir, tmp_path):
    section = {
        "_component_": "hestia_tune.data.self_generated_dataset",
        "num_sequences": 16,
        "seq_len": 16,
        "cache_dir": str(tmp_path / "set"),
    }
    cfg = make_config(model_dir, tmp_path / "run", "dataset_val=null", "device=cuda")
    cfg.dataset = section
    assert run_qat(OmegaConf.merge(cfg, {"max_steps": 2})) == 0
    assert (tmp_path / "set" / "tokens.bin").stat().st_size == 16 * 16 * 2


def test_the_callback_of_the_trainer(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from test_transformers import losses, make_trainer

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # no DataParallel
    found = []
    for name, use_cpu in (("cpu", True), ("cuda", False)):
        callback = HestiaCallback(HestiaConfig(group_size=32), {"rho": 0.5, "tau_init": 0.3})
        trainer = make_trainer(tmp_path / name, callback=callback, use_cpu=use_cpu)
        trainer.train()
        found.append(losses(trainer))
        assert (tmp_path / name / "hard_model" / "model.safetensors").is_file()
    assert found[1] == pytest.approx(found[0], rel=1e-2)
