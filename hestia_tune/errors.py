"""Define the errors that a user can correct, and how a command prints an error on one line.

The checks of this package raise `InputError`. A command prints an InputError as one line. Every
other error is a mistake in the code, here or in a library, and keeps its traceback.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

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
