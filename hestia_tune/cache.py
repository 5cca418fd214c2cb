"""Recognise results of earlier runs: one rule for all results that are kept between runs.

Each result has a JSON file with an *identity*: everything that the result depends on. `kept`
compares this identity with the identity of the present run. If both are equal, the run uses the
result again. If not, the run computes the result again or stops with an error. Files appear whole
(`hestia_tune.files.staged`), so a result that exists is complete.

The sensitivity, the reconstruction, token files, generated text and the evaluation use this file.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hestia_tune.errors import InputError
from hestia_tune.files import read_json


def digest(value: Any) -> str:
    """Return a short digest of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def differences(identity: Mapping[str, Any], saved: Any, prefix: str = "") -> list[str]:
    """Return the keys of ``identity`` whose values differ from the values in ``saved``.

    Args:
        identity: The identity of the present run.
        saved: The identity in a file. Keys that only this identity has do not count.
        prefix: The start of every returned key. Nested keys are joined by dots.
    """
    odd = []
    for key, value in identity.items():
        other = saved.get(key, ...) if isinstance(saved, Mapping) else ...
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            odd += differences(value, other, f"{prefix}{key}.")
        elif value != other:
            odd.append(f"{prefix}{key}")
    return odd


def kept(
    file: Path, identity: Mapping[str, Any], *, overwrite: bool = False, remedy: str = ""
) -> dict[str, Any] | None:
    """Return the content of a JSON file if it has this identity, or None to compute the result.

    Args:
        file: The file. It need not exist.
        identity: Everything that the result depends on, as plain values.
        overwrite: Whether the caller may replace another result or a damaged file.
        remedy: The end of the error message, for a file that may not be replaced.

    Raises:
        InputError: If the file holds another result or is damaged, and may not be replaced.
    """
    if not file.is_file():
        return None
    try:
        saved = read_json(file)
        if not (odd := differences(identity, saved)):
            return saved
        fault = f"{file}: it was made with another {odd[0]}"
    except InputError as error:
        fault = str(error)
    if overwrite:
        return None
    raise InputError(f"{fault}; {remedy}")
