"""Reading what training saved: which checkpoints there are, their meta data, their latent weights.

Writing and resuming are in `hestia_tune.training.checkpoint`, which describes the folder.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

_STEP_FOLDER = re.compile(r"step_(\d+)")
META_FILE = "meta.json"


def digest(value: Any) -> str:
    """A short digest of anything JSON holds."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every complete checkpoint in ``folder``, oldest first."""
    complete = [path.parent for path in folder.glob(f"*/{META_FILE}")]
    matches = [(_STEP_FOLDER.fullmatch(path.name), path) for path in complete]
    return sorted((int(match.group(1)), path) for match, path in matches if match)


def read_meta(path: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint."""
    return json.loads((path / META_FILE).read_text(encoding="utf-8"))


def read_latents(folder: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    """The latent weights of a training checkpoint, whole, in float32 on the CPU.

    Args:
        folder: the checkpoint.
        model: prepared, on the meta device; names and shapes.
    """
    shapes = model.state_dict().items()
    state = {"model": {name: torch.empty_like(p, device="cpu") for name, p in shapes}}
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    return state["model"]
