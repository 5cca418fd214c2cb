"""Files appear whole or not at all: written under a temporary name, then renamed."""

import os
from pathlib import Path


def write_atomically(path: str | Path, text: str) -> None:
    """Writes ``text`` to a temporary name beside ``path``, then renames it."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def require_writable_dir(path: str | Path) -> Path:
    """Makes the folder and proves that a file can be written into it.

    Raises:
        ValueError: if it cannot be; the message names the folder and the reason.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".writable_{os.getpid()}.tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"output_dir {path} cannot be written ({error.strerror}); choose another folder"
        ) from None
    return path
