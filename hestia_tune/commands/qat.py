"""``hestia_qat``: what it needs first (sensitivity, reconstruction), then the training."""

import contextlib
from pathlib import Path

import torch.distributed as dist

from hestia_tune.commands.launch import INTERRUPTED
from hestia_tune.commands.reconstruct import with_reconstruction
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


def run_qat(run: Run) -> int:
    """Trains; returns the exit code."""
    run = Run.of(run)
    with locked(run.options.output_dir):
        return _train(run)


def _train(run: Run) -> int:
    options = run.options
    check_output(options)  # so that no error waits until something is computed
    component = build.make_component(run.cfg.quantizer)
    check_formats(run, component.method)
    if "auto" in (options.reconstruction, options.sensitivity):
        join_ranks(options.device)
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
