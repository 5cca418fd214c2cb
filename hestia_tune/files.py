"""Files and folders appear whole or not at all: written under a temporary name, then renamed."""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from hestia_tune.errors import InputError, one_line

log = logging.getLogger(__name__)


def remove(path: Path) -> None:
    """Deletes a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def staged(path: str | Path) -> Iterator[Path]:
    """A temporary name beside ``path``, of a file or a folder, that becomes ``path`` at the end.

    What is there stays until the new one is whole; it then steps aside for the moment of a rename.
    If the body raises, it is as it was and nothing else is left.
    """
    path = Path(path)
    temporary, old = (path.with_name(f"{path.name}.{end}") for end in ("tmp", "old.tmp"))
    if old.exists() and not path.exists():  # a kill between the two renames below
        old.rename(path)
    remove(temporary)
    remove(old)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        if path.is_dir():  # a file is replaced by the rename itself
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
    """Writes ``text`` to a temporary name beside ``path``, then renames it."""
    with staged(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Writes ``value`` as a JSON file of lines, which appears whole."""
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def checksum(path: Path) -> str:
    """SHA-256 of a file that is not empty."""
    return hashlib.sha256(np.memmap(path, np.uint8, mode="r")).hexdigest()


@contextlib.contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Keeps other jobs from writing a run into ``folder`` meanwhile; the first rank holds it.

    A lock of the system, which ends with its process, however that ends. If another process holds
    it, a ValueError names process and host.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    with (require_writable_dir(folder) / ".lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise InputError(
                f"output_dir {folder} is being written by {holder}; wait for it or end it, or "
                "choose another folder"
            ) from None
        except OSError as error:  # a file system without locks
            log.warning("%s cannot be locked (%s); let no other job write into it", folder, error)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def inside(folder: Path, name: str) -> Path:
    """``folder / name``; a ValueError if that is not in ``folder``."""
    path = folder / name
    if not Path(os.path.normpath(path)).is_relative_to(os.path.normpath(folder)):
        raise InputError(f"{name} reaches outside of {folder}; only files in it are read")
    return path


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; InputError names a file that is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); get it again") from None
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}); get it again") from None


def read_state(path: Path) -> dict[str, Any]:
    """What torch.save, or safetensors, wrote, without running code from it; a ValueError that names
    the file if it is damaged."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # of any kind, as bytes fall
        reason = f"cannot be read, or is damaged ({one_line(error)})"
        raise InputError(f"{path} {reason}; get it again") from error


def require_writable_dir(path: str | Path) -> Path:
    """Make a folder and prove that a file can be written into it.

    The proof is a file without a name, so that a kill at any moment leaves nothing behind.

    Raises:
        InputError: If it cannot be written; the error names the folder and the reason.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError(
            f"output_dir {path} cannot be written ({error.strerror}); choose another folder"
        ) from None
    return path
