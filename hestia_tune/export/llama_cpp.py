"""Asks the installed llama.cpp (the package xllamacpp) for token ids and for its speed.

Nothing here is needed to write a file, and nothing here fails: without xllamacpp, or if it fails or
takes too long, there is no answer. It runs in a process of its own, because importing xllamacpp
changes the process that imports it.
"""

import importlib.util
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
_WORKER = Path(__file__).with_name("llama_cpp_worker.py")


def is_installed() -> bool:
    """Return whether xllamacpp is installed. It is not imported."""
    return importlib.util.find_spec("xllamacpp") is not None


def ask(jobs: Sequence[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Return the results of jobs, at most those that are ready in time.

    Args:
        jobs: See `llama_cpp_worker`.
        seconds: The time after which the process is ended.

    Returns:
        A result for each of the first jobs. It has ``error`` if llama.cpp raised one. The list is
        shorter than ``jobs`` if llama.cpp is missing, crashed or took too long.
    """
    if not is_installed():
        return []
    with tempfile.TemporaryDirectory() as name:
        given, output = Path(name) / "jobs.json", Path(name) / "results.jsonl"
        given.write_text(json.dumps({"jobs": list(jobs), "output": str(output)}), encoding="utf-8")
        command = [sys.executable, "-c", _WORKER.read_text(encoding="utf-8"), str(given)]
        try:
            # In the empty folder, no file hides a module.
            subprocess.run(command, cwd=name, timeout=seconds, capture_output=True)
        except (subprocess.TimeoutExpired, OSError) as error:
            log.debug("llama.cpp: %s", error)
        if not output.is_file():
            return []
        lines = output.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]


def tokens_per_second(files: Sequence[Path], seconds: float) -> list[float | None]:
    """Return the speed of decoding of each file on the CPU, or None where there is no answer.

    Args:
        files: GGUF files.
        seconds: The time for all files.
    """
    jobs = [{"file": str(file.resolve()), "predict": 16} for file in files]
    found: list[float | None] = [each.get("tokens_per_second") for each in ask(jobs, seconds)]
    return found + [None] * (len(files) - len(found))
