"""Errors that a user can correct, and how commands print errors, sizes, times and counts.

The checks of this package raise `InputError`. A command prints an InputError as one line. Every
other error is a mistake in the code, here or in a library, and keeps its traceback.
"""

import difflib
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

log = logging.getLogger(__name__)


class InputError(ValueError):
    """Report an option, a file, a device or data of the user that cannot be used.

    The message says what is wrong, what was expected and what to do.
    """


class InputTypeError(InputError, TypeError):
    """Report a value of the wrong type."""


class InputErrors(InputError):
    """Several errors of the user. The message has one line for each of them."""


class NotFiniteError(InputError, FloatingPointError):
    """NaN or infinity in a loss, a gradient, a weight or a model's logits."""


def nearest(key: str, known: Iterable[str]) -> str:
    """Return '; did you mean X?' if a known name is close to ``key``, or else an empty string."""
    close = difflib.get_close_matches(key, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def require_number(name: str, value: Any, low: float, high: float, remedy: str = "") -> None:
    """Raise InputTypeError unless ``value`` is a number, InputError unless it is in [low, high]."""
    remedy = f"; {remedy}" if remedy else ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputTypeError(f"{name} must be a number; got {value!r}{remedy}")
    if not (low <= value <= high) or math.isinf(value):
        rule = f"at least {low:g}" if math.isinf(high) else f"in [{low:g}, {high:g}]"
        raise InputError(f"{name} must be {rule}; got {value}{remedy}")


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return an error's message on one line of at most ``limit`` characters.

    An error without a message gives the name of its type.
    """
    return " ".join(str(error).split())[:limit] or type(error).__name__


@contextmanager
def collecting() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Run independent checks and raise their errors together.

    The body runs each check in ``with check():``. An InputError ends that check only. A single
    error is raised unchanged at the end of the body.

    Yields:
        The function ``check``.

    Raises:
        InputErrors: If two or more checks have failed.
    """
    found: list[InputError] = []

    @contextmanager
    def check():
        try:
            yield
        except InputError as error:
            found.append(error)

    yield check
    if len(found) == 1:
        raise found[0]
    if found:
        lines = [
            str(error) if isinstance(error, InputErrors) else one_line(error, limit=2000)
            for error in found
        ]
        raise InputErrors("\n".join(dict.fromkeys(lines)))


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, but only once per process."""
    log.warning(text)


@contextmanager
def quiet_loggers(*names: str, level: int = logging.WARNING) -> Iterator[None]:
    """Let some loggers pass messages from a level on only, while the body runs.

    Args:
        names: Names of the loggers, such as "transformers".
        level: The least level of messages that are passed.
    """
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(max(level, logger.level))
    try:
        yield
    finally:
        for logger, old in zip(loggers, before, strict=True):
            logger.setLevel(old)


def size_text(size: float) -> str:
    """Return a number of bytes in the unit that fits, such as "3.1 GB" or "60 MB"."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if size >= 0.9995 * unit:  # 999.9 MB is 1.0 GB
            return f"{_short(size / unit)} {name}"
    return f"{max(1, round(size / 1e3)):d} kB"


def duration_text(seconds: float) -> str:
    """Return a time in the unit that fits, such as "40 minutes" or "3.2 hours"."""
    for unit, name in ((48 * 3600, "days"), (90 * 60, "hours"), (90, "minutes")):
        if seconds >= unit:
            one = {"days": 86400, "hours": 3600, "minutes": 60}[name]
            return f"{_short(seconds / one) if name != 'minutes' else round(seconds / one)} {name}"
    whole = max(1, round(seconds))
    return f"{whole} second{'s' * (whole != 1)}"


def count_text(count: float) -> str:
    """Return a count in the unit that fits, such as "950", "12k", "1.3M" or "2.4B"."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * unit:
            return f"{_short(count / unit)}{name}"
    return f"{count:.0f}"


def _short(number: float) -> str:
    """Return a number from 1 to 1000 with a decimal below 10."""
    return f"{number:.1f}" if number < 9.95 else f"{number:.0f}"
