"""Test torchao's optimizers with quantized moments: on shards, in checkpoints, on two ranks."""

import shutil

import pytest
import torch
from ranks import run_forked
from safetensors import safe_open
from tiny import logged, make_config, make_model_dir, run, write_config
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torchao.optim import AdamW8bit

from hestia_tune.distributed import ensure_process_group
from hestia_tune.errors import InputError
from hestia_tune.qat.latent_shard import LatentShard
from hestia_tune.training.optimizer import check_optimizer, make_optimizer, state_bytes

KINDS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
SETTINGS = (
    *("max_steps=4", "save_every_n_steps=1", "keep_last_checkpoints=9", "dataset_val=null"),
    *("quantizer.scale=learned", "quantizer.scale_lr=1e-2", "gradient_accumulation_steps=2"),
)
KEYS = ("loss", "lr", "grad_norm")


def weights(folder):
    return {path.name: path.read_bytes() for path in (folder / "hard_model").glob("*.safetensors")}


def settings(kind):
    return (*SETTINGS, f"optimizer._component_=torchao.optim.{kind}", "optimizer.fused=auto")


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_is_bit_exact(model_dir, tmp_path, kind):
    run(make_config(model_dir, tmp_path / "whole", *settings(kind)))
    name = "checkpoints/step_2"
    stored = {}
    for path in (tmp_path / "whole" / name).iterdir():
        assert path.suffix in (".safetensors", ".json")
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                stored |= {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    codes = {key: kind for key, kind in stored.items() if ".codes." in key}
    assert len(codes) >= 2 * 6  # two moments of every matrix of 4096 weights or more
    assert set(codes.values()) == {"F8_E4M3" if kind == "AdamWFp8" else "U8"}
    shutil.copytree(tmp_path / "whole" / name, tmp_path / "again" / name)
    shutil.copy(tmp_path / "whole" / "metrics.jsonl", tmp_path / "again")
    run(make_config(model_dir, tmp_path / "again", *settings(kind), "resume_from_checkpoint=True"))
    for key in KEYS:
        assert logged(tmp_path / "again", key) == logged(tmp_path / "whole", key), key
    assert weights(tmp_path / "again") == weights(tmp_path / "whole") != {}


def test_steps_on_shards_equal_steps_on_plain_weights(end_process_group):
    """Against torchao's own optimizer on plain tensors, with a group of its own for vectors."""
    ensure_process_group(torch.device("cpu"))
    mesh = init_device_mesh("cpu", (1,))
    torch.manual_seed(0)
    matrix, small, vector = torch.randn(64, 96), torch.randn(8, 12), torch.randn(96)
    plain = [nn.Parameter(x.clone()) for x in (matrix, small, vector)]
    groups = [{"params": plain[:2]}, {"params": plain[2:], "weight_decay": 0.0}]
    reference = AdamW8bit(groups, lr=0.1, weight_decay=0.1)
    shards = [LatentShard(matrix.clone()), small.clone(), vector.clone()]
    given = [nn.Parameter(DTensor.from_local(x, mesh, [Shard(0)])) for x in shards]
    section = {"_component_": "torchao.optim.AdamW8bit", "lr": 0.1, "weight_decay": 0.1}
    ours = make_optimizer(section, given)
    for _ in range(3):
        grads = [torch.randn_like(x) for x in plain]
        for ps, wrap in ((plain, torch.clone), (given, lambda g: DTensor.from_local(g, mesh))):
            for p, grad in zip(ps, grads, strict=True):
                p.grad = wrap(grad)
        ours.step()
        with torch.compiler.set_stance("force_eager"):
            reference.step()
    assert torch.equal(shards[0].latent, plain[0])
    assert torch.equal(shards[1], plain[1]) and torch.equal(shards[2], plain[2])
    assert not torch.equal(shards[0].latent, matrix)
    state = ours.state[given[0]]["exp_avg"]
    assert isinstance(state, DTensor) and state.shape == matrix.shape
    codes = [o.state[p]["exp_avg"] for o, p in ((ours, given[0]), (reference, plain[0]))]
    assert torch.equal(codes[0].to_local().codes, codes[1].codes)
    ours.zero_grad()
    ours.step()  # without gradients nothing changes, and no state is lost
    assert torch.equal(shards[0].latent, plain[0]) and ours.state[given[0]]["exp_avg"] is state


@pytest.mark.parametrize(
    ("component", "expected"),
    [
        ("torch.optim.SGD", 0),
        ("torch.optim.AdamW", 8),
        ("torchao.optim.AdamW8bit", 2 * (1 + 4 / 256)),
        ("torchao.optim.AdamW4bit", 2 * (0.5 + 4 / 128)),
        ("torchao.optim.AdamWFp8", 2 * (1 + 4 / 256)),
    ],
)
def test_the_estimate_counts_the_state(component, expected):
    assert state_bytes({"_component_": component, "lr": 0.1}) == pytest.approx(expected, abs=0.01)


def test_an_optimizer_that_cannot_train_shards():
    with pytest.raises(InputError, match="set fsdp_cpu_offload=True and optimizer=torch.optim"):
        check_optimizer({"_component_": "torchao.optim.CPUOffloadOptimizer", "lr": 0.1})


@pytest.mark.slow
def test_two_ranks_resume_exactly_and_one_rank_is_refused(tmp_path):
    model_dir = make_model_dir(tmp_path / "model", embed_dim=128)
    options = (*settings("AdamW8bit"), "model.embed_dim=128", "batch_size=2")
    cfg = make_config(model_dir, tmp_path / "whole", *options)
    done = run_forked("--config", write_config(cfg, tmp_path / "a.yaml"), ranks=2)
    assert done.returncode == 0, done.stderr
    name = "checkpoints/step_2"
    shutil.copytree(tmp_path / "whole" / name, tmp_path / "again" / name)
    shutil.copy(tmp_path / "whole" / "metrics.jsonl", tmp_path / "again")
    cfg = make_config(model_dir, tmp_path / "again", *options, "resume_from_checkpoint=True")
    path = write_config(cfg, tmp_path / "b.yaml")
    shutil.copytree(tmp_path / "again", tmp_path / "kept")
    assert run_forked("--config", path, ranks=2).returncode == 0
    for key in KEYS:
        assert logged(tmp_path / "again", key) == logged(tmp_path / "whole", key), key
    assert weights(tmp_path / "again") == weights(tmp_path / "whole") != {}
    one = ("resume_from_checkpoint=True", "batch_size=4")
    with pytest.raises(
        InputError, match="from 2 ranks, this run has 1; blocks of moments of AdamW"
    ):
        run(make_config(model_dir, tmp_path / "kept", *options, *one))
