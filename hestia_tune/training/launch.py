"""From a command line to a finished run: parsing, one-line errors, exit codes.

Exit codes: 0 done; 1 an error, told in one line on stderr; 130 stopped by Ctrl-C with a checkpoint
written. Set HESTIA_TRACEBACK=1 to see where an error came from.
"""

import os
import sys
from collections.abc import Callable

import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torchtune import config

from hestia_tune.config import one_line
from hestia_tune.training.configs import resolve_argv

INTERRUPTED = 130
STRAIGHT_THROUGH = "straight-through, hard"


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
        if os.environ.get("RANK", "0") == "0":
            print(f"{name}: error: {one_line(error, limit=2000)}", file=sys.stderr)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_qat(cfg: DictConfig) -> int:
    """The QAT job, preceded by its straight-through twin if ``compare_straight_through`` asks."""
    from hestia_tune.training.recipe import HARD, HestiaQATRecipe

    def run(cfg: DictConfig, extra: dict[str, float]) -> tuple[bool, dict[str, float]]:
        recipe = HestiaQATRecipe(cfg)
        recipe.setup(cfg)
        finished = recipe.train()
        recipe.validation_losses |= extra
        if recipe._is_rank_zero and finished:
            print(
                f"\n{recipe.table()}\n\n{recipe.output_dir}: hard_model, results.json, curves.png"
            )
        elif recipe._is_rank_zero:
            print(
                f"stopped after step {recipe.global_step}, checkpoint written; "
                "go on with resume_from_checkpoint=True"
            )
        results = dict(recipe.validation_losses)
        recipe.cleanup()
        return finished, results

    extra: dict[str, float] = {}
    if cfg.get("compare_straight_through"):
        twin = OmegaConf.merge(cfg, {"compare_straight_through": False, "sensitivity": None})
        twin.schedule = {"rho": 0.0, "tau_init": 0.0, "alpha": 0.0}
        twin.output_dir = f"{cfg.output_dir}/straight_through"
        finished, results = run(twin, {})
        if not finished:
            return INTERRUPTED
        extra = {STRAIGHT_THROUGH: results[HARD]} if HARD in results else {}
    finished, _ = run(cfg, extra)
    return 0 if finished else INTERRUPTED
