"""From a command line to a finished command: parsing, one-line errors, exit codes.

Exit codes: 0 done; 1 an error; 130 stopped by Ctrl-C, in training and reconstruction also by
SIGTERM and SIGHUP. An error that speaks of what the user gave is told in one line on stderr;
anything else, being a mistake of ours, with its traceback. Set HESTIA_TRACEBACK=1 to see where any
error came from.
"""

import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from torchtune import config
from torchtune.config._errors import InstantiationError
from yaml import YAMLError

from hestia_tune.commands.configs import resolved
from hestia_tune.config import one_line
from hestia_tune.training.options import Run

INTERRUPTED = 130
_PACKAGE = Path(__file__).parents[1]
# That the first rank has to tell an error of all; torchrun ends it when another rank exits.
_SECONDS_TO_TELL = 10.0
# What checks of the user's input, files and data raise.
_ABOUT_INPUT = (
    *(ValueError, TypeError, OSError, ImportError, FloatingPointError),
    *(YAMLError, OmegaConfBaseException),
    InstantiationError,  # a component that is not there
)
# Of other packages, about what their users cannot change.
_NOTICES = ("'set_vital' is deprecated", "torch.distributed is disabled, unavailable or uninitia")


def _is_mistake(error: Exception) -> bool:
    """Whether a value or a type is wrong in an operation of our own, where nothing was raised to
    tell the user."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_ours = _PACKAGE in Path(last.filename).parents
    of_operation = is_ours and not (last.line or "raise").startswith("raise")
    return of_operation and type(error) in (ValueError, TypeError)


def main(command: Callable[[Run], int], name: str) -> int:
    """Parses ``sys.argv`` as torchtune does (packaged config names included), runs ``command``."""
    for notice in _NOTICES:
        warnings.filterwarnings("ignore", message=notice)
    library = logging.getLogger("hestia_tune")  # what it tells by the way
    if os.environ.get("RANK", "0") == "0" and not library.hasHandlers():
        library.setLevel(logging.INFO)
        library.addHandler(logging.StreamHandler())
    try:
        parsed: list[DictConfig] = []
        with resolved(sys.argv) as sys.argv:
            try:
                config.parse(parsed.append)()
            except SystemExit as stop:  # the parser exits when its callback returns
                if stop.code or not parsed:  # an error, or --help
                    return int(stop.code or 0)
        return command(Run.of(parsed[0]))
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        about_input = isinstance(error, _ABOUT_INPUT) and not _is_mistake(error)
        if os.environ.get("HESTIA_TRACEBACK") or not about_input:
            raise
        # What was checked before the ranks met, or raised on all of them, is told once.
        shared = getattr(error, "on_every_rank", not dist.is_initialized())
        rank = os.environ.get("RANK", "0")
        if rank == "0" or not shared:
            where = "" if rank == "0" else f"[rank {rank}] "
            print(f"{name}: error: {where}{one_line(error, limit=2000)}", file=sys.stderr)
        else:
            time.sleep(_SECONDS_TO_TELL)
        # Several ranks are ended by torchrun; to wait for each other here could hang.
        if dist.is_initialized() and dist.get_world_size() == 1:
            dist.destroy_process_group()
        return 1
