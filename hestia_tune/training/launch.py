"""From a command line to a finished run: parsing, one-line errors, exit codes.

Exit codes: 0 done; 1 an error, told in one line on stderr; 130 stopped by Ctrl-C with a checkpoint
written. Set HESTIA_TRACEBACK=1 to see where an error came from.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torchtune import config

from hestia_tune.config import one_line
from hestia_tune.training.configs import resolve_argv

INTERRUPTED = 130


def main(run: Callable[[DictConfig], int], name: str) -> int:
    """Parses ``sys.argv`` as torchtune does (packaged config names included) and runs ``run``."""
    try:
        sys.argv = resolve_argv(sys.argv)
        parsed: list[DictConfig] = []
        try:
            config.parse(parsed.append)()
        except SystemExit as stop:  # the parser exits when its callback returns
            if stop.code:
                return int(stop.code)
        return run(parsed[0])
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if os.environ.get("HESTIA_TRACEBACK"):
            raise
        # What was checked before the ranks met, or on rank 0 for all, is told once.
        shared = getattr(error, "on_every_rank", False) or not dist.is_initialized()
        rank = os.environ.get("RANK", "0")
        if rank == "0" or not shared:
            where = "" if rank == "0" else f"[rank {rank}] "
            print(f"{name}: error: {where}{one_line(error, limit=2000)}", file=sys.stderr)
        # Several ranks are ended by torchrun; to wait for each other here could hang.
        if dist.is_initialized() and dist.get_world_size() == 1:
            dist.destroy_process_group()
        return 1


# What a twin run changes, by the key that asks for it.
_TWINS = {
    "compare_straight_through": (
        "straight_through",
        {"sensitivity": None, "schedule": {"rho": 0.0, "tau_init": 0.0, "alpha": 0.0}},
    ),
    "compare_uniform": ("uniform", {"sensitivity": None}),
}


def run_qat(cfg: DictConfig) -> int:
    """The QAT job, preceded by the twin runs that the config asks for.

    ``compare_straight_through`` asks for straight-through AbsMean QAT, ``compare_uniform`` for one
    temperature for all layers. Their results are rows of the main run's table.
    """
    from hestia_tune.training.recipe import HARD, TWIN_ROWS, HestiaQATRecipe
    from hestia_tune.training.setup import preflight

    def run(cfg: DictConfig, extra: dict[str, float], is_last: bool) -> bool:
        recipe = HestiaQATRecipe(cfg)
        recipe.setup(cfg)
        recipe.validation_losses |= extra
        finished = recipe.train()
        if recipe._is_rank_zero and finished:
            print(f"\n{recipe.table()}\n")
            print(f"{recipe.output_dir}: hard_model, results.json, curves.png")
        elif recipe._is_rank_zero:
            print(
                f"stopped after step {recipe.global_step}, checkpoint written; "
                "go on with resume_from_checkpoint=True"
            )
        recipe.cleanup(end_process_group=is_last or not finished)
        return finished

    cfg = OmegaConf.merge(cfg)
    twins = [key for key in _TWINS if cfg.get(key)]
    if twins or cfg.get("sensitivity") == "auto":
        preflight(cfg)  # so that no error waits until something is computed
    resuming = bool(cfg.get("resume_from_checkpoint"))
    computed = False
    if cfg.get("sensitivity") == "auto":
        cfg.sensitivity, computed = _computed_sensitivity(cfg)
    extra: dict[str, float] = {}
    for key in twins:
        folder, changes = _TWINS[key]
        twin = OmegaConf.merge(cfg, dict.fromkeys(_TWINS, False))
        for name, value in changes.items():
            twin[name] = value
        twin.output_dir = f"{cfg.output_dir}/{folder}"
        results = Path(twin.output_dir) / "results.json"
        if resuming:  # stopped in a twin, what comes after it has nothing to resume from yet
            twin.resume_from_checkpoint = bool(saved_steps(twin))
        done = resuming and results.is_file()
        if not done and not run(twin, {}, is_last=False):
            return INTERRUPTED
        losses = json.loads(results.read_text(encoding="utf-8"))["validation_loss"]
        extra |= {TWIN_ROWS[key]: losses[HARD]} if HARD in losses else {}
    if resuming and (twins or computed):  # nothing to resume from, if stopped before
        cfg.resume_from_checkpoint = bool(saved_steps(cfg))
    return 0 if run(cfg, extra, is_last=True) else INTERRUPTED


def _computed_sensitivity(cfg: DictConfig) -> tuple[str | None, bool]:
    """``sensitivity: auto``: the path of the artifact, and whether it was computed just now."""
    from hestia_tune.config import ScheduleConfig
    from hestia_tune.training.sensitivity import SensitivityRecipe

    if cfg.get("schedule", {}).get("alpha", ScheduleConfig().alpha) == 0:
        return None, False  # nothing would read it
    if cfg.get("overwrite_output") and not cfg.get("resume_from_checkpoint"):
        # What a run may overwrite includes the artifact that it makes by itself.
        cfg = OmegaConf.merge(cfg, {"sensitivity_estimation": {"overwrite": True}})
    recipe = SensitivityRecipe(cfg)
    recipe.run()
    return str(recipe.path), recipe.computed


def saved_steps(cfg: DictConfig) -> list[int]:
    """Steps of the complete checkpoints in the output folder of ``cfg``."""
    from hestia_tune.training.checkpoint import complete_checkpoints

    return [step for step, _ in complete_checkpoints(Path(cfg.output_dir) / "checkpoints")]
