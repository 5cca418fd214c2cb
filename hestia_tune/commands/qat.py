"""``hestia_qat``: what it needs first (sensitivity, reconstruction), then the training."""

import contextlib
from pathlib import Path

import torch.distributed as dist
from torchtune import utils

from hestia_tune.commands.launch import INTERRUPTED
from hestia_tune.commands.reconstruct import reconstruct
from hestia_tune.commands.sensitivity import with_sensitivity
from hestia_tune.distributed import together
from hestia_tune.files import locked
from hestia_tune.models import build
from hestia_tune.models.checkpoints import complete_checkpoints
from hestia_tune.training.base import join_ranks
from hestia_tune.training.options import Run
from hestia_tune.training.outputs import check_formats
from hestia_tune.training.recipe import HestiaQATRecipe
from hestia_tune.training.setup import check_components, check_output

log = utils.get_logger("DEBUG")


def run_qat(run: Run) -> int:
    """Trains; returns the exit code."""
    run = Run.of(run)
    options = run.options
    with locked(options.output_dir):
        check_output(options)  # so that no error waits until something is computed
        component = build.make_component(run.cfg.quantizer)
        check_formats(run, component.method)
        if "auto" in (options.reconstruction, options.sensitivity):
            join_ranks(options.device, options.dtype)
            with together():
                check_components(run, component)
        run, first = with_reconstruction(run)
        run, second = with_sensitivity(run, options.schedule.alpha)
        if first or second:  # nothing to resume from, if stopped before
            saved = complete_checkpoints(Path(options.output_dir) / "checkpoints")
            resume = options.resume_from_checkpoint and bool(saved)
            run = run.changed({"resume_from_checkpoint": resume})
        recipe = HestiaQATRecipe(run)
        recipe.setup(run.cfg)
        recipe.train()
        if dist.get_rank() == 0:
            with contextlib.suppress(OSError):  # of a terminal that is gone
                print(recipe.summary())
        recipe.cleanup()
        return 0 if recipe.finished else INTERRUPTED


def with_reconstruction(run: Run) -> tuple[Run, bool]:
    """``reconstruction: auto``: the run with the path of the folder, computed if there is none;
    whether it was computed.

    Raises:
        KeyboardInterrupt: if it was stopped; what was trained is kept.
    """
    options = run.options
    if options.reconstruction != "auto":
        return run, False
    if options.overwrite_output and not options.resume_from_checkpoint:
        run = run.changed({"reconstruct": {"overwrite": True}})
    recipe = reconstruct(run)
    if not recipe.finished:
        utils.log_rank_zero(log, recipe.summary())
        raise KeyboardInterrupt
    return run.changed({"reconstruction": str(recipe.output)}), recipe.computed
