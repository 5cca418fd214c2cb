"""A reconstruction maps the blocks of the model from files, and copies only those that it uses."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny import make_config, make_model_dir
from torch._subclasses import FakeTensor

from hestia_tune.blocks import find_blocks, outside_blocks
from hestia_tune.commands.qat import run_reconstruct
from hestia_tune.reconstruction.engine import Windows

NUM_BLOCKS, WINDOW = 4, 2
OPTIONS = (
    f"model.num_layers={NUM_BLOCKS}",
    "quantizer.scale=learned",
    "reconstruct.num_samples=8",
    "reconstruct.batch_size=4",
    "reconstruct.epochs=1",
    f"reconstruct.window={WINDOW}",
    f"reconstruct.kl_blocks={WINDOW}",
    "reconstruct.kl_epochs=1",
)

pytestmark = pytest.mark.usefixtures("end_process_group")


def are_mapped(groups: list[list[torch.Tensor]]) -> list[list[bool]]:
    """Return of each tensor whether its memory belongs to a mapped safetensors file."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    lines = [line for line in maps if ".safetensors" in line]
    ranges = [[int(number, 16) for number in line.split()[0].split("-")] for line in lines]
    return [[any(b <= v.data_ptr() < e for b, e in ranges) for v in values] for values in groups]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="it reads /proc of Linux")
def test_only_the_blocks_in_use_are_in_memory(tmp_path, monkeypatch):
    """Count, in each attention, the blocks with a weight in memory: in a run, and in its rest.

    The files of the model are bfloat16. The same model in float32 gives the same latents.
    """
    folders = [make_model_dir(tmp_path / name, num_layers=NUM_BLOCKS) for name in ("low", "high")]
    rounded = {k: v.bfloat16() for k, v in load_file(folders[0] / "model.safetensors").items()}
    save_file(rounded, folders[0] / "model.safetensors")
    save_file({k: v.float() for k, v in rounded.items()}, folders[1] / "model.safetensors")
    start, attention = Windows.start, F.scaled_dot_product_attention
    models, counts, stop_at = [], [], 70

    def started(windows, state):
        start(windows, state)
        models.append(windows._model)

    def counted(*args, **kwargs):
        if isinstance(args[0], FakeTensor) or not models:  # the checks before the run
            return attention(*args, **kwargs)
        blocks = [[*block.parameters()] for block in find_blocks(models[-1]).values()]
        outside, *inside = are_mapped([outside_blocks(models[-1]), *blocks])
        assert not any(outside)
        counts.append(sum(not all(mapped) for mapped in inside))
        if len(counts) == stop_at:
            raise KeyboardInterrupt
        return attention(*args, **kwargs)

    monkeypatch.setattr(Windows, "start", started)
    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    config = make_config(folders[0], tmp_path / "run", *OPTIONS)
    with pytest.raises(KeyboardInterrupt):
        run_reconstruct(config)
    assert list((tmp_path / "run/reconstruction/windows").glob("window_*.safetensors"))
    assert run_reconstruct(config) == 0
    assert len(models) == 2 and len(counts) > stop_at + 20
    assert {*counts} == {1, WINDOW}
    monkeypatch.undo()
    assert run_reconstruct(make_config(folders[1], tmp_path / "high_run", *OPTIONS)) == 0
    low, high = (
        load_file(tmp_path / name / "reconstruction/latents.safetensors")
        for name in ("run", "high_run")
    )
    assert low.keys() == high.keys()
    assert all(torch.equal(value, high[name]) for name, value in low.items())
