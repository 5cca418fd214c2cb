"""Run a command from its command line: parsing, one-line errors, exit codes.

Exit codes: 0 for success, 1 for an error, 130 for a stop by Ctrl-C. SIGTERM and SIGHUP also stop
training and reconstruction with 130. An `InputError`, which the user can correct, is one line on
stderr. Several errors of one config are printed together, one per line. Any other error is a
mistake in the code and keeps its traceback. HESTIA_TRACEBACK=1 shows every traceback.
"""

import argparse
import logging
import os
import pkgutil
import sys
import warnings
from collections.abc import Callable

from hestia_tune.commands.inspect import options_text
from hestia_tune.config.files import load_config, overridden
from hestia_tune.config.run import RunConfig
from hestia_tune.errors import InputError, InputErrors, one_line

INTERRUPTED = 130
# Warnings of other packages that users of this package cannot act on.
_NOTICES = ("'set_vital' is deprecated", "torch.distributed is disabled, unavailable or uninitia")


def main(command: Callable[[RunConfig], int] | str, name: str) -> int:
    """Parse ``sys.argv``, run a command, and return the exit code.

    Args:
        command: The command. It takes the config and returns an exit code. "module:function" names
            a command that is imported only when it runs: its imports take seconds, and --help does
            not need them.
        name: Name of the command, for error messages.
    """

    def run() -> int:
        try:
            config = parse_command_line(name)
        except SystemExit as stop:  # --help, or a wrong argument
            return int(stop.code or 0)
        _set_log_level(config.log_level)
        import torch  # only here, because --help does without it

        # At low temperatures, many slopes are denormal numbers (below 1e-38), and processors are
        # many times slower with them. Threads that torch starts later inherit this setting.
        torch.set_flush_denormal(True)
        function = pkgutil.resolve_name(command) if isinstance(command, str) else command
        return function(config)

    return guarded(run, name)


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
    except KeyboardInterrupt:
        return INTERRUPTED
    except RuntimeError as error:
        import torch  # only here, because --help does without it

        if not isinstance(error, torch.OutOfMemoryError):
            raise
        hint = "lower batch_size, set "
        hint += "enable_activation_checkpointing=True or fsdp_cpu_offload=True, or use more GPUs"
        _print_once(InputError(f"out of memory ({one_line(error, limit=100)}); {hint}"), name)
        return 1
    except InputError as error:
        if os.environ.get("HESTIA_TRACEBACK"):
            raise
        _print_once(error, name)
        return 1


def _set_log_level(level: str) -> None:
    """Print our messages from a level on, and the notices of torchtune with level "debug" only."""
    library, torchtune = map(logging.getLogger, ("hestia_tune", "torchtune.utils._logging"))
    if os.environ.get("RANK", "0") == "0":
        if not library.hasHandlers():
            library.addHandler(logging.StreamHandler())
        if library.handlers:  # a program that uses this package may have handlers of its own
            library.setLevel(level.upper())
    for handler in torchtune.handlers:
        handler.setLevel(logging.DEBUG if level == "debug" else logging.WARNING)


def parse_command_line(name: str) -> RunConfig:
    """Return the config of ``sys.argv``.

    Args:
        name: Name of the command.

    Raises:
        InputError: If the config or an override cannot be read, or a value is not allowed.
        SystemExit: After --help or a wrong argument.
    """
    parser = argparse.ArgumentParser(
        prog=f"tune run {name}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=options_text() if {"-h", "--help"} & {*sys.argv} else None,
    )
    rule = "a packaged config, a path, or CONFIG+OVERLAY (python -m hestia_tune configs lists them)"
    parser.add_argument("--config", required=True, help=rule)
    rule = "options to change, such as optimizer.lr=1e-3, or to delete, such as ~lr_scheduler"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=rule)
    arguments = parser.parse_intermixed_args()
    return RunConfig.parse(overridden(load_config(arguments.config), arguments.overrides))


def _print_once(error: InputError, name: str) -> None:
    """Print each error on one line. If every rank raises them, only the first rank prints them.

    An error before the process group exists belongs to its own rank, so every rank prints it.
    """
    import torch.distributed as dist  # only here, because --help does without it

    rank = os.environ.get("RANK", "0")
    shared = dist.is_initialized() and getattr(error, "on_every_rank", False)
    if rank == "0" or not shared:
        where = "" if rank == "0" else f"[rank {rank}] "
        several = isinstance(error, InputErrors)
        for line in str(error).splitlines() if several else [one_line(error, limit=2000)]:
            print(f"{name}: error: {where}{line}", file=sys.stderr, flush=True)
    if shared:  # torchrun ends all ranks as soon as one exits, so the first rank must print before
        dist.barrier()
    # With several ranks, torchrun ends the processes. Waiting for other ranks here could hang.
    if dist.is_initialized() and dist.get_world_size() == 1:
        dist.destroy_process_group()
