"""Compute once, recognise it later: one rule for everything that is kept between runs.

What is kept is a JSON file, or has one beside it, that holds an *identity*: all that the result
depends on. `kept` compares it with the identity that is wanted now. The result is then used again,
computed again, or refused, never used for something else. Files appear whole
(`hestia_tune.files.staged`), so what is found is finished.

Used by the sensitivity, the reconstruction, token files, generated text and evaluation.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hestia_tune.errors import InputError
from hestia_tune.files import read_json


def digest(value: Any) -> str:
    """Return a short digest of anything that JSON holds."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def differences(identity: Mapping[str, Any], found: Any, prefix: str = "") -> list[str]:
    """Return the keys of ``identity``, nested ones dotted, whose values in ``found`` differ.

    Keys that only ``found`` has do not count.
    """
    odd = []
    for key, value in identity.items():
        other = found.get(key, ...) if isinstance(found, Mapping) else ...
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            odd += differences(value, other, f"{prefix}{key}.")
        elif value != other:
            odd.append(f"{prefix}{key}")
    return odd


def kept(
    file: Path, identity: Mapping[str, Any], *, overwrite: bool = False, remedy: str = ""
) -> dict[str, Any] | None:
    """Return the content of a JSON file if it has this identity; None if it is to be made.

    Args:
        file: The file, which need not exist.
        identity: What the result depends on, as plain values.
        overwrite: Whether another result, or a damaged one, may be replaced.
        remedy: The end of the error, if it may not.

    Raises:
        InputError: If the file holds another result that may not be replaced.
    """
    if not file.is_file():
        return None
    try:
        found = read_json(file)
        odd = differences(identity, found)
        if not odd:
            return found
        fault = f"{file}: it was made with another {odd[0]}"
    except InputError as error:
        fault = str(error)
    if overwrite:
        return None
    raise InputError(f"{fault}; {remedy}")
