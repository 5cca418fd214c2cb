"""``hestia_sensitivity``: measure the sensitivity of every layer, and draw it."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from hestia_tune.commands.launch import next_command
from hestia_tune.config.run import RunConfig
from hestia_tune.distributed import end_process_group
from hestia_tune.run import Run
from hestia_tune.stages import measure_sensitivity
from hestia_tune.training.generation import generate_missing


def run_sensitivity(config: RunConfig | Mapping[str, Any]) -> int:
    """Measure the sensitivity of a config's model and return the exit code."""
    run = Run.of(config)
    generate_missing(run)
    path = measure_sensitivity(run).config.sensitivity
    if dist.get_rank() == 0:
        print(f"{path} has the scores. Next:")
        found = [] if run.config.sensitivity == "auto" else [f"sensitivity={path}"]
        print(f"  {next_command('qat', *found)}")
    end_process_group()
    return 0
