"""Makes the components that a YAML file names by ``_component_``.

torchtune is an extra: its recipe trains, and a config may name its builders, tokenizers, datasets,
losses and loggers. All code of this package that imports it is in `hestia_tune.torchtune`. Nothing
imports that folder when it is imported itself; `torchtune_module` imports a part of it when a
config needs it, and says what to install if it cannot.
"""

import copy
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from hestia_tune.errors import InputError, nearest, one_line

INSTALL_TORCHTUNE = "pip install 'hestia-tune[torchtune]'"
# Components of torchtune -> ours with the same results, for an environment without torchtune.
_EQUALS = {
    "torchtune.modules.loss.CEWithChunkedOutputLoss": "hestia_tune.losses.CEWithChunkedOutputLoss",
}


@functools.cache
def has_torchtune() -> bool:
    """Return whether torchtune can be imported, with the torchao that it needs."""
    try:
        # torchao 0.16 and later lack what this module imports.
        importlib.import_module("torchtune.training.quantization")
    except ImportError:
        return False
    return True


def torchtune_module(name: str, needed_by: str) -> Any:
    """Import a module of `hestia_tune.torchtune`.

    Args:
        name: Name of the module in that folder.
        needed_by: What needs torchtune, for the error.

    Raises:
        InputError: If torchtune cannot be imported. The message has the command that installs it.
    """
    try:
        return importlib.import_module(f"hestia_tune.torchtune.{name}")
    except ImportError as error:
        raise needs_torchtune(needed_by, error) from error


def needs_torchtune(needed_by: str, error: BaseException) -> InputError:
    """Return the error for something that needs torchtune where it cannot be imported."""
    return InputError(
        f"{needed_by} needs torchtune and torchao 0.15; run {INSTALL_TORCHTUNE} ({one_line(error)})"
    )


def find_component(name: Any, key: str) -> Any:
    """Return the object with a dotted name.

    Args:
        name: The name, such as "hestia_tune.HestiaQATQuantizer".
        key: The YAML key, for errors.

    Raises:
        InputError: If there is no such object, or if its module cannot be imported.
    """
    try:
        return _find(str(name))
    except InputError as error:
        raise InputError(f"{key}: {error}") from error


def make(section: Mapping, *args: Any, **options: Any) -> Any:
    """Make the component that a YAML section names, and let it raise its own errors.

    Args:
        section: The section, with ``_component_``. The component gets copies of its values.
        args: Positional arguments of the component.
        options: Keyword arguments of the component. They come before the section's own.

    Raises:
        InputError: If the component does not exist.
    """
    given = copy.deepcopy(dict(section))
    if "_component_" not in given:
        raise InputError(f"it needs a _component_, the name of a class or function; got {given}")
    return _find(str(given.pop("_component_")))(*args, **given | options)


def instantiate(section: Mapping | None, key: str, *args: Any, **options: Any) -> Any:
    """Make the component that a YAML section names, or return None for a section of None.

    Args:
        section: The section, with ``_component_``.
        key: The section's name, for errors.
        args: Positional arguments of the component.
        options: Keyword arguments of the component, besides the section's own.

    Raises:
        InputError: If the component does not exist or refuses its options.
    """
    if section is None:
        return None
    try:
        return make(section, *args, **options)
    except (TypeError, ValueError, OSError, ImportError) as error:
        remedy = "" if isinstance(error, InputError) else f"; check its options {dict(section)}"
        if unknown := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
            component = find_component(section["_component_"], key)
            remedy = nearest(unknown[1], inspect.signature(component).parameters) + remedy
        raise InputError(f"{key}: {one_line(error, limit=1000)}{remedy}") from error


def _find(name: str) -> Any:
    """Return the object with a dotted name, from this environment or the working directory."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise InputError(f"{name!r} is no dotted name of a class or function")
    is_torchtunes = parts[0] == "torchtune"
    if is_torchtunes and name in _EQUALS and not has_torchtune():
        return _find(_EQUALS[name])
    if os.getcwd() not in sys.path:  # for components beside the config
        sys.path.append(os.getcwd())
    found: Any = None
    for number, part in enumerate(parts, 1):
        module = ".".join(parts[:number])
        try:
            has_it = number > 1 and hasattr(found, part)
            found = getattr(found, part) if has_it else importlib.import_module(module)
        except InputError:
            raise
        except Exception as error:  # modules run code of any kind
            absent = str(error.name) if isinstance(error, ModuleNotFoundError) else ""
            is_absent = bool(absent) and f"{module}.".startswith(f"{absent}.")
            is_there = absent.startswith("torchtune.")  # torchtune is, but not this part of it
            if is_torchtunes and isinstance(error, ImportError) and not is_there:
                raise needs_torchtune(name, error) from error
            text = f"there is no {name}" if is_absent else f"{module} cannot be imported"
            raise InputError(f"{text}: {one_line(error)}") from error
    return found
