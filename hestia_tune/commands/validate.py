"""``python -m hestia_tune validate NAME [key=value ...]``: what hestia_qat checks before its first
step, by the recipe's own set-up on one CPU process; nothing is trained, and no file is changed.

It reads the checkpoint and opens the data, as a run would. What a run would compute or load besides
(``sensitivity: auto``, ``reconstruction: auto``, the teacher of a distillation) is not.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import ListConfig
from torch import nn
from torchtune.config._utils import _get_component_from_path

from hestia_tune.data.tokens import INDEX
from hestia_tune.models import build
from hestia_tune.models.checkpoints import complete_checkpoints, read_meta
from hestia_tune.training.generation import SELF_GENERATED
from hestia_tune.training.options import Run
from hestia_tune.training.setup import RecipeSetup


class _Valid(Exception):
    """The set-up came to its end."""


class NoLogger:
    """In place of a metric logger, which would open a run, or write; takes its options."""

    def __init__(self, **options: Any):
        pass

    def log_config(self, config: Any) -> None:
        """Nothing."""


class Validation(RecipeSetup):
    """A set-up with the model on the meta device, which ends before anything is replaced."""

    def build_model(self, state: dict[str, torch.Tensor]) -> nn.Module:
        """Prepared, on the meta device."""
        return build.build_on_meta(self.run.cfg.model, self.component)

    def _setup_profiler(self, cfg_profiler: Any = None) -> Any:
        raise _Valid


def run_validate(run: Run) -> int:
    """Checks a run and prints what it is; returns the exit code. Errors are those of the run."""
    cfg, options = run.cfg.copy(), run.options
    if options.device == "cuda" and not torch.cuda.is_available():
        print("device cuda: not here; all else is checked")
    cfg.device, cfg.compile, cfg.fsdp_cpu_offload, cfg.code_statistics = "cpu", False, False, False
    cfg.enable_activation_offloading, cfg.distillation.weight = False, 0.0
    for section in cfg.dataset if isinstance(cfg.dataset, ListConfig) else [cfg.dataset]:
        folder = section.get("cache_dir")
        if section._component_ == SELF_GENERATED and not (Path(folder) / INDEX).is_file():
            raise ValueError(
                f"dataset.cache_dir {folder} is empty: its text is generated when the run begins, "
                "and cannot be checked before"
            )
    if "fused" in cfg.optimizer:
        cfg.optimizer.fused = False  # which the meta device has not
    found = complete_checkpoints(Path(options.output_dir) / "checkpoints")
    if options.resume_from_checkpoint and found:
        ranks = read_meta(found[-1][1])["world_size"]
        if ranks > 1:
            print(f"resuming a run of {ranks} processes: not checked here; all else is")
            cfg.resume_from_checkpoint, cfg.overwrite_output = False, True
    auto = {
        "sensitivity": options.sensitivity_estimation.output if options.schedule.alpha else None,
        "reconstruction": options.reconstruct.output,
    }
    for key, path in auto.items():  # what a run that is resumed made before it began
        if cfg[key] == "auto":
            is_there = cfg.resume_from_checkpoint and path is not None and Path(path).exists()
            cfg[key] = path if is_there else None
    _get_component_from_path(cfg.metric_logger["_component_"])
    cfg.metric_logger = {"_component_": "hestia_tune.commands.validate.NoLogger"}
    recipe = Validation(Run.of(cfg))
    recipe.identified = run.cfg
    try:
        recipe.setup(recipe.run.cfg)
    except _Valid:
        dist.destroy_process_group()
    print(
        f"valid: {len(recipe.driver.layers)} linears by {recipe.component.method.key()}, "
        f"{recipe.total_steps} steps of {recipe.data.sequences_per_step} sequences (of one "
        f"process), into {options.output_dir}"
    )
    return 0
