"""``hestia_qat``: compute sensitivity, bits and reconstruction if needed, and then train.

``hestia_reconstruct`` makes the reconstruction alone, after the choice of the bits.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hestia_tune.commands.bits import choose_bits
from hestia_tune.commands.launch import INTERRUPTED, Stopped, next_command
from hestia_tune.commands.sensitivity import estimate
from hestia_tune.config.run import RunConfig
from hestia_tune.distributed import end_process_group
from hestia_tune.files import locked
from hestia_tune.models.checkpoints import complete_checkpoints
from hestia_tune.reconstruction.recipe import reconstruct
from hestia_tune.training.generation import generate_missing
from hestia_tune.training.plan import plan
from hestia_tune.training.recipe import HestiaQATRecipe

# Overrides for going on with a reconstruction, by whether it may replace an earlier run.
_AGAIN = {False: (), True: ("overwrite_output=True",)}


def run_qat(config: RunConfig | Mapping[str, Any]) -> int:
    """Train the model of a config and return the exit code.

    All checks run before a sensitivity or a reconstruction is computed.
    """
    config = RunConfig.parse(config)
    for_bits = config.bits.reads_sensitivity
    for_temperatures = config.schedule.alpha != 0 or config.sensitivity != "auto"
    if not for_bits and not for_temperatures:
        config = config.changed(sensitivity=None)
    with locked(config.output_dir):
        config = _resume_if_possible(config)
        generate_missing(config)
        planned = plan(config)
        # overwrite_output also covers the sensitivity and the reconstruction that a run computes.
        replace = {"overwrite": True} if config.overwrite_output and not planned.resume else {}
        config = _measured(config, replace)
        if config.bits.average is not None:
            config = choose_bits(config, overwrite=bool(replace))
            planned = planned.choosing(config.quantizer)
            if not for_temperatures:
                config = config.changed(sensitivity=None)
        if config.reconstruction == "auto":
            recipe = reconstruct(config.changed(reconstruct=replace))
            if not recipe.finished:
                again = next_command("qat", *_AGAIN[bool(replace)])
                raise Stopped(f"{recipe.summary()}; to go on: {again}")
            config = config.changed(reconstruction=str(recipe.output))
        planned = planned.starting_from(
            sensitivity=config.sensitivity, reconstruction=config.reconstruction
        )
        recipe = HestiaQATRecipe(planned.config)
        recipe.build(planned)
        recipe.train()
        finished = recipe.finished
        if dist.get_rank() == 0:
            again = next_command("qat", "resume_from_checkpoint=True")
            end = _next_steps(config) if finished else f"; to go on: {again}"
            with contextlib.suppress(OSError):  # the terminal may be closed
                print(f"{recipe.summary()}{end}")
        recipe.cleanup()
        return 0 if finished else INTERRUPTED


def _next_steps(config: RunConfig) -> str:
    """Return the lines that end a training run: the commands to type next, in their order."""
    settings = config.eval
    steps = [f"  {next_command('convert')}   # writes files for other programs"]
    if settings.tasks or settings.perplexity or config.dataset_val is not None:
        steps.insert(0, f"  {next_command('eval')}   # compares it with the pretrained model")
    return "\n".join([". Next:", *steps])


def run_reconstruct(config: RunConfig | Mapping[str, Any]) -> int:
    """Reconstruct the model of a config, print a summary, and return the exit code.

    With a budget of bits, the bits of every linear are chosen first, as in `run_qat`.
    """
    config = RunConfig.parse(config)
    generate_missing(config)
    if config.bits.average is not None:
        if not config.bits.reads_sensitivity:
            config = config.changed(sensitivity=None)
        with locked(config.output_dir):
            plan(config, trains=False)
            replace = {"overwrite": True} if config.overwrite_output else {}
            config = choose_bits(_measured(config, replace), overwrite=bool(replace))
    recipe = reconstruct(config)
    if dist.get_rank() == 0:
        train, again = next_command("qat", "reconstruction=auto"), next_command("reconstruct")
        files = next_command("convert", f"convert.source={recipe.output / 'hard_model'}")
        step = f". Next:\n  {train}   # trains the whole model from there"
        step += f"\n  {files}   # or writes files of this model"
        print(f"{recipe.summary()}{step if recipe.finished else f'; to go on: {again}'}")
    end_process_group()
    return 0 if recipe.finished else INTERRUPTED


def _measured(config: RunConfig, replace: Mapping[str, Any]) -> RunConfig:
    """Return the config with a path as its sensitivity, and compute the sensitivity for "auto".

    Args:
        config: The config.
        replace: Changes to ``sensitivity_estimation``.
    """
    if config.sensitivity != "auto":
        return config
    estimate(config.changed(sensitivity_estimation=replace))
    return config.changed(sensitivity=config.sensitivity_estimation.output)


def _resume_if_possible(config: RunConfig) -> RunConfig:
    """Return the config, without resuming if the run was stopped before its first checkpoint."""
    computes = "auto" in (config.reconstruction, config.sensitivity) or config.bits.average
    folder = Path(config.output_dir) / "checkpoints"
    if computes and config.resume_from_checkpoint and not complete_checkpoints(folder):
        return config.changed(resume_from_checkpoint=False)
    return config
