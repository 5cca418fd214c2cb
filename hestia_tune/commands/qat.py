"""``hestia_qat``: the sensitivity if the config asks for it, then quantization-aware training."""

from pathlib import Path

from hestia_tune.commands.launch import INTERRUPTED
from hestia_tune.commands.sensitivity import SensitivityRecipe
from hestia_tune.training.checkpoint import complete_checkpoints
from hestia_tune.training.options import Run
from hestia_tune.training.recipe import HestiaQATRecipe
from hestia_tune.training.setup import check_output


def run_qat(run: Run) -> int:
    """Trains; returns the exit code."""
    run = Run.of(run)
    if run.options.sensitivity == "auto":
        check_output(run.options)  # so that no error waits until something is computed
        run = _with_sensitivity(run)
    recipe = HestiaQATRecipe(run)
    recipe.setup(run.cfg)
    recipe.train()
    if recipe.is_first_rank:
        print(recipe.summary())
    recipe.cleanup()
    return 0 if recipe.finished else INTERRUPTED


def _with_sensitivity(run: Run) -> Run:
    """``sensitivity: auto``: the run with the path of the artifact, computed if there is none."""
    options, changes = run.options, {"sensitivity": None}
    if options.schedule.alpha != 0:  # else nothing would read it
        if options.overwrite_output and not options.resume_from_checkpoint:
            # What a run may overwrite includes the artifact that it makes by itself.
            run = run.changed({"sensitivity_estimation": {"overwrite": True}})
        recipe = SensitivityRecipe(run)
        recipe.run()
        changes = {"sensitivity": str(recipe.path)}
        if recipe.computed:  # nothing to resume from, if stopped before
            saved = complete_checkpoints(Path(options.output_dir) / "checkpoints")
            resume = options.resume_from_checkpoint and bool(saved)
            changes["resume_from_checkpoint"] = resume
    return run.changed(changes)
