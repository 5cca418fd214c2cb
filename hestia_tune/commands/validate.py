"""``python -m hestia_tune validate NAME [key=value ...]``: checks a config as hestia_qat would.

It makes the plan of a run on one CPU process and ends there: no weight is read, nothing is trained,
and no file is changed. What a run would compute first (``sensitivity: auto``, ``reconstruction:
auto``) is not computed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hestia_tune.config.run import RunConfig
from hestia_tune.models.checkpoints import complete_checkpoints, read_meta
from hestia_tune.training.plan import plan


def run_validate(config: RunConfig | Mapping[str, Any]) -> int:
    """Check a config and print what it would do; return the exit code."""
    config = RunConfig.parse(config)
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        print("device cuda: not here; all else is checked")
        offload = {"fsdp_cpu_offload": False, "enable_activation_offloading": False}
        config = config.changed(device="cpu", **offload)
    found = complete_checkpoints(Path(config.output_dir) / "checkpoints")
    if config.resume_from_checkpoint and found:
        ranks = read_meta(found[-1][1])["world_size"]
        if ranks > 1:
            print(f"resuming a run of {ranks} processes: not checked here; all else is")
            config = config.changed(resume_from_checkpoint=False, overwrite_output=True)
    planned = plan(config)
    dist.destroy_process_group()
    print(
        f"valid: {len(planned.layers)} linears by {planned.component.method.key()}, "
        f"{planned.data.total_steps} steps of {planned.data.sequences_per_step} sequences (of one "
        f"process), into {config.output_dir}"
    )
    return 0
