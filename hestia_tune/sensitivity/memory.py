"""What an estimation will need, found by running one block and the head on the meta device.

There, tensors have shapes and no data, so it takes no time and counts just what autograd would
keep. Allocator overhead and short-lived temporaries are not in it: a guide, some 20% low.
"""

from collections.abc import Callable

import torch
from torch import nn

from hestia_tune.sections import EstimationConfig
from hestia_tune.sensitivity.curvature import SegmentRun
from hestia_tune.sensitivity.estimation import DIRECTIONS_PER_WALK
from hestia_tune.sensitivity.segments import CalibrationBatch, Segment, cut, logits_of, mean_loss


def saved_bytes(function: Callable[[], object]) -> int:
    """Bytes of all storages that autograd keeps while ``function``'s result is alive."""
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(storage.nbytes() for storage in kept.values())


def graph_bytes(segment: Segment, hidden: torch.Tensor) -> int:
    """What is kept of a segment to differentiate it twice."""
    with torch.no_grad():
        delta = torch.ones_like(segment.forward(hidden))

    def differentiated() -> SegmentRun:
        run = SegmentRun(segment, hidden, delta, segment.weights)
        run.differentiate(with_hidden=hidden.is_floating_point())
        return run

    return saved_bytes(differentiated)


def estimation_memory(
    model: nn.Module, names: list[str], batch: CalibrationBatch, settings: EstimationConfig
) -> dict[str, int]:
    """Bytes on the device, by part: model, graph, hidden states, directions, sketch.

    Args:
        model: a copy on the meta device, in the dtype of the estimation.
        names: fully qualified names of the layers to measure.
        batch: one calibration batch (only its shapes matter).
        settings: of the estimation.
    """
    batch = batch.to("meta")
    weights = {name: model.get_submodule(name).weight for name in names}
    parts = {"model": sum(p.nbytes for p in model.parameters())}
    if settings.curvature == "fisher":
        graph = saved_bytes(lambda: mean_loss(logits_of(model, batch), batch.labels))
        return parts | {"graph": graph, "gradients": sum(w.nbytes for w in weights.values())}
    hidden, segments = cut(model, weights, batch)
    state = hidden.nbytes if hidden.is_floating_point() else 0
    graph = max(graph_bytes(segments[k], hidden) for k in {0, len(segments) - 1})
    largest = max(w.nbytes for w in weights.values())
    return parts | {
        "graph": graph * settings.vectors_at_once,
        "hidden states": 2 * len(segments) * state,
        "directions": 2 * DIRECTIONS_PER_WALK * state + 2 * largest,
        "sketch": 3 * settings.rank * largest if settings.fixed else 0,
    }
