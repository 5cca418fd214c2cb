"""Write and read resumable checkpoints. A checkpoint is complete, or it is not visible.

    checkpoints/step_120/          a rename creates the folder after all files are written
        shard-*.safetensors        latent weights and optimizer state; each rank writes its shards
        rank_0.json ...            data position and random-number state of each rank
        meta.json                  step, schedule and identity of the run, checksums of all files

torch.distributed.checkpoint writes the shards. The files hold no code and cannot name code. A run
that is killed while it writes leaves only a folder with a temporary name, and the next save removes
this folder. On several nodes the folder must be on a shared file system.
"""

import contextlib
import dataclasses
import json
import logging
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from hestia_tune.config.run_config import RunConfig
from hestia_tune.distributed import gathered, of_all_ranks, on_first_rank, together
from hestia_tune.errors import InputError, one_line
from hestia_tune.files import checksum, differences, digest, remove, require_writable_dir, staged
from hestia_tune.models import sources
from hestia_tune.qat.linear import plain_shard
from hestia_tune.qat.prepare import Component
from hestia_tune.training.optimizer import inner_tensors

log = logging.getLogger(__name__)

_OPTIMIZER_PREFIX = "optimizer."
_OF_A_RANK = re.compile(r"\.rank_\d+_of_\d+$")
_BYTES_PER_FILE = 2**30
_SAME_TO_RESUME = (
    *("seed", "init", "optimizer", "lr_scheduler", "clip_grad_norm"),
    *("shuffle", "dtype", "distillation", "frozen_modules"),
)
# Checkpoints of earlier versions lack these settings.
_ADDED = ("quantizer.scale_lr", "model")


@dataclass(frozen=True, kw_only=True)
class Resume:
    """A checkpoint to resume from.

    Attributes:
        path: Folder of the checkpoint.
        meta: Content of its meta.json.
        rank_state: This rank's position of the data, of the scheduler and of the random numbers.
    """

    path: Path
    meta: dict[str, Any]
    rank_state: dict[str, Any]


def choose_checkpoint(config: RunConfig) -> Path | None:
    """Return the newest undamaged checkpoint if the config resumes, or None for a new run.

    Raises:
        InputError: If output_dir cannot be written, holds a run that may not be replaced, or has no
            undamaged checkpoint to resume from.
    """
    folder = require_writable_dir(config.output_dir) / "checkpoints"
    complete = sources.complete_checkpoints(folder)
    if not config.resume_from_checkpoint:
        if complete and not config.overwrite_output:
            raise InputError(
                f"output_dir {folder.parent} holds a run at step {complete[-1][0]}; set "
                "resume_from_checkpoint=True, overwrite_output=True or another output_dir"
            )
        return None
    if not complete:
        raise InputError(
            f"no complete checkpoint in {folder}; set resume_from_checkpoint=False to start"
        )
    for _, path in reversed(complete):
        if (problem := sources.find_damage(path)) is None:
            return path
        log.warning(f"{problem}; trying the checkpoint before it")
    raise InputError(
        f"every checkpoint in {folder} is damaged; set overwrite_output=True and "
        "resume_from_checkpoint=False to start again"
    )


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of all random-number generators that training uses, as JSON values."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    of_device = torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else None
    return {
        "torch": torch.get_rng_state().tolist(),
        "device": of_device,
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the states that `random_state` returned."""
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if device.type == "cuda" and state["device"] is not None:  # None: saved by a run on the CPU
        torch.cuda.set_rng_state(torch.tensor(state["device"], dtype=torch.uint8), device)
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
) -> None:
    """Write the checkpoint of a step, and then delete old checkpoints. Collective.

    Args:
        folder: Folder of all checkpoints. The new one is ``folder/step_{step}``.
        step: Number of finished steps. Checkpoints of later steps are deleted.
        model: The sharded model.
        optimizer: The optimizer of the model.
        rank_state: JSON values of this rank.
        meta: JSON values of the run. The first rank writes them.
        keep_last: Number of checkpoints to keep.

    Raises:
        InputError: On every rank, if the checkpoint cannot be written. Earlier checkpoints are
            unchanged.
    """
    final = folder / f"step_{step}"
    tensors, settings, _ = _state(model, optimizer)
    meta = {**meta, "step": step, "world_size": dist.get_world_size(), "optimizer": settings}

    stack = contextlib.ExitStack()  # the first rank alone uses it

    def prepare() -> Path:
        temporary = stack.enter_context(staged(final))
        for leftover in folder.glob("step_*.tmp"):
            remove(leftover)
        temporary.mkdir()
        return temporary

    def finish() -> None:
        if missing := set(meta["files"]) - {path.name for path in temporary.iterdir()}:
            raise InputError(
                f"{temporary} lacks {min(missing)}; output_dir must be on a file system that all "
                "nodes share"
            )
        meta["digest"] = digest(meta)
        (temporary / sources.META_FILE).write_text(json.dumps(meta, indent=1), encoding="utf-8")
        stack.close()
        complete = sources.complete_checkpoints(folder)
        # Later checkpoints are damaged, because this run did not resume from them.
        later = [path for number, path in complete if number > step]
        for path in later + [path for number, path in complete if number <= step][:-keep_last]:
            remove(path)

    try:
        with stack:
            temporary = cast(Path, on_first_rank(prepare))
            meta["files"] = _write_shards(temporary, tensors, rank_state)
            on_first_rank(finish, share=False)
    except (CheckpointException, OSError) as error:
        causes = getattr(error, "failures", {0: (error,)}).values()
        with of_all_ranks():
            raise InputError(
                f"{final} could not be written ({one_line(next(iter(causes))[0])}); make room, and "
                "resume from the checkpoint before it with resume_from_checkpoint=True"
            ) from error


def _write_shards(
    folder: Path, tensors: dict[str, torch.Tensor], rank_state: Mapping[str, Any]
) -> dict[str, str]:
    """Write the files of this rank. Return the checksums of all files. Collective."""
    rank = dist.get_rank()
    # The size of a file is bounded, because the writer assembles each file in memory.
    ends = accumulate(value.numel() * value.element_size() for value in tensors.values())
    files = {name: 1 + end // _BYTES_PER_FILE for name, end in zip(tensors, ends, strict=True)}
    for names in gathered(files):  # the writer needs the names of all ranks
        files = names | files
    writer = dcp.HuggingFaceStorageWriter(str(folder), files, save_distributed=True)
    dcp.save(tensors, storage_writer=writer)
    written = {}
    with together():
        (folder / f"rank_{rank}.json").write_text(json.dumps(rank_state), encoding="utf-8")
        own = [*folder.glob(f"shard-{rank + 1:05d}-*"), folder / f"rank_{rank}.json"]
        written = {path.name: checksum(path) for path in own}
    return {name: value for part in gathered(written) for name, value in part.items()}


def _state(
    model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """Return what a checkpoint stores: tensors by name, and the optimizer's settings.

    The tensors are plain shards that share the memory of model and optimizer. A moment that torchao
    has quantized is stored as its codes, scales and table, by rank. The third value is the
    optimizer's state by name, with such moments whole.
    """
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    tensors = {
        f"{sources.MODEL_PREFIX}{name}": plain_shard(value) for name, value in weights.items()
    }
    settings = {}
    for name, value in moments.items():
        if name.startswith("param_groups.") and isinstance(value, torch.Tensor):
            value = value.item()  # torchao's rates are tensors that the parameters of a group share
        if parts := inner_tensors(value) if isinstance(value, torch.Tensor) else {}:
            tensors |= {f"{_OPTIMIZER_PREFIX}{name}.{_own(key)}": x for key, x in parts.items()}
            continue
        kind = tensors if isinstance(value, torch.Tensor) else settings
        kind[f"{_OPTIMIZER_PREFIX}{name}"] = value
    return tensors, settings, moments


def _own(part: str) -> str:
    """Return the name of a part of a moment that belongs to this rank and to a number of ranks."""
    return f"{part}.rank_{dist.get_rank()}_of_{dist.get_world_size()}"


def load_checkpoint(path: Path, *, model: nn.Module, optimizer: Optimizer) -> None:
    """Restore model and optimizer in place, on any number of ranks. Collective.

    Raises:
        InputError: If the optimizer has quantized moments and the number of ranks is another one.
    """
    tensors, _, moments = _state(model, optimizer)
    meta, ranks = sources.read_meta(path), dist.get_world_size()
    quantized = {
        f"{_OPTIMIZER_PREFIX}{name}": value
        for name, value in moments.items()
        if isinstance(value, torch.Tensor) and inner_tensors(value)
    }
    if quantized and meta["world_size"] != ranks:
        raise InputError(
            f"the checkpoint is from {meta['world_size']} ranks, this run has {ranks}; blocks of "
            f"moments of {type(optimizer).__name__} belong to one rank each; resume on "
            f"{meta['world_size']} ranks, or start again with resume_from_checkpoint=False"
        )
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(path)))
    settings = {
        name: torch.tensor(value, dtype=old.dtype) if isinstance(old, torch.Tensor) else value
        for name, value in meta["optimizer"].items()
        for old in [moments.get(name.removeprefix(_OPTIMIZER_PREFIX))]
    }
    whole: dict[str, Any] = tensors | quantized | settings
    model_state, optimizer_state = (
        {
            name.removeprefix(start): value
            for name, value in whole.items()
            if name.startswith(start) and not _OF_A_RANK.search(name)
        }
        for start in (sources.MODEL_PREFIX, _OPTIMIZER_PREFIX)
    )
    set_state_dict(
        model,
        optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
        options=StateDictOptions(strict=True, flatten_optimizer_state_dict=True),
    )


def config_identity(config: RunConfig, component: Component) -> dict[str, Any]:
    """Return the parts of a config that must not change when a run is resumed."""
    sections = dataclasses.asdict(config)
    # Where the model lies, and how long its sequences may be, change no weight.
    elsewhere = ("path", "max_seq_len")
    return {
        "quantizer": component.key(),
        "quantizer.scale_lr": component.parameter_lr,
        "model": {key: value for key, value in config.model.items() if key not in elsewhere},
        **{key: sections[key] for key in _SAME_TO_RESUME},
        "dataset.seq_len": [section.get("seq_len") for section in config.datasets],
    }


def check_same(identity: dict[str, Any], resume_meta: dict[str, Any]) -> None:
    """Raise InputError if a setting of the run differs from the checkpoint.

    Args:
        identity: Some or all settings in the identity of this run.
        resume_meta: The meta.json of the checkpoint to resume from.
    """
    for key, value in identity.items():
        if key in _ADDED and key not in resume_meta["identity"]:
            continue
        saved = resume_meta["identity"].get(key)
        # An old file may have options of typed sections that were removed since.
        if differences({key: value}, {key: saved}):
            remedy = f"set {key}={saved}" if key == "dtype" else "use the same"
            raise InputError(
                f"the checkpoint to resume from has {key} {saved}, this run {value}; "
                f"{remedy}, or start again with resume_from_checkpoint=False"
            )


def machine_differences(now: Mapping[str, Any], resume_meta: Mapping[str, Any]) -> str:
    """Return what differs between this machine and that of a checkpoint, or an empty text.

    Args:
        now: `RunConfig.machine_settings` of this run.
        resume_meta: The meta.json of the checkpoint to resume from.
    """
    saved = resume_meta.get("machine") or {}
    odd = [f"{key} {saved[key]}, now {now[key]}" for key in saved if saved[key] != now.get(key)]
    return "; ".join(odd)
