"""The one place that knows how to ask for packages that are not always installed."""

import importlib
from types import ModuleType


def lm_eval_installed() -> ModuleType:
    """The ``lm_eval`` package.

    Raises:
        ImportError: with the command that installs it.
    """
    try:
        return importlib.import_module("lm_eval")
    except ImportError as error:
        raise ImportError(
            "evaluation on tasks needs lm-evaluation-harness; pip install 'hestia-tune[eval]' "
            f"({error})"
        ) from error
