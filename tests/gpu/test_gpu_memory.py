"""Test the estimates of memory against the peaks of a CUDA device, real or simulated."""

import contextlib
import gc
import math

import pytest
import simulated_cuda
import torch
from tiny import logged, make_config, make_model_dir, run
from torch.nn.attention import SDPBackend, sdpa_kernel

from hestia_tune import memory
from hestia_tune.commands.qat import run_reconstruct
from hestia_tune.config.run_config import RunConfig
from hestia_tune.qat import buckets, leaves
from hestia_tune.reconstruction.engine import Windows
from hestia_tune.reconstruction.reconstruct import decide
from hestia_tune.run import TrainingRun
from hestia_tune.training import estimate as training_estimate
from hestia_tune.training.estimate import estimate

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("end_process_group")]

SEQ_LEN, AGAIN = 16, "enable_activation_checkpointing=True"
OPTIONS = (
    "device=cuda",
    "dataset.num=128",
    f"dataset.seq_len={SEQ_LEN}",
    "batch_size=32",
    "max_steps=2",
)
# Two steps a stage: the first one makes the moments of AdamW, and the second one needs them.
OPTIONS += ("reconstruct.batch_size=64", "reconstruct.num_samples=128", "reconstruct.epochs=1")
OPTIONS += ("dataset_val=null", "quantizer.scale=learned", "quantizer.scale_lr=1e-3")
SIZES = {
    "num_heads": 2,
    "num_kv_heads": 1,
    "num_layers": 4,
    "embed_dim": 128,
    "intermediate_dim": 384,
    "max_seq_len": 128,
}


# More blocks than a plan estimates one by one.
DEEP = SIZES | {"num_layers": 8, "embed_dim": 64, "intermediate_dim": 192}


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    return make_model_dir(tmp_path_factory.mktemp("larger"), **SIZES)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return make_model_dir(tmp_path_factory.mktemp("deep"), **DEEP)


def config(folder, output, *options, shape=SIZES):
    sizes = (f"model.{key}={value}" for key, value in shape.items())
    return make_config(folder, output, *sizes, *OPTIONS, *options)


def attention():
    """Compute attention as the device does. The simulated device has no fused kernel for it."""
    return sdpa_kernel(SDPBackend.MATH) if simulated_cuda.is_loaded() else contextlib.nullcontext()


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Give buckets a size that is small beside the model, as for real models."""
    for module in (buckets, leaves, training_estimate):
        monkeypatch.setattr(module, "BUCKET_WEIGHTS", 2**13)


@pytest.fixture(autouse=True)
def no_garbage():
    """Free what an earlier run of this process has left in cycles of references."""
    gc.unfreeze()
    gc.collect()


@pytest.fixture(scope="module")
def workspace():
    """Return the bytes that cuBLAS keeps in this process, which an estimate leaves out.

    On an H200 they are 32 MiB for the thread of the forward pass, and as many for the thread of the
    backward pass. This is much for the small models here, and nothing for a real model.
    """
    if simulated_cuda.is_loaded():
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    (x @ x).sum().backward()
    x.grad = None
    return torch.cuda.memory_allocated() - before - x.nbytes


def planned(cfg):
    return TrainingRun.of(RunConfig.parse(cfg).changed(overwrite_output=True))


@pytest.mark.parametrize(
    "options",
    [("dtype=fp32",), ("dtype=bf16", "distillation.weight=1"), ("dtype=bf16", AGAIN)],
    ids=str,
)
def test_the_estimate_of_a_training_step(larger, tmp_path, workspace, options):
    cfg = config(larger, tmp_path, *options)
    run(cfg)
    with attention():
        need = estimate(planned(cfg))
    measured = logged(tmp_path, "peak_memory_alloc")[2] * 2**30 - workspace
    assert need.peak == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("options", [("dtype=fp32",), ("dtype=bf16", AGAIN)], ids=str)
def test_the_estimates_of_a_reconstruction(larger, tmp_path, monkeypatch, workspace, options):
    """The largest window has the most blocks."""
    peaks, save = [], Windows.save

    def measured(windows, result):
        peaks.append(torch.cuda.max_memory_allocated() - workspace)
        save(windows, result)
        torch.cuda.reset_peak_memory_stats()

    monkeypatch.setattr(Windows, "save", measured)
    cfg = config(larger, tmp_path, "reconstruct.window=2", "reconstruct.kl_blocks=4", *options)
    run_reconstruct(cfg)
    with attention():
        window, final = decide(planned(cfg), SEQ_LEN, math.inf).values()
    assert [window, final] == pytest.approx([max(peaks[:-1]), peaks[-1]], rel=0.1)


# A run with a teacher, whose sequences per step stay the same.
# What stands for a CUDA graph on a simulated device keeps all that it has recorded.
GPU = ("dtype=bf16", "distillation.weight=1", "global_batch_size=32", "cuda_graphs=False")


def plans(whole, sizes, monkeypatch, **options):
    """Return the plans for GPUs of some sizes, as shares of what the config needs as it is."""
    monkeypatch.setattr(memory, "_FEW_TOKENS", 64)  # so that micro-batches become smaller first
    with attention():
        most = max(memory.fit_to_memory(whole, 10, **options).peak.values()) / 0.9e9
        return [memory.fit_to_memory(whole, most * size, **options) for size in sizes]


def test_plans_for_smaller_gpus(deep, tmp_path, monkeypatch, workspace):
    """A run with a plan stays below the size of the GPU, and needs what the plan says."""
    whole = RunConfig.parse(config(deep, tmp_path, *GPU, shape=DEEP))
    found = plans(whole, (0.6, 0.35, 0.2), monkeypatch)
    assert len({tuple(each.changes) for each in found}) == 3
    for number, each in enumerate(found):
        changes = [f"{key}={value}" for key, value in each.changes.items()]
        run(config(deep, tmp_path / str(number), *GPU, *changes, shape=DEEP))
        measured = logged(tmp_path / str(number), "peak_memory_alloc")[2] * 2**30 - workspace
        assert measured < each.gigabytes * 1e9, each
        assert each.peak[memory.TRAINING] == pytest.approx(measured, rel=0.1), each
