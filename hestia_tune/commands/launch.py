"""Run a command from its command line: parsing, one-line errors, exit codes, the next command.

Exit codes: 0 for success, 1 for an error, 130 for a stop by Ctrl-C. SIGTERM and SIGHUP also stop
training and reconstruction with 130. An `InputError`, which the user can correct, is one line on
stderr. Several errors of one config are printed together, one per line. Any other error is a
mistake in the code and keeps its traceback. HESTIA_TRACEBACK=1 shows every traceback.

The help of a command lists all options of a config (`hestia_tune.commands.options`).
"""

import argparse
import contextlib
import errno
import logging
import os
import pkgutil
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hestia_tune.commands.options import options_text
from hestia_tune.config.run_config import RunConfig, load_config, overridden
from hestia_tune.errors import InputError, InputErrors, one_line

_log = logging.getLogger(__name__)

INTERRUPTED = 130
# Overrides that say how one command starts, and that the next command does not need.
_ONCE = ("resume_from_checkpoint", "overwrite_output")
# Commands that ask for as many processes as this one has.
_ON_RANKS = ("qat", "reconstruct", "sensitivity")
# Errors of the operating system that the user can correct: no permission, no space.
_NO_ROOM = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
# Warnings of other packages that users of this package cannot act on.
_NOTICES = (
    "'set_vital' is deprecated",
    "torch.distributed is disabled, unavailable or uninitia",
    "Mismatch dtype between input and weight",  # torchtune's RMSNorm computes in float32
)


class Stopped(Exception):
    """The user has stopped a command, which has saved what it had. The text says how to go on."""


@dataclass(frozen=True)
class _CommandLine:
    """The config and the overrides that the user has typed."""

    config: str = "CONFIG"
    overrides: tuple[str, ...] = ()


_typed = _CommandLine()


def next_command(command: str, *more: str) -> str:
    """Return the command to type next, with the config and the overrides of this command line.

    Args:
        command: Name of the next command, such as "eval".
        more: Overrides to add.
    """
    words = [word for word in _typed.overrides if word.partition("=")[0] not in _ONCE]
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    several = ["--nproc-per-node", ranks] if command in _ON_RANKS and ranks != "1" else []
    return shlex.join(["hestia", command, *several, _typed.config, *words, *more])


def main(
    command: Callable[..., int] | str,
    name: str,
    words: Sequence[str] | None = None,
    *,
    about: str | None = None,
    options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> int:
    """Parse a command line with a config, run the command, and return the exit code.

    Args:
        command: The command. It takes the config, and its own options as keywords, and returns an
            exit code. "module:function" names a command that is imported only when it runs: its
            imports take seconds, and --help does not need them.
        name: Name of the command, for error messages.
        words: The command line without the program's name. None reads it from ``sys.argv``.
        about: What the command does, for --help.
        options: Function that adds the command's own options to a parser.
    """

    def run() -> int:
        try:
            config, own = parse_command_line(name, words, about=about, options=options)
        except SystemExit as stop:  # --help, or a wrong argument
            return int(stop.code or 0)
        _set_log_level(config.log_level)
        ranks = own.pop("nproc_per_node", None)
        if not (ranks in (None, "auto", "gpu", "cpu") or (ranks.isdecimal() and int(ranks))):
            rule = "--nproc-per-node must be a number of processes, or gpu"
            raise InputError(f"{rule}; got {ranks!r}")
        if ranks is not None:
            return _run_on_ranks(name, ranks)
        say_loading()
        import torch  # only here, because --help does without it

        # At low temperatures, many slopes are denormal numbers (below 1e-38), and processors are
        # many times slower with them. Threads that torch starts later inherit this setting.
        torch.set_flush_denormal(True)
        function = pkgutil.resolve_name(command) if isinstance(command, str) else command
        begin = time.time() - 2.0  # file systems round times, some of them to two seconds
        try:
            return function(config, **own)
        except KeyboardInterrupt:  # not by `StopRequest`: outside of the steps, or the second one
            command_word = name.removeprefix("hestia_")
            again = _to_go_on(config, begin) if command_word == "qat" else []
            raise Stopped(_stopped(name, next_command(command_word, *again))) from None

    return guarded(run, name)


def _stopped(name: str, again: str | None) -> str:
    """Return the message of a command that Ctrl-C has ended, with the command to go on."""
    to_go_on = f"; to go on: {again}" if again else ""
    return f"{name}: stopped; what was written before is kept{to_go_on}"


def _to_go_on(config: RunConfig, begin: float) -> list[str]:
    """Return the overrides with which a training that was interrupted goes on.

    A checkpoint that is older than this command belongs to a run that it would have replaced.

    Args:
        config: The config of the run.
        begin: When the command began, in seconds since the epoch.
    """
    from hestia_tune.models.sources import complete_checkpoints

    saved = complete_checkpoints(Path(config.output_dir) / "checkpoints")
    if saved and (config.resume_from_checkpoint or saved[-1][1].stat().st_mtime >= begin):
        return ["resume_from_checkpoint=True"]
    return [word for word in _typed.overrides if word.partition("=")[0] == "overwrite_output"]


def _run_on_ranks(name: str, ranks: str) -> int:
    """Run the command of this command line by torchrun, and return the exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    if ranks.isdecimal():  # torchrun would set 1, and say so
        threads = (os.cpu_count() or 1) // int(ranks)
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
    # Of a failed rank, torchrun would log a summary after our own message or traceback.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    words = ["--standalone", "--nproc-per-node", ranks, "-m", name]
    words += ["--config", _typed.config, *_typed.overrides]
    try:
        run(get_args_parser().parse_args(words))
    except SignalException:
        return INTERRUPTED
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        return INTERRUPTED if codes == {INTERRUPTED} else 1
    return 0


def guarded(run: Callable[[], int], name: str) -> int:
    """Return a function's exit code, or print its error as one line and return the error's code.

    Args:
        run: The function.
        name: Name of the command, for error messages.
    """
    for notice in _NOTICES:
        warnings.filterwarnings("ignore", message=notice)
    _set_log_level("info")
    try:
        return run()
    except Stopped as stop:
        _print_rank_zero(str(stop))
        return INTERRUPTED
    except KeyboardInterrupt:
        again = next_command(name.removeprefix("hestia_"))
        _print_rank_zero(_stopped(name, again if _typed != _CommandLine() else None))
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except RuntimeError as error:
        import torch  # only here, because --help does without it

        if not isinstance(error, torch.OutOfMemoryError):
            raise
        hint = "lower batch_size, set "
        hint += "enable_activation_checkpointing=True or fsdp_cpu_offload=True, or use more GPUs"
        _print_once(InputError(f"out of memory ({one_line(error, limit=100)}); {hint}"), name)
        return 1
    except (InputError, OSError) as error:
        is_known = isinstance(error, InputError) or error.errno in _NO_ROOM
        if not is_known or os.environ.get("HESTIA_TRACEBACK"):
            raise
        if not isinstance(error, InputError):
            error = InputError(f"{error.filename or 'a file'} cannot be written: {error.strerror}")
        _print_once(error, name)
        return 1


class _NoNotices(logging.Filter):
    """A filter that lets warnings and errors through."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING


class _AboveProgressBars(logging.StreamHandler):
    """A handler that leaves progress bars in the terminal whole."""

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream.isatty():
            tqdm.write(self.format(record), file=self.stream)
        else:  # a log file gets lines of bars now and then, and no bar again after each message
            super().emit(record)


def say_loading() -> None:
    """Log that the imports begin, which take seconds."""
    if os.environ.get("RANK", "0") == "0":
        _log.info("loading PyTorch, and looking at the model and the data")


def _print_rank_zero(text: str) -> None:
    """Print a last message, unless the terminal is closed."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def _set_log_level(level: str) -> None:
    """Print our messages from a level on, and the notices of torchtune with level "debug" only."""
    library, torchtune = map(logging.getLogger, ("hestia_tune", "torchtune.utils._logging"))
    if os.environ.get("RANK", "0") == "0":
        if not library.hasHandlers():
            library.addHandler(_AboveProgressBars())
        if library.handlers:  # a program that uses this package may have handlers of its own
            library.setLevel(level.upper())
    # A filter, because torchtune sets the level of its logger when it is imported.
    for old in [found for found in torchtune.filters if isinstance(found, _NoNotices)]:
        torchtune.removeFilter(old)
    if level != "debug":
        torchtune.addFilter(_NoNotices())


def parse_command_line(
    name: str,
    words: Sequence[str] | None = None,
    *,
    about: str | None = None,
    options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> tuple[RunConfig, dict[str, Any]]:
    """Return the config of a command line, and the command's own options.

    Args:
        name: Name of the command.
        words: The command line without the program's name. None reads it from ``sys.argv``.
        about: What the command does, for --help.
        options: Function that adds the command's own options to a parser.

    Raises:
        InputError: If the config or an override cannot be read, or a value is not allowed.
        SystemExit: After --help or a wrong argument.
    """
    global _typed
    words = sys.argv[1:] if words is None else words
    parser = argparse.ArgumentParser(
        prog=f"hestia {name.removeprefix('hestia_')}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=options_text() if {"-h", "--help"} & {*words} else None,
    )
    rule = "a packaged config, a path, or CONFIG+OVERLAY (`hestia configs` lists them)"
    parser.add_argument("config_word", nargs="?", metavar="CONFIG", help=rule)
    rule = "options to change, such as optimizer.lr=1e-3, or to delete, such as ~lr_scheduler"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=rule)
    parser.add_argument("--config", help="the config, as `tune run` passes it")
    if options is not None:
        options(parser)
    own = vars(parser.parse_intermixed_args(words))
    config, first, overrides = (own.pop(key) for key in ("config", "config_word", "overrides"))
    overrides = [word for word in (first, *overrides) if word is not None]
    if config is None:
        if not overrides:
            parser.error(
                "give a config, such as mine.yaml; `hestia configs` lists the packaged ones"
            )
        config, *overrides = overrides
        if "=" in config and not Path(config).exists():
            raise InputError(
                f"give a config before the options: {parser.prog} CONFIG "
                f"{shlex.join([config, *overrides])}"
            )
    _typed = _CommandLine(config, tuple(overrides))
    return RunConfig.parse(overridden(load_config(config), overrides)), own


def _print_once(error: InputError, name: str) -> None:
    """Print each error on one line. If every rank raises them, only the first rank prints them.

    An error before the process group exists belongs to its own rank, so every rank prints it.
    """
    dist = sys.modules.get("torch.distributed")  # an error of a config comes before torch
    is_joined = dist is not None and dist.is_initialized()
    rank = os.environ.get("RANK", "0")
    shared = is_joined and getattr(error, "on_every_rank", False)
    if rank == "0" or not shared:
        where = "" if rank == "0" else f"[rank {rank}] "
        several = isinstance(error, InputErrors)
        for line in str(error).splitlines() if several else [one_line(error, limit=2000)]:
            print(f"{name}: error: {where}{line}", file=sys.stderr, flush=True)
    if shared:  # torchrun ends all ranks as soon as one exits, so the first rank must print before
        dist.barrier()
    # With several ranks, torchrun ends the processes. Waiting for other ranks here could hang.
    if is_joined and dist.get_world_size() == 1:
        dist.destroy_process_group()
