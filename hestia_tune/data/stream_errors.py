"""Errors of a data stream, and waiting out a source that does not answer.

A stream of days meets timeouts and restarts of a server: such errors are tried again with doubling
waits (1, 2, 4, ... seconds, at most a minute each). An error that another try cannot mend (a
missing file, no access, corrupt data) is raised at once.
"""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from hestia_tune.config import one_line

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Network libraries under fsspec and huggingface_hub; their errors share no base class.
_NETWORK_MODULES = {"aiohttp", "httpcore", "httpx", "huggingface_hub", "requests", "urllib3"}
_LONGEST_WAIT = 60.0


class DataStreamError(RuntimeError):
    """The stream met data that it cannot read; the message names the file and, if any, the line.

    It may come days into a run: the caller should save a checkpoint before it passes the error on.
    """


class MissingColumnError(DataStreamError, ValueError):
    """A file does not have the column that holds the text; the message lists those it has."""


class DataConnectionError(DataStreamError, ConnectionError):
    """The source did not answer, however often it was asked."""


def is_transient(error: BaseException) -> bool:
    """Whether trying again may help: network errors, save for refusals (HTTP 4xx)."""
    if isinstance(error, DataConnectionError) or type(error).__name__ == "OfflineModeIsEnabled":
        return False
    status = getattr(getattr(error, "response", None), "status_code", None)
    status = getattr(error, "status", None) if status is None else status
    if isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429):
        return False
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        # What fsspec makes of a server that cannot be connected to.
        return is_transient(error.__cause__)
    if isinstance(error, FileNotFoundError | PermissionError):
        return False
    return isinstance(error, ConnectionError | TimeoutError) or (
        type(error).__module__.partition(".")[0] in _NETWORK_MODULES
    )


class Backoff:
    """Counts failures in a row and waits between them.

    Args:
        what: the file or dataset, for messages.
        max_retries: tries after the first; 0 fails at once.
    """

    def __init__(self, what: str, max_retries: int):
        self.what = what
        self.max_retries = max_retries
        self.failures = 0

    def succeeded(self) -> None:
        self.failures = 0

    def failed(self, error: Exception) -> None:
        """Waits, or raises DataConnectionError once the retries are used up."""
        if self.failures >= self.max_retries:
            raise DataConnectionError(
                f"{self.what} did not answer in {self.failures + 1} tries: {one_line(error)}; "
                "check the network and the server, then resume"
            ) from error
        wait = min(2.0**self.failures, _LONGEST_WAIT)
        self.failures += 1
        logger.warning(
            "%s: %s; trying again in %.0f s (%d of %d)",
            self.what,
            one_line(error),
            wait,
            self.failures,
            self.max_retries,
        )
        time.sleep(wait)


def retried(call: Callable[[], T], what: str, max_retries: int) -> T:
    """``call()``, again after transient errors.

    Raises:
        DataConnectionError: after ``max_retries`` further tries.
    """
    backoff = Backoff(what, max_retries)
    while True:
        try:
            return call()
        except Exception as error:  # the network libraries' errors share no base class
            if not is_transient(error):
                raise
            backoff.failed(error)
