"""What a run says of itself: log, codes, memory, and whether its weights are finite."""

import contextlib
import json
import math
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torchtune import training

from hestia_tune.data import DataStreamError
from hestia_tune.distributed import of_all_ranks
from hestia_tune.errors import NotFiniteError
from hestia_tune.files import write_atomically
from hestia_tune.qat.linear import QuantizedLinear, clean_fqn, local_rows


class StepResult(NamedTuple):
    """What an optimizer step says of itself."""

    loss: float  # mean over the predicted tokens of all ranks and micro-batches, in nats
    num_tokens: int  # of all ranks
    grad_norm: float | None  # before clipping; None if gradients are not clipped
    stop_requested: bool  # of some rank


class History:
    """Rows in ``metrics.jsonl``, kept across resumes: rows after ``resume_step`` are dropped, since
    they will be made again; 0 starts anew."""

    def __init__(self, path: Path, resume_step: int = 0):
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if resume_step and path.is_file():
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                # A line that a kill cut off, or that is damaged, is left out.
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    row = json.loads(line)
                    if row["step"] <= resume_step:
                        self.rows.append(row)
        write_atomically(path, "".join(f"{json.dumps(row)}\n" for row in self.rows))

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a row; it must have ``step``."""
        self.rows.append(dict(row))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(self.rows[-1])}\n")

    def at(self, step: int) -> dict[str, Any]:
        """All that was logged after a step."""
        return {key: row[key] for row in self.rows if row["step"] == step for key in row}


class CodeStatistics:
    """What the codes are doing: flips since the last call, zeros, error.

    Gathering whole weights costs one all-gather of the model, as a forward does, and is done only
    when a step is logged. Layer i is the business of rank i modulo the number of ranks, so memory
    for the codes to compare with (int8, one byte a weight) and work are shared out evenly.
    ``layers`` are the same on every rank, ``device`` is that of the collectives.
    """

    def __init__(self, layers: dict[str, QuantizedLinear], device: torch.device):
        self._layers, self._device = layers, device
        self._previous: dict[str, torch.Tensor] = {}
        self._is_first_call = True
        self._has_zero = all(layer.method.has_zero for layer in layers.values())

    @torch.no_grad()
    def update(self) -> dict[str, float]:
        """``flip_rate`` since the last call, ``zero_fraction`` (if the codes have a zero),
        ``quantization_error``.

        The error is ||W - Q(W)||^2 / ||W||^2 over all layers. The first call, having nothing to
        compare with, returns no flip rate. Collective.
        """
        counts = torch.zeros(5, dtype=torch.float64, device=self._device)
        for index, (name, layer) in enumerate(self._layers.items()):
            weight, parameters = layer.whole_latents()
            if index % dist.get_world_size() != dist.get_rank():
                continue
            codes, _ = layer.method.codes(weight, parameters)
            error = weight - layer.method.hard(weight, parameters)
            flips = (codes != self._previous.get(name, codes)).sum()
            zeros = (codes == 0).sum()
            squares = (x.float().square().sum(dtype=torch.float64) for x in (error, weight))
            row = [flips, zeros, torch.tensor(codes.numel()), *squares]
            counts += torch.stack([value.double().to(self._device) for value in row])
            self._previous[name] = codes
        dist.all_reduce(counts)
        flips, zeros, total, error, norm = counts.tolist()
        statistics = {"quantization_error": error / max(norm, 1e-300)}
        if self._has_zero:
            statistics["zero_fraction"] = zeros / total
        if not self._is_first_call:
            statistics = {"flip_rate": flips / total} | statistics
        self._is_first_call = False
        return statistics


@of_all_ranks()
@torch.no_grad()
def check_finite(model: nn.Module, device: torch.device, step: int) -> None:
    """Raise NotFiniteError that names the parameters with NaN or infinity. Collective."""
    named = dict(model.named_parameters())
    flags = [(~local_rows(value).isfinite()).any().to(device) for value in named.values()]
    bad = torch.stack(flags).to(torch.int32)
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    found = [clean_fqn(name) for name, flag in zip(named, bad.tolist(), strict=True) if flag]
    if found:
        raise NotFiniteError(
            f"NaN or infinity in the weights after step {step}: {', '.join(found[:3])}"
            f"{' ...' if len(found) > 3 else ''}; start anew with a lower learning rate "
            "or clip_grad_norm"
        )


@of_all_ranks()
def check_loss(
    loss_sum: float, num_tokens: float, model: nn.Module, device: torch.device, step: int
) -> None:
    """Stops before a bad gradient reaches the weights: a DataStreamError without a token, a
    NotFiniteError if the loss is not finite, which names the parameters that are not, if any.
    Collective if the loss is not finite."""
    if num_tokens == 0:
        raise DataStreamError(
            f"the batches of step {step + 1} have no token to predict; check dataset"
        )
    if not math.isfinite(loss_sum):
        check_finite(model, device, step)
        raise NotFiniteError(
            f"the loss of step {step + 1} is {loss_sum} though all weights are finite; look at "
            "the data, or start anew with a lower learning rate"
        )


@of_all_ranks()
def check_gradient(norm: float | None, step: int) -> None:
    """A NotFiniteError if the norm of the gradient, where it is known, is not finite."""
    if norm is not None and not math.isfinite(norm):
        raise NotFiniteError(
            f"the gradient of step {step + 1} is not finite though its loss is; start anew with a "
            "lower learning rate"
        )


def memory_metrics(device: torch.device, peak_of_device: bool) -> dict[str, float]:
    """torchtune's peak statistics of the device, or this process's peak resident set."""
    if peak_of_device:
        return training.get_memory_stats(device=device)
    return {"peak_memory_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def record_memory_history(recipe: Any, step: int) -> None:
    """Starts and ends CUDA's memory history around the profiler's active steps."""
    enabled = hasattr(recipe, "profiler_wait_steps") and recipe.profiler_profile_memory
    if recipe._device.type != "cuda" or not enabled:
        return
    first = recipe.profiler_wait_steps + recipe.profiler_warmup_steps
    if step == first:
        torch.cuda.memory._record_memory_history()
    elif step == first + recipe.profiler_active_steps:
        torch.cuda.memory._record_memory_history(enabled=None)
