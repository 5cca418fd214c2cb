"""Helpers for the processes of a run: process group, shared errors, graceful stop, sums.

A function marked "Collective" must be called on every rank.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tqdm import tqdm

from hestia_tune.errors import InputError

T = TypeVar("T")
# A closed terminal sends SIGHUP. torchrun passes all of these signals on to its processes.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ensure_process_group(device: torch.device) -> None:
    """Form the process group if there is none. Without torchrun, it has one process.

    A rank waits for another one for at most a day, or for ``HESTIA_TIMEOUT_MINUTES`` of the
    environment. Torch's own limits, 30 minutes on the CPU and 10 on GPUs, are too short. The first
    rank reads and writes whole models alone, and one rank may have a batch more to measure.

    Raises:
        InputError: If ``HESTIA_TIMEOUT_MINUTES`` is no number above 0.
    """
    if dist.is_initialized():
        return
    given = os.environ.get("HESTIA_TIMEOUT_MINUTES", "1440")
    try:
        options: dict[str, Any] = {"timeout": timedelta(minutes=float(given))}
    except (ValueError, OverflowError):
        options = {}
    if not options or options["timeout"] <= timedelta(0):
        raise InputError(
            f"HESTIA_TIMEOUT_MINUTES must be a number of minutes above 0; got {given}; unset it "
            "for a limit of a day"
        )
    if "RANK" not in os.environ:  # without torchrun: open no port, set no variable
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    backend = "gloo" if device.type == "cpu" else "cuda:nccl,cpu:gloo"
    dist.init_process_group(backend, **options)


def end_process_group() -> None:
    """End the process group after every rank has reached this call."""
    dist.barrier()
    dist.destroy_process_group()


def gathered(value: T) -> list[T]:
    """Return the value from every rank, in the order of the ranks. Collective.

    Args:
        value: A value of this rank that pickle can handle.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def summed(value: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over the ranks, in place, and return it. Collective."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value)
    return value


@contextmanager
def of_all_ranks() -> Iterator[None]:
    """Mark an error of the body as an error of every rank. The launcher then prints it once."""
    try:
        yield
    except Exception as error:
        error.on_every_rank = True  # pyright: ignore[reportAttributeAccessIssue]
        raise


def raise_together(error: Exception | None) -> None:
    """Raise an error on every rank if any rank has an error. Collective.

    A rank with an error raises its own error. The other ranks raise the error of the first rank
    that failed. Their error has the same type, and the traceback of that rank as its cause. Without
    an error this costs one reduction of one number.

    Args:
        error: The error of this rank, or None.
    """
    failed = torch.tensor(float(error is not None))
    if dist.get_world_size() > 1:
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if not failed:
        return
    text = "".join(traceback.format_exception(error)) if error else ""
    failures = gathered(error and (type(error), str(error), text))
    if error is None:
        rank, (kind, message, text) = next((r, e) for r, e in enumerate(failures) if e)
        try:
            error = kind(message)
        except TypeError:  # the type takes other arguments than one message
            error = RuntimeError(f"{kind.__name__}: {message}")
        error.__cause__ = RuntimeError(f"on rank {rank}:\n{text}")
    with of_all_ranks():
        raise error


@contextmanager
def together() -> Iterator[None]:
    """Pass an error of the body to `raise_together`. Collective at the end of the body."""
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    raise_together(error)


def on_first_rank(function: Callable[..., T], *arguments: Any, share: bool = True) -> T | None:
    """Run a function on the first rank only, and raise its error on every rank. Collective.

    Args:
        function: The function to run.
        arguments: The positional arguments of the function.
        share: Whether the other ranks receive the result too, which pickle must be able to handle.
            Without it they receive None.
    """
    outcome: list[Any] = [None]
    with together():
        if dist.get_rank() == 0:
            outcome[0] = function(*arguments)
    if share:
        dist.broadcast_object_list(outcome, src=0)
    return outcome[0]


def require_one_process(command: str) -> None:
    """Raise InputError if torchrun has started several processes of a command that is for one."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1":
        raise InputError(
            f"hestia_{command} runs in one process, not in {ranks}; run hestia {command} CONFIG"
        )


def progress_bar(
    iterable: Iterable | None = None, *, disable: bool = False, **options: Any
) -> tqdm:
    """Return a progress bar that only the first rank shows.

    In a terminal the bar moves ten times a second. In a log file it writes a line every 10 seconds.
    """
    pause = 0.1 if sys.stderr.isatty() else 10
    disable = disable or (dist.is_initialized() and dist.get_rank() != 0)
    options = {"mininterval": pause, "maxinterval": 10, "dynamic_ncols": True} | options
    return tqdm(iterable, disable=disable, **options)


class StopRequest:
    """A request to save and stop, made by Ctrl-C, SIGTERM or SIGHUP.

    A second Ctrl-C interrupts at once. Under nohup, SIGHUP has no effect. If torchrun was killed,
    its ranks see a request too.
    """

    def __init__(self):
        self._signalled = False
        self._parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    @property
    def requested(self) -> bool:
        """Whether the run should save and stop."""
        return self._signalled or self._parent not in (None, os.getppid())

    def _handle(self, signum, frame):
        if self._signalled and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if not self._signalled and os.environ.get("RANK", "0") == "0":
            text = b"\nsaving and stopping after this step; Ctrl-C again stops at once\n"
            with suppress(OSError):  # the terminal may be closed
                os.write(2, text)  # `print` may not be called again within itself
        self._signalled = True

    @contextmanager
    def installed(self) -> Iterator["StopRequest"]:
        """Install the signal handlers within this context."""
        signals = {*STOP_SIGNALS}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup has set this
            signals.remove(signal.SIGHUP)
        before = {number: signal.signal(number, self._handle) for number in signals}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def totals_over_ranks(values: Sequence[torch.Tensor | float], device: torch.device) -> torch.Tensor:
    """Return the sums of scalars over all ranks in float64, on the device. Collective.

    It costs one collective. The host does not wait for a GPU.

    Args:
        values: Scalars of this rank, as many as on every other rank. Tensors on the
            device are not copied.
        device: Device of the collective.
    """
    totals = torch.zeros(len(values), dtype=torch.float64, device=device)
    for total, value in zip(totals, values, strict=True):
        total.fill_(value)  # An assignment would copy a number to a GPU, and wait for it.
    return summed(totals)
