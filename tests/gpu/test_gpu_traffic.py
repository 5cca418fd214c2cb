"""Test how often the host waits for the device, and what is copied. Needs the simulated device."""

import pytest
import simulated_cuda
from test_gpu_training import config
from tiny import run

from hestia_tune.qat.linear import quantized_linears
from hestia_tune.torchtune.recipe import HestiaQATRecipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("end_process_group"),
    pytest.mark.skipif(not simulated_cuda.is_loaded(), reason="only the simulated device counts"),
]

MICRO_BATCHES = 2


@pytest.fixture
def events(monkeypatch):
    """Record the events of the last step, and of its log, by the name of the method."""
    found = {}

    def recorded(name):
        method = getattr(HestiaQATRecipe, name)

        def call(self, *args):
            with simulated_cuda.traffic() as rows:
                result = method(self, *args)
            found[name] = rows  # of the last step
            return result

        monkeypatch.setattr(HestiaQATRecipe, name, call)

    for name in ("train_step", "_log_step"):
        recorded(name)
    return found


def waits(rows):
    return [row for row in rows if row.waits]


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("cuda_graphs=False",),
        ("compile=True", "dtype=bf16", "optimizer.fused=True"),
        ("enable_activation_checkpointing=True", "enable_activation_offloading=True"),
        ("distillation.weight=0.5",),
        ("clip_grad_norm=null",),
    ],
    ids=lambda options: " ".join(options).replace("=True", ""),
)
def test_a_step_waits_once(model_dir, tmp_path, events, options):
    # The first micro-batches run eagerly, and the first one of the second step is captured.
    recipe = run(config(model_dir, tmp_path, "device=cuda", "max_steps=3", *options))
    graphed = recipe._graphed
    assert graphed is None or (graphed.reason is None and len(graphed._graphs) == 1)
    (wait,) = waits(events["train_step"])
    assert wait.what.startswith("device to host") and wait.num_bytes <= 4 * 8
    (wait,) = waits(events["_log_step"])
    assert wait.num_bytes == 4 * 8
    copies = [row for row in events["train_step"] if "devices.py" in row.place]
    batches = [row for row in copies if row.what.startswith("host to device")]
    assert len(batches) == 2 * MICRO_BATCHES
    assert not any("pageable" in row.what for row in batches)


@pytest.mark.parametrize("name", ["hestia", "hestia, tensor", "fairy2i", "tequila"])
def test_offloading_copies_only_effective_weights(model_dir, tmp_path, events, name):
    """A gather copies two bytes a weight, from pinned memory. The latents stay on the CPU."""
    sizes = []

    def measure(recipe):
        sizes.extend(layer.weight.numel() for layer in quantized_linears(recipe.model).values())

    options = ("device=cuda", "dtype=bf16", "fsdp_cpu_offload=True")
    run(config(model_dir, tmp_path, *options, quantizer=name), measure)
    up = [row for row in events["train_step"] if row.what.startswith("host to device")]
    assert {row.what for row in up} == {"host to device"} and not waits(up)
    gathers = [row for row in up if "latent_shard" in row.place]
    # The forward and the backward pass of every micro-batch gather every weight.
    expected = [2 * size for size in sizes * 2 * MICRO_BATCHES]
    assert sorted(row.num_bytes for row in gathers) == sorted(expected)
    assert not any("/qat/" in row.place for row in events["train_step"] if row not in gathers)
    assert not waits(events["_log_step"])
