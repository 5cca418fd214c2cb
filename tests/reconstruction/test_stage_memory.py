"""Test the estimates of a reconstruction's spans, and what follows from them."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tiny import make_config, make_model_dir

from hestia_tune.commands.qat import run_reconstruct
from hestia_tune.config.run_config import RunConfig, load_config, packaged_configs
from hestia_tune.reconstruction import reconstruct as estimate_module
from hestia_tune.reconstruction import window
from hestia_tune.reconstruction.reconstruct import decide, describe_memory, largest_spans
from hestia_tune.reconstruction.window import pieces
from hestia_tune.run import TrainingRun
from hestia_tune.training import estimate

OPTIONS = ("reconstruct.num_samples=8", "reconstruct.batch_size=8", "reconstruct.epochs=1")
OPTIONS += ("reconstruct.kl_blocks=2", "dataset.seq_len=64", "dataset.num=32", "dataset_val=null")
AGAIN = "enable_activation_checkpointing=True"

pytestmark = pytest.mark.usefixtures("end_process_group")


def planned(model_dir, folder, *overrides):
    return TrainingRun.of(RunConfig.parse(make_config(model_dir, folder, *OPTIONS, *overrides)))


def test_a_stage_of_several_blocks_recomputes_where_it_does_not_fit(model_dir, tmp_path):
    decided = planned(model_dir, tmp_path)
    (window, own), (final, plain) = decide(decided, 64, 1e9).items()
    assert [(s.begin, s.end, s.is_final, s.sequences) for s in (window, final)] == [
        (0, 1, False, 8),
        (0, 2, True, 8),
    ]
    assert not final.recomputes
    (window, same), (final, again) = decide(decided, 64, plain - 1).items()
    assert (window.recomputes, final.recomputes) == (False, True)
    assert same == own and again < 0.7 * plain
    block = 64 * (2 * 64 + 2 * 32) + 3 * 64 * 96 + 2 * 64  # attention, MLP, norms
    assert own > 16 * block  # weights, moments, effective weights and their gradients


def test_the_windows_and_the_samples_of_a_rank(model_dir, tmp_path, monkeypatch):
    model_dir = make_model_dir(tmp_path / "model", num_layers=5)
    options = ("model.num_layers=5", "reconstruct.window=4", "reconstruct.kl_blocks=0")
    decided = planned(model_dir, tmp_path, *options, AGAIN)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    (largest,) = largest_spans(decided)
    assert (largest.begin, largest.end, largest.sequences) == (0, 4, 4)
    assert largest.recomputes


def test_the_result_does_not_depend_on_the_memory(model_dir, tmp_path, monkeypatch):
    """A span of stage 2 that computes its activations twice gives the same numbers."""
    calls, checkpoint = [], window.checkpoint

    def counted(*arguments, **options):
        calls.append(arguments)
        return checkpoint(*arguments, **options)

    monkeypatch.setattr(window, "checkpoint", counted)
    found = {}
    for total in (10**12, 1000):
        monkeypatch.setattr(
            psutil, "virtual_memory", lambda total=total: SimpleNamespace(total=total)
        )
        calls.clear()
        assert run_reconstruct(make_config(model_dir, tmp_path / str(total), *OPTIONS)) == 0
        # The estimate of stage 2, and its step, compute both blocks twice.
        assert len(calls) == (4 if total == 1000 else 0)
        found[total] = load_file(tmp_path / str(total) / "reconstruction/latents.safetensors")
    plain, again = found.values()
    assert plain.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in plain.items())


def test_validate_says_what_a_reconstruction_needs(model_dir, tmp_path, monkeypatch):
    def need(_, stage, seq_len):
        """Take 50 GB for weights; 80 GB for the activations of 8 sequences, or 40 GB."""
        assert seq_len == 64
        return 1e9 if stage.end == 1 else 5e10 + 8e10 / (1 + stage.recomputes) * stage.sequences / 8

    monkeypatch.setattr(estimate_module, "span_bytes", need)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=2e11))
    decided = planned(model_dir, tmp_path)
    text = "memory of the reconstruction: about 1.0 GB for one block, "
    text += "130 GB for 2 blocks together; this machine has 200 GB"
    assert describe_memory(decided) == text
    again = text.replace("130", "90").partition("; this machine")[0]
    again += ", whose activations are computed twice"
    # Two ranks take 4 sequences each: 70 GB, and 72 GB of a GPU may be used.
    assert describe_memory(decided, has_device=False) == f"{again}; 2 GPUs of 80 GB"
    few = " (too little: lower reconstruct.batch_size or reconstruct.kl_blocks"
    monkeypatch.setattr(estimate, "_GPU_BYTES", 5e10)
    assert describe_memory(decided, has_device=False) == f"{again}; on GPUs of 80 GB{few})"
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=8e10))
    assert describe_memory(decided).endswith(f"this machine has 80 GB{few})")


@pytest.mark.parametrize("size", [1, 2**20, 2**20 + 1, 36 * 2**20, 96 * 2**20])
@pytest.mark.parametrize("count", [1, 7, 150, 1000])
def test_pinned_buffers_lose_little_to_rounding(count, size):
    counts = pieces(count, size)
    assert sum(counts) == count and min(counts) > 0
    rounded = [2 ** (number * size - 1).bit_length() for number in counts]
    whole = 2 ** (count * size - 1).bit_length()
    assert count * size <= sum(rounded) <= whole
    assert count < 150 or sum(rounded) < 1.07 * count * size


@pytest.mark.long
@pytest.mark.parametrize("overlay", ["", "+distil", "+evening"])
@pytest.mark.parametrize("name", [n for n in packaged_configs() if "model" in load_config(n)])
def test_packaged_configs_fit_on_80_gb(name, overlay):
    path = Path(__file__).parents[2] / "benchmarks" / "memory.py"
    spec = importlib.util.spec_from_file_location("memory_benchmark", path)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not (overlay and "fairy2i" in name):  # it learns no scales
        gpus = benchmark.row(name, overlay).split("|")[-2].strip()
        assert gpus == "1"
