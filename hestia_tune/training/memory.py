"""Memory of a training step: what is logged, and CUDA's history for the profiler."""

import resource
from typing import Any

import torch
from torchtune import training


def memory_metrics(device: torch.device, peak_of_device: bool) -> dict[str, float]:
    """torchtune's peak statistics of the device, or this process's peak resident set."""
    if peak_of_device:
        return training.get_memory_stats(device=device)
    return {"peak_memory_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def record_memory_history(recipe: Any, step: int) -> None:
    """Starts and ends CUDA's memory history around the profiler's active steps."""
    if recipe._device.type != "cuda" or not getattr(recipe, "profiler_profile_memory", False):
        return
    if hasattr(recipe, "profiler_wait_steps"):
        first = recipe.profiler_wait_steps + recipe.profiler_warmup_steps
        if step == first:
            torch.cuda.memory._record_memory_history()
        elif step == first + recipe.profiler_active_steps:
            torch.cuda.memory._record_memory_history(enabled=None)
