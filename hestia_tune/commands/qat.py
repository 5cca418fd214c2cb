"""``hestia_qat``: what it needs first (sensitivity, reconstruction), then the training."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hestia_tune.commands.launch import INTERRUPTED
from hestia_tune.commands.sensitivity import estimate
from hestia_tune.config.run import RunConfig
from hestia_tune.files import locked
from hestia_tune.models.checkpoints import complete_checkpoints
from hestia_tune.reconstruction.recipe import reconstruct
from hestia_tune.training.generation import generate_missing
from hestia_tune.training.plan import plan
from hestia_tune.training.recipe import HestiaQATRecipe


def run_qat(config: RunConfig | Mapping[str, Any]) -> int:
    """Train; return the exit code.

    Everything is checked before a sensitivity or a reconstruction is computed.
    """
    config = RunConfig.parse(config)
    if config.schedule.alpha == 0 and config.sensitivity == "auto":  # nothing would read it
        config = config.changed(sensitivity=None)
    with locked(config.output_dir):
        config = _resume_if_possible(config)
        generate_missing(config)
        planned = plan(config)
        # What a run may overwrite includes what it computes by itself.
        replace = {"overwrite": True} if config.overwrite_output and not planned.resume else {}
        if config.reconstruction == "auto":
            recipe = reconstruct(config.changed(reconstruct=replace))
            if not recipe.finished:
                if dist.get_rank() == 0:
                    print(recipe.summary())
                raise KeyboardInterrupt
            planned = planned.starting_from(reconstruction=str(recipe.output))
        if config.sensitivity == "auto":
            estimate(config.changed(sensitivity_estimation=replace))
            planned = planned.starting_from(sensitivity=config.sensitivity_estimation.output)
        recipe = HestiaQATRecipe(planned.config)
        recipe.build(planned)
        recipe.train()
        if dist.get_rank() == 0:
            with contextlib.suppress(OSError):  # of a terminal that is gone
                print(recipe.summary())
        recipe.cleanup()
        return 0 if recipe.finished else INTERRUPTED


def _resume_if_possible(config: RunConfig) -> RunConfig:
    """Start again a run that was stopped before its first step: it has no checkpoint yet."""
    computes = "auto" in (config.reconstruction, config.sensitivity)
    folder = Path(config.output_dir) / "checkpoints"
    if computes and config.resume_from_checkpoint and not complete_checkpoints(folder):
        return config.changed(resume_from_checkpoint=False)
    return config
