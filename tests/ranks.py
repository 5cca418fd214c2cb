"""Run a command in processes of its own, on one or several ranks, without importing it every time.

A server process imports the package once, and forks the processes of every test from there. Tests
of torchrun itself, of signals to a whole job, and of ``tune run`` use ``tiny.tune_run`` instead.
"""

import contextlib
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
from pictures import quick

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


def end_job(process: subprocess.Popen | BaseProcess) -> None:
    """Kill a process and all its children. The ranks of torchrun have their own sessions."""
    job = psutil.Process(process.pid)
    job.suspend()  # so that it starts no more processes
    for one in [*job.children(recursive=True), job]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


def spawn(function: Callable[..., None], *arguments: Any, ranks: int) -> None:
    """Call ``function(rank, *arguments)`` in processes, as ``torch.multiprocessing.spawn`` does.

    They have the variables that torchrun sets, so ``init_process_group("gloo")`` connects them.
    """
    from torch.multiprocessing import start_processes

    job = _environments(ranks), function, *arguments
    start_processes(_call, job, nprocs=ranks, start_method="forkserver")


def _environments(ranks: int) -> list[dict[str, str]]:
    """Return the environment of every rank."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GROUP_RANK": "0"}
    common |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    owns = (dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(ranks))
    return [{**os.environ, **common, **own} for own in owns]


def _call(rank: int, environments: list, function: Callable[..., None], *arguments: Any) -> None:
    as_own_process(environments[rank])
    function(rank, *arguments)


def as_own_process(environment: dict[str, str]) -> None:
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
        self._command = [recipe, *arguments]
        self._folder = tempfile.TemporaryDirectory()
        self._texts = [Path(self._folder.name) / name for name in ("out", "err")]
        self.jobs = []
        for environment in _environments(ranks) if ranks > 1 else [dict(os.environ)]:
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
                if job.is_alive():
                    end_job(job)
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
    as_own_process(environment)
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
