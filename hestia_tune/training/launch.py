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


def run_qat(cfg: DictConfig) -> int:
    """The QAT job, preceded by its straight-through twin if ``compare_straight_through`` asks."""
    from hestia_tune.training.recipe import HARD, STRAIGHT_THROUGH, HestiaQATRecipe
    from hestia_tune.training.setup import preflight

    def run(cfg: DictConfig, extra: dict[str, float], is_twin: bool = False) -> bool:
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
        recipe.cleanup(end_process_group=not (is_twin and finished))
        return finished

    extra: dict[str, float] = {}
    if cfg.get("compare_straight_through"):
        preflight(cfg)  # so that no error waits until the twin is trained
        cfg, twin = OmegaConf.merge(cfg), OmegaConf.merge(cfg)
        twin.compare_straight_through, twin.sensitivity = False, None
        twin.schedule = {"rho": 0.0, "tau_init": 0.0, "alpha": 0.0}
        twin.output_dir = f"{cfg.output_dir}/straight_through"
        results = Path(twin.output_dir) / "results.json"
        if cfg.get("resume_from_checkpoint"):
            # Stopped in the twin, the main run has nothing to resume from yet.
            cfg.resume_from_checkpoint = bool(saved_steps(cfg))
            twin.resume_from_checkpoint = bool(saved_steps(twin))
        if not (cfg.get("resume_from_checkpoint") and results.is_file()) and not run(
            twin, {}, is_twin=True
        ):
            return INTERRUPTED
        losses = json.loads(results.read_text(encoding="utf-8"))["validation_loss"]
        extra = {STRAIGHT_THROUGH: losses[HARD]} if HARD in losses else {}
    return 0 if run(cfg, extra) else INTERRUPTED


def saved_steps(cfg: DictConfig) -> list[int]:
    """Steps of the complete checkpoints in the output folder of ``cfg``."""
    from hestia_tune.training.checkpoint import complete_checkpoints

    return [step for step, _ in complete_checkpoints(Path(cfg.output_dir) / "checkpoints")]
