"""Write files and folders whole or not at all, and recognize the results of earlier runs.

`staged` writes under a temporary name, followed by a rename. So a result that exists is complete.

Each result that is kept between runs has a JSON file with an *identity*: everything that the result
depends on. `kept_result` compares this identity with the identity of the present run. If both are
equal, the run uses the result again. If not, the run computes the result again or stops with an
error. The sensitivity, the reconstruction, token files, generated text and the evaluation use it.
"""

import contextlib
import glob
import hashlib
import json
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hestia_tune.errors import InputError, one_line

try:
    import fcntl
except ImportError as error:
    raise ImportError("hestia_tune runs on Linux and macOS; on Windows, run it in WSL") from error

log = logging.getLogger(__name__)


def remove(path: Path) -> None:
    """Delete a file or a folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def staged(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``, and rename it to ``path`` at the end.

    Both paths are files or both are folders. An earlier file or folder stays until the new one is
    complete. If the body raises, the earlier one is unchanged and nothing new remains.
    """
    path = Path(path)
    temporary, old = (path.with_name(f"{path.name}.{end}") for end in ("tmp", "old.tmp"))
    if old.exists() and not path.exists():  # an earlier process died between the two renames below
        old.rename(path)
    remove(temporary)
    remove(old)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        if path.is_dir():  # os.replace replaces files, but no folders with content
            path.rename(old)
        os.replace(temporary, path)
    except BaseException:
        if old.exists():
            old.rename(path)
        raise
    finally:
        remove(temporary)
    remove(old)


def write_atomically(path: str | Path, text: str) -> None:
    """Write ``text`` to a temporary file beside ``path``, and then rename the file."""
    with staged(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as an indented JSON file. The file appears whole."""
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def write_tensors(
    path: Path, state: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as a safetensors file. The file appears whole.

    Args:
        path: The file.
        state: Name -> tensor, contiguous, no two of which share memory.
        metadata: The texts of the file's header.

    Raises:
        InputError: If the disk is full, or the file cannot be written for another reason.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with staged(path) as temporary:
            save_file(dict(state), temporary, metadata=dict(metadata or {}) or None)
    except SafetensorError as error:  # it stands for the errors of the operating system, too
        raise InputError(f"{path} could not be written: {one_line(error)}; make room") from error


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file that is not empty, in hexadecimal digits."""
    return hashlib.sha256(np.memmap(path, np.uint8, mode="r")).hexdigest()


@contextlib.contextmanager
def locked(folder: str | Path, key: str = "output_dir") -> Iterator[None]:
    """Lock ``folder`` so that no other job writes a run into it at the same time.

    The first rank holds the lock. The operating system releases it when the process ends, even
    after a kill.

    Args:
        folder: The folder, which is made if need be.
        key: The option that names it, for errors.

    Raises:
        InputError: If another process holds the lock. The message names the process and its host.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    with (require_writable_dir(folder, key) / ".lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise InputError(
                f"{key} {folder} is being written by {holder}; wait for it or end it, or "
                "choose another folder"
            ) from None
        except OSError as error:  # a file system without locks
            log.warning("%s cannot be locked (%s); let no other job write into it", folder, error)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def literal(paths: Any) -> Any:
    """Return paths for a library that takes globs, such as `datasets`.

    A file or folder that exists stands for itself, although its name may have the characters ``[``,
    ``*`` or ``?``. Anything else is a glob.

    Args:
        paths: A path, a list of paths, or a mapping with these.
    """
    if isinstance(paths, Mapping):
        return {key: literal(value) for key, value in paths.items()}
    if isinstance(paths, list | tuple):
        return [literal(value) for value in paths]
    is_path = isinstance(paths, str) and glob.has_magic(paths) and Path(paths).exists()
    return glob.escape(paths) if is_path else paths


def first_missing(paths: Any) -> str | None:
    """Return the first of some paths that does not exist, and is neither a glob nor a URL.

    Args:
        paths: A path, a list of paths, or a mapping with these.
    """
    if isinstance(paths, Mapping):
        paths = list(paths.values())
    if isinstance(paths, list | tuple):
        return next((path for path in map(first_missing, paths) if path is not None), None)
    is_path = isinstance(paths, str) and "://" not in paths and not glob.has_magic(paths)
    return paths if is_path and not Path(paths).exists() else None


def inside(folder: Path, name: str) -> Path:
    """Return ``folder / name``.

    Raises:
        InputError: If that path is not in ``folder``.
    """
    path = folder / name
    if not Path(os.path.normpath(path)).is_relative_to(os.path.normpath(folder)):
        raise InputError(f"{name} reaches outside of {folder}; name a file in this folder")
    return path


class JSONFile(dict[str, Any]):
    """Mapping of a JSON file. A missing key raises InputError, which names the file.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path):
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"it must hold a mapping, and holds a {type(values).__name__}")
        super().__init__(values)
        self.path = path

    def __missing__(self, key: str):
        raise InputError(f"{self.path} lacks {key}; get it again")


def read_json(path: Path) -> JSONFile:
    """Return the mapping in a JSON file.

    Raises:
        InputError: If the file cannot be read, is damaged, or holds no mapping. The message names
            the file.
    """
    try:
        return JSONFile(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); get it again") from None
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}); get it again") from None


def read_json_lines(path: Path) -> list[Any]:
    """Return the values in a file with one JSON value per line, without damaged lines.

    A kill may have cut off a line.
    """
    values = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            values.append(json.loads(line))
    return values


def read_state(path: Path) -> dict[str, Any]:
    """Return the content of a safetensors or torch.save file without running code from it.

    Raises:
        InputError: If the file cannot be read or is damaged. The message names the file.
    """
    import torch  # only here: it takes a second, and --help does not need it
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # damaged bytes raise errors of many types
        reason = f"cannot be read, or is damaged ({one_line(error)})"
        raise InputError(f"{path} {reason}; get it again") from error


def require_writable_dir(path: str | Path, key: str = "output_dir") -> Path:
    """Make a folder, check that files can be written into it, and return its path.

    The check writes a file without a name, so a kill at any moment leaves nothing behind.

    Args:
        path: The folder.
        key: The option that names it, for errors.

    Raises:
        InputError: If no file can be written. The message names the folder and the reason.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError(
            f"{key} {path} cannot be written ({error.strerror}); choose another folder"
        ) from None
    return path


def digest(value: Any) -> str:
    """Return a short digest of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def differences(
    identity: Mapping[str, Any], saved: Any, prefix: str = "", *, is_component: bool = False
) -> list[str]:
    """Return the keys of ``identity`` whose values differ from the values in ``saved``.

    Keys that only ``saved`` has are options of earlier versions and do not count, except in the
    section of a component: it has just the options that the config gives, and one that is left out
    has its default.

    Args:
        identity: The identity of the present run.
        saved: The identity in a file.
        prefix: The start of every returned key. Nested keys are joined by dots.
        is_component: Whether ``identity`` is a part of a component's section.
    """
    is_component = is_component or "_component_" in identity
    others = saved if isinstance(saved, Mapping) else {}
    odd = []
    for key in dict.fromkeys([*identity, *others]) if is_component else identity:
        value, other = identity.get(key, ...), others.get(key, ...)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            odd += differences(value, other, f"{prefix}{key}.", is_component=is_component)
        elif value != other:
            odd.append(f"{prefix}{key}")
    return odd


def kept_result(
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
        fault = f"{file}: it was made with other settings ({odd[0]})"
    except InputError as error:
        fault = str(error)
    if overwrite:
        return None
    raise InputError(f"{fault}; {remedy}")
