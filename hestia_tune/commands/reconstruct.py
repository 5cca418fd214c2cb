"""``hestia_reconstruct``: make the blocks of a model ternary, one window after another."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from hestia_tune.commands.launch import INTERRUPTED
from hestia_tune.config.run import RunConfig
from hestia_tune.distributed import end_process_group
from hestia_tune.reconstruction.recipe import reconstruct
from hestia_tune.training.generation import generate_missing


def run_reconstruct(config: RunConfig | Mapping[str, Any]) -> int:
    """Reconstruct the model of a config, print a summary, and return the exit code."""
    config = RunConfig.parse(config)
    generate_missing(config)
    recipe = reconstruct(config)
    if dist.get_rank() == 0:
        print(recipe.summary())
    end_process_group()
    return 0 if recipe.finished else INTERRUPTED
