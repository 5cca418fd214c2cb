"""The errors that a user can correct, and how a command prints an error on one line.

The checks of this package raise `InputError`. A command prints an InputError as one line. Every
other error is a mistake in the code, here or in a library, and keeps its traceback.
"""

import functools
import logging

log = logging.getLogger(__name__)


class InputError(ValueError):
    """An option, a file, a device or data of the user that cannot be used.

    The message says what is wrong, what was expected and what to do.
    """


class InputTypeError(InputError, TypeError):
    """A value of the wrong type."""


class NotFiniteError(InputError, FloatingPointError):
    """NaN or infinity in a loss, a gradient, a weight or a model's logits."""


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return an error's message on one line of at most ``limit`` characters.

    An error without a message gives the name of its type.
    """
    return " ".join(str(error).split())[:limit] or type(error).__name__


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, but only once per process."""
    log.warning(text)
