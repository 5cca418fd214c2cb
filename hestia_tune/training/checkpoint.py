"""Resumable checkpoints: sharded by torch.distributed.checkpoint, complete or invisible.

    checkpoints/step_120/          the folder appears by a rename, after everything in it is written
        *.distcp, .metadata        latent weights and optimizer state, each rank its own shards
        rank_0.pt ...              data position and random-number state of each rank
        meta.json                  step, schedule and identity of the run

A run that is killed while writing leaves only a folder with a temporary name, which the next save
removes. On several nodes the folder must be on a shared file system.
"""

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from hestia_tune.models.checkpoints import META_FILE, complete_checkpoints, digest, read_meta

__all__ = [
    "complete_checkpoints",
    "digest",
    "load_checkpoint",
    "load_rank_state",
    "random_state",
    "read_meta",
    "save_checkpoint",
    "set_random_state",
]


def random_state(device: torch.device) -> dict[str, Any]:
    """State of every random-number generator that training may draw from."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restores what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(state["numpy"]))


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    rank_state: Mapping[str, Any],
    meta: Mapping[str, Any],
    keep_last: int,
) -> Path:
    """Writes ``folder/step_{step}`` and then deletes all but the ``keep_last`` newest.

    Collective: every rank calls it. ``meta`` is JSON; ``rank_state`` is anything that
    ``torch.load(weights_only=True)`` reads back.
    """
    final, temporary = folder / f"step_{step}", folder / f"step_{step}.tmp"
    is_first = dist.get_rank() == 0
    if is_first:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("step_*.tmp"):
            shutil.rmtree(leftover)
        temporary.mkdir()
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=str(temporary))
    torch.save(dict(rank_state), temporary / f"rank_{dist.get_rank()}.pt")
    dist.barrier()
    if is_first:
        expected = {f"rank_{rank}.pt" for rank in range(dist.get_world_size())}
        if missing := expected - {path.name for path in temporary.iterdir()}:
            raise ValueError(
                f"{temporary} lacks {sorted(missing)[0]}: output_dir must be on a file system that "
                "all nodes share"
            )
        text = json.dumps({**meta, "step": step, "world_size": dist.get_world_size()}, indent=1)
        (temporary / META_FILE).write_text(text, encoding="utf-8")
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        for _, old in complete_checkpoints(folder)[:-keep_last]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def load_rank_state(path: Path, rank: int) -> dict[str, Any]:
    """The ``rank_state`` that a rank saved."""
    return torch.load(path / f"rank_{rank}.pt", weights_only=True)


def load_checkpoint(path: Path, *, model: nn.Module, optimizer: Optimizer) -> None:
    """Restores model and optimizer in place, on any number of ranks. Collective."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=str(path))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(strict=True),
    )
