"""Work of an evaluation shared out over the ranks of a process group.

Every rank knows all requests and takes its share of them; results are gathered to all ranks.
lm-eval could share out documents itself, but then draws few-shot examples anew on each rank, so
that results would depend on the number of ranks. The cost: every rank builds all prompts (not
their tokens).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hestia_tune.config import one_line

T = TypeVar("T")

_KINDS = {
    kind.__name__: kind
    for kind in (ValueError, TypeError, FloatingPointError, ConnectionError, FileNotFoundError)
}


def rank_and_world_size() -> tuple[int, int]:
    """Those of the default process group; (0, 1) if there is none."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def is_sharded(model: nn.Module) -> bool:
    """Whether a forward of the model is collective, so that all ranks must do the same ones."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def my_share(groups: Sequence[T], size: Callable[[T], int], shared: bool) -> list[T]:
    """This rank's part of ``groups``: largest first, dealt out in turn; all if not ``shared``."""
    ordered = sorted(groups, key=lambda group: -size(group))
    rank, world_size = rank_and_world_size() if shared else (0, 1)
    return ordered[rank::world_size]


def gather_from_ranks(function: Callable[[], Any], shared: bool) -> list[Any]:
    """Runs ``function`` on every rank; all ranks get the results of all, in order of rank.

    An error on one rank is raised on every rank, so that none waits for it in vain. Collective
    if ``shared``; otherwise only this rank's result is returned.
    """
    rank, world_size = rank_and_world_size() if shared else (0, 1)
    if world_size == 1:
        return [function()]
    result, failure, own = None, None, None
    try:
        result = function()
    except Exception as error:
        own, failure = error, (type(error).__name__, f"rank {rank}: {one_line(error)}")
    outcomes: list = [None] * world_size
    dist.all_gather_object(outcomes, (result, failure))
    if own is not None:
        raise own
    for _, other in outcomes:
        if other is not None:
            raise _KINDS.get(other[0], RuntimeError)(other[1])
    return [outcome for outcome, _ in outcomes]
