"""What a run needs of its processes: a group of one, shared errors, a soft stop, sums."""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tqdm import tqdm

T = TypeVar("T")
# SIGHUP is that of a terminal that is gone; torchrun hands all of them on.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ensure_process_group(device: torch.device) -> None:
    """Forms the process group, of one if there is no torchrun; one that is there is kept."""
    if dist.is_initialized():
        return
    one = {}
    if "RANK" not in os.environ:  # no torchrun: no port is opened, no variable set
        one = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    backend = "gloo" if device.type == "cpu" else "cuda:nccl,cpu:gloo"
    dist.init_process_group(backend, **one)


def end_process_group() -> None:
    """Ends the group once every rank is here."""
    dist.barrier()
    dist.destroy_process_group()


def gathered(value: T) -> list[T]:
    """``value`` (picklable) of every rank, in their order. Collective, in a group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


@contextmanager
def of_all_ranks() -> Iterator[None]:
    """What the body raises, every rank does: it is marked for the launcher, which tells it once."""
    try:
        yield
    except Exception as error:
        error.on_every_rank = True  # pyright: ignore[reportAttributeAccessIssue]
        raise


def raise_together(error: Exception | None) -> None:
    """Raises on every rank if any rank brings an error: its own, or that of the first that has one.

    The type is kept, and the traceback of the rank that failed comes along as the cause.
    Collective; costs one reduction of one number unless there is an error.
    """
    failed = torch.tensor(float(error is not None))
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if not failed:
        return
    text = "".join(traceback.format_exception(error)) if error else ""
    everyone = gathered(error and (type(error), str(error), text))
    raised = error
    if raised is None:
        rank, (kind, message, text) = next((r, e) for r, e in enumerate(everyone) if e)
        try:
            raised = kind(message)
        except TypeError:  # a type that is not made from a message
            raised = RuntimeError(f"{kind.__name__}: {message}")
        raised.__cause__ = RuntimeError(f"on rank {rank}:\n{text}")
    with of_all_ranks():
        raise raised


@contextmanager
def together() -> Iterator[None]:
    """`raise_together` of what goes wrong in the body. Collective at its end."""
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    raise_together(error)


def on_first_rank(function: Callable[[], T], *, share: bool = True) -> T | None:
    """Runs ``function`` on rank 0 alone; an error there is raised on every rank. Collective.

    The other ranks get its result too (it must be picklable), or None without ``share``.
    """
    outcome: list[Any] = [None]
    with together():
        if dist.get_rank() == 0:
            outcome[0] = function()
    if share:
        dist.broadcast_object_list(outcome, src=0)
    return outcome[0]


def progress_bar(
    iterable: Iterable | None = None, *, disable: bool = False, **options: Any
) -> tqdm:
    """A bar of the first rank; where nobody looks on, a line every ten seconds."""
    pause = 0.1 if sys.stderr.isatty() else 10
    disable = disable or (dist.is_initialized() and dist.get_rank() != 0)
    return tqdm(iterable, disable=disable, mininterval=pause, maxinterval=10, **options)


class StopRequest:
    """Turns the first Ctrl-C (or SIGTERM, or SIGHUP unless nohup has it ignored) into a request; a
    second Ctrl-C interrupts at once.

    A rank whose torchrun was killed is asked to stop, too.
    """

    def __init__(self):
        self._signalled = False
        self._parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    @property
    def requested(self) -> bool:
        """Whether to save and stop."""
        return self._signalled or self._parent not in (None, os.getppid())

    def _handle(self, signum, frame):
        if self._signalled and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self._signalled = True

    @contextmanager
    def installed(self) -> Iterator["StopRequest"]:
        """The handlers are in place inside this context only."""
        signals = [*STOP_SIGNALS]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # by nohup
            signals.remove(signal.SIGHUP)
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
