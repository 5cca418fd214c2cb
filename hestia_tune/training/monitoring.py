"""Monitor a run: its log, its codes, its memory, and whether its numbers are finite."""

import json
import math
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from hestia_tune.data import DataStreamError
from hestia_tune.devices import peak_memory
from hestia_tune.distributed import of_all_ranks
from hestia_tune.errors import NotFiniteError
from hestia_tune.files import read_json_lines, write_atomically
from hestia_tune.qat.linear import QuantizedLayer, clean_fqn, local_rows


class StepResult(NamedTuple):
    """Result of an optimizer step.

    Attributes:
        loss: Mean loss over the predicted tokens on every rank, in nats.
        num_tokens: Number of predicted tokens, summed over all ranks.
        grad_norm: Norm of the gradient before clipping. None if gradients are not clipped.
        stop_requested: Whether any rank was asked to stop.
    """

    loss: float
    num_tokens: int
    grad_norm: float | None
    stop_requested: bool


class History:
    """Rows of ``metrics.jsonl``, which a resumed run continues.

    Args:
        path: The file. It is written again without damaged lines.
        resume_step: Number of finished steps. Later rows are dropped, because the run will log
            these steps again. 0 starts an empty history.
    """

    def __init__(self, path: Path, resume_step: int = 0):
        self.path, self.rows = path, []
        if resume_step and path.is_file():
            rows = [row for row in read_json_lines(path) if isinstance(row, dict)]
            steps = range(resume_step + 1)
            self.rows = [row for row in rows if row.get("step") in steps]
        write_atomically(path, "".join(f"{json.dumps(row)}\n" for row in self.rows))

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row, which must have the key ``step``."""
        self.rows.append(dict(row))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(self.rows[-1])}\n")

    def at(self, step: int) -> dict[str, Any]:
        """Return all metrics that were logged after a step."""
        return {key: row[key] for row in self.rows if row["step"] == step for key in row}


class CodeStatistics:
    """Statistics of the codes: flips since the last call, share of zeros, quantization error.

    The statistics need whole weights. Gathering them costs one all-gather of the model, like a
    forward, so it happens only when a step is logged. Rank i modulo the number of ranks handles
    layer i. This shares the work, and the memory for the previous codes (int8, one byte per
    weight).

    Args:
        layers: Name -> quantized linear, the same on every rank.
    """

    def __init__(self, layers: dict[str, QuantizedLayer]):
        self._layers = layers
        self._previous: dict[str, torch.Tensor] = {}
        self._is_first_call = True
        self._with_zero = sum(
            layer.weight.numel() for layer in layers.values() if layer.method.has_zero
        )

    @torch.no_grad()
    def update(self) -> dict[str, float]:
        """Return the statistics of the present codes. Collective.

        The host waits for a GPU once, at the end.

        Returns:
            ``flip_rate``, the share of codes that changed since the last call. The first call does
            not return it. ``zero_fraction``, the share of zeros in the layers whose codes have a
            zero, if there are any.
            ``quantization_error``, which is ||W - Q(W)||² / ||W||² over all layers.
        """
        weights = [layer.weight for layer in self._layers.values()]
        total = sum(weight.numel() for weight in weights)
        counts = torch.zeros(4, dtype=torch.float64, device=weights[0].device)
        for index, (name, layer) in enumerate(self._layers.items()):
            weight, parameters = layer.whole_latents()
            if index % dist.get_world_size() != dist.get_rank():
                continue
            codes, _ = layer.method.codes(weight, parameters)
            error = weight - layer.method.hard(weight, parameters)
            flips = (codes != self._previous.get(name, codes)).sum()
            zeros = (codes == 0).sum() * layer.method.has_zero
            squares = (x.float().square().sum(dtype=torch.float64) for x in (error, weight))
            counts += torch.stack([value.double() for value in (flips, zeros, *squares)])
            self._previous[name] = codes
        dist.all_reduce(counts)
        flips, zeros, error, norm = counts.tolist()
        statistics = {"quantization_error": error / max(norm, 1e-300)}
        if self._with_zero:
            statistics["zero_fraction"] = zeros / self._with_zero
        if not self._is_first_call:
            statistics = {"flip_rate": flips / total} | statistics
        self._is_first_call = False
        return statistics


@of_all_ranks()
@torch.no_grad()
def check_finite(model: nn.Module, device: torch.device, step: int) -> None:
    """Raise NotFiniteError on every rank if a parameter has NaN or infinity. Collective."""
    named = dict(model.named_parameters())
    flags = [(~local_rows(value).isfinite()).any().to(device) for value in named.values()]
    bad = torch.stack(flags).to(torch.int32)
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    names = [clean_fqn(name) for name, flag in zip(named, bad.tolist(), strict=True) if flag]
    if names:
        raise NotFiniteError(
            f"NaN or infinity in the weights after step {step}: {', '.join(names[:3])}"
            f"{' ...' if len(names) > 3 else ''}; start again with a lower learning rate "
            "or a smaller clip_grad_norm"
        )


@of_all_ranks()
def check_step(
    loss_sum: float,
    num_tokens: float,
    norm: float | None,
    model: nn.Module,
    device: torch.device,
    step: int,
) -> None:
    """Raise an error before a bad gradient can reach the weights.

    Collective if the loss is not finite.

    Args:
        loss_sum: Sum of the loss over the predicted tokens on every rank.
        num_tokens: Number of these tokens.
        norm: Norm of the gradient, if it is known.
        model: The model. If the loss is not finite, its parameters are checked too.
        device: Device of the collectives.
        step: Number of finished steps.

    Raises:
        DataStreamError: If the batches have no token to predict.
        NotFiniteError: If the loss or the norm is not finite. For a loss, the message names
            parameters that are not finite.
    """
    if num_tokens == 0:
        raise DataStreamError(
            f"the batches of step {step + 1} have no token to predict; check dataset"
        )
    if not math.isfinite(loss_sum):
        check_finite(model, device, step)
        raise NotFiniteError(
            f"the loss of step {step + 1} is {loss_sum} though all weights are finite; look at "
            "the data, or start again with a lower learning rate"
        )
    if norm is not None and not math.isfinite(norm):
        raise NotFiniteError(
            f"the gradient of step {step + 1} is not finite though the loss is finite; start again "
            "with a lower learning rate"
        )


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return the peaks of a GPU's memory, or of the process's resident set, in GiB."""
    if device.type == "cuda":
        return peak_memory(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux KiB
    return {"peak_memory_rss_gib": peak * unit / 2**30}


def record_memory_history(recipe: Any, step: int) -> None:
    """Start and end CUDA's memory history around the profiler's active steps."""
    enabled = hasattr(recipe, "profiler_wait_steps") and recipe.profiler_profile_memory
    if recipe._device.type != "cuda" or not enabled:
        return
    first = recipe.profiler_wait_steps + recipe.profiler_warmup_steps
    if step == first:
        torch.cuda.memory._record_memory_history()
    elif step == first + recipe.profiler_active_steps:
        torch.cuda.memory._record_memory_history(enabled=None)
