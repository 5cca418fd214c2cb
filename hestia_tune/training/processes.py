"""What a run needs of its processes: a group of one, shared errors, a soft stop, sums."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def ensure_process_environment() -> None:
    """Makes a plain process a group of one, so that ``init_process_group`` needs no torchrun."""
    if "RANK" not in os.environ:
        # The store of a group of one picks a free port by itself when asked for port 0.
        single = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 0}
        os.environ.update({key: str(value) for key, value in single.items()})
        os.environ["MASTER_ADDR"] = "127.0.0.1"


def on_first_rank(function: Callable[[], T], *, share: bool = True) -> T | None:
    """Runs ``function`` on rank 0 alone; an error there is raised on every rank.

    Args:
        function: what to run.
        share: give the result to every rank (it must be picklable); otherwise the other ranks
            get None.
    """
    outcome: list = [None, None]
    result = None
    if dist.get_rank() == 0:
        try:
            result = function()
            outcome[0] = result if share else None
        except Exception as error:
            outcome[1] = (type(error), str(error))
            if dist.get_world_size() == 1:
                raise
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        kind, text = outcome[1]
        known = kind if kind in (ValueError, TypeError, FileNotFoundError) else ValueError
        error = known(text)
        error.on_every_rank = True  # one line from rank 0 tells it
        raise error
    return outcome[0] if share else result


class StopRequest:
    """Turns the first Ctrl-C (or SIGTERM) into a request; a second Ctrl-C interrupts at once."""

    def __init__(self):
        self.requested = False

    def _handle(self, signum, frame):
        if self.requested and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

    @contextmanager
    def installed(self) -> Iterator["StopRequest"]:
        """The handlers are in place inside this context only."""
        signals = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, self._handle) for number in signals]
        try:
            yield self
        finally:
            for number, handler in zip(signals, before, strict=True):
                signal.signal(number, handler)


def sum_over_ranks(values: list[torch.Tensor | float], device: torch.device) -> list[float]:
    """Sums scalars over all ranks in float64, in one collective and one transfer to the host."""
    row = [torch.as_tensor(v, dtype=torch.float64, device=device) for v in values]
    total = torch.stack(row)
    dist.all_reduce(total)
    return total.tolist()
