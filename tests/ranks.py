"""Run a command in processes of its own, on one or several ranks, without importing it every time.

A server process imports the package once, and forks the processes of every test from there. Tests
of torchrun itself, of signals to a whole job, and of ``tune run`` use ``tiny.tune_run`` instead.
"""

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pictures import quick
from torch.multiprocessing import start_processes

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "hestia_tune.commands.convert",
        "hestia_tune.commands.qat",
        "hestia_tune.reconstruction.reconstruct",
        "hestia_tune.sensitivity.estimation",
        "hestia_tune.torchtune.recipe",
        "matplotlib.pyplot",
        "torchtune.models.convert_weights",
        "transformers",
    ]
)
_PATIENCE = 600.0  # seconds for a command


def free_port() -> int:
    """Return a port of the loopback address that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def spawn(function: Callable[..., None], *arguments: Any, ranks: int) -> None:
    """Call ``function(rank, *arguments)`` in processes, as ``torch.multiprocessing.spawn`` does."""
    job = dict(os.environ), function, *arguments
    start_processes(_call, job, nprocs=ranks, start_method="forkserver")


def _call(rank: int, environment: dict, function: Callable[..., None], *arguments: Any) -> None:
    _begin(environment)
    function(rank, *arguments)


def _begin(environment: dict) -> None:
    """Make a fork of the server like a process of its own."""
    os.environ.clear()
    os.environ.update(environment)
    # Of Linux, for the workers of data loaders. A fork of a server would use the server.
    multiprocessing.set_start_method("fork", force=True)


class Forked:
    """A command that runs as ``tune run RECIPE ARGUMENTS`` does; several ranks as in torchrun.

    The recipe may also be the path of a script.

    Attributes:
        jobs: The process of each rank.
    """

    def __init__(self, *arguments: str, ranks: int = 1, recipe: str = "hestia_qat"):
        self._command, common = [recipe, *arguments], {}
        if ranks > 1:
            common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": free_port()}
            common |= {"MASTER_ADDR": "127.0.0.1", "GROUP_RANK": 0}
        self._folder = tempfile.TemporaryDirectory()
        self._texts = [Path(self._folder.name) / name for name in ("out", "err")]
        self.jobs = []
        for rank in range(ranks):
            own = {**common, "RANK": rank, "LOCAL_RANK": rank} if common else {}
            environment = dict(os.environ) | {key: str(value) for key, value in own.items()}
            job = recipe, arguments, environment, os.getcwd(), *map(str, self._texts)
            self.jobs.append(_FORKS.Process(target=_as_rank, args=job))
            self.jobs[-1].start()

    def runs(self) -> bool:
        """Whether all ranks run, or have ended without an error, and one still runs."""
        codes = [job.exitcode for job in self.jobs]
        return None in codes and not any(codes)

    def wait(self) -> subprocess.CompletedProcess:
        """Wait for the end. If a rank fails, the others get SIGTERM, and the code is 1."""
        deadline = time.monotonic() + _PATIENCE
        try:
            while self.runs():
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(self._command, _PATIENCE)
                next(job for job in self.jobs if job.exitcode is None).join(0.05)
        finally:
            for job in self.jobs:
                job.terminate()
                job.join(30)
                job.kill()
                job.join()
        code = next((job.exitcode for job in self.jobs if job.exitcode), 0)
        code = int(code != 0) if len(self.jobs) > 1 else code
        texts = [path.read_text("utf-8") if path.exists() else "" for path in self._texts]
        self._folder.cleanup()
        return subprocess.CompletedProcess(self._command, code, *texts)


def run_forked(*arguments: str, **options: Any) -> subprocess.CompletedProcess:
    """Run a command to its end. The options are those of `Forked`."""
    return Forked(*arguments, **options).wait()


def _as_rank(
    recipe: str, arguments: tuple[str, ...], environment: dict, folder: str, out: str, err: str
) -> None:
    """Run a command in this process, which is a fork of the server."""
    _begin(environment)
    os.chdir(folder)
    for path, stream in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    sys.argv = [recipe, *arguments]
    from matplotlib.figure import Figure

    from hestia_tune.__main__ import main

    Figure.savefig = quick(Figure.savefig)
    if recipe.endswith(".py"):
        sys.path.insert(0, str(Path(recipe).parent))
        runpy.run_path(recipe, run_name="__main__")
        code = 0
    else:
        code = main([recipe.removeprefix("hestia_"), *arguments])
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
