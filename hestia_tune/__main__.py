"""``hestia COMMAND``: the one front door of the package, also as ``python -m hestia_tune COMMAND``.

A command that reads a config is started in this process, as ``tune run hestia_COMMAND --config
CONFIG`` starts it. Nothing here imports torch before a command needs it, so that --help is
immediate.
"""

import argparse
import pkgutil
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hestia_tune import __version__


class _Command(NamedTuple):
    """A command of the package.

    Attributes:
        function: "module:function". It takes the options as keywords, and returns an exit code. A
            command of a config takes the config first.
        about: What the command does, for --help.
        options: Function that adds the command's own options to a parser.
        reads_config: Whether it is a command of a config.
    """

    function: str
    about: str
    options: Callable[[argparse.ArgumentParser], None]
    reads_config: bool = False


def _init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a Hugging Face folder, or a name on the hub")
    rule = "chats or text: a parquet, JSON or text file, a folder of them, or a glob in quotes"
    parser.add_argument("data", help=rule)
    parser.add_argument("--validation", metavar="DATA", help="held-out data, to measure the loss")
    rule = "a format that must be written, such as gguf; may be repeated; default: all that fit"
    parser.add_argument("--format", action="append", dest="formats", metavar="NAME", help=rule)
    rule = "plan for a GPU with this much memory, even if it is not here"
    parser.add_argument("--gpu-memory", type=float, metavar="GB", help=rule)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--output", metavar="FILE", help="default: the model's name with .yaml")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")


def _validate(parser: argparse.ArgumentParser) -> None:
    rule = "print what would fit into a GPU with this much memory, even if it is not here"
    parser.add_argument("--gpu-memory", type=float, metavar="GB", help=rule)


def _ranks(parser: argparse.ArgumentParser) -> None:
    rule = "processes on this machine, one per GPU; `tune run` has torchrun's other options"
    parser.add_argument("--nproc-per-node", "--nproc_per_node", metavar="N", help=rule)


def _configs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="the config to print, to copy and edit")


def _compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="an output folder of hestia qat")


def _report(parser: argparse.ArgumentParser) -> None:
    _compare(parser)
    rule = "default: report.html in the run's folder, or in this folder for several runs"
    parser.add_argument("--output", metavar="FILE", help=rule)


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="a model's folder, one of hestia convert, or a GGUF file")


def _nothing(parser: argparse.ArgumentParser) -> None:
    pass


def _command(function: str, about: str, options: Callable, reads_config: bool = False) -> _Command:
    return _Command(f"hestia_tune.commands.{function}", about, options, reads_config)


COMMANDS = {
    "init": _command("init:run_init", "write a first config for a model and its data", _init),
    "validate": _command(
        "inspect:run_validate", "check the config; train nothing", _validate, True
    ),
    "qat": _command("qat:run_qat", "train the model to ternary weights", _ranks, True),
    "eval": _command(
        "evaluate:run_evaluation", "compare the trained model with the pretrained one", _ranks, True
    ),
    "convert": _command(
        "convert:run_convert", "write files for llama.cpp and others", _nothing, True
    ),
    "report": _command("report:print_report", "write one HTML page about runs", _report),
    "compare": _command("inspect:print_comparison", "print the losses of runs", _compare),
    "inspect": _command("inspect:print_contents", "say what a model's weights are", _inspect),
    "reconstruct": _command(
        "qat:run_reconstruct", "make the blocks ternary, one after the other", _ranks, True
    ),
    "sensitivity": _command(
        "qat:run_sensitivity",
        "measure how much the loss depends on each layer",
        _ranks,
        True,
    ),
    "tokenize": _command(
        "qat:run_tokenize", "tokenize the data once, for many runs", _nothing, True
    ),
    "configs": _command("inspect:print_configs", "list the configs, or print one", _configs),
    "options": _command("inspect:print_options", "print every option of a config", _nothing),
}


_GROUPS = {
    "from a pretrained model to a ternary one, in this order": [*COMMANDS][:5],
    "results": [*COMMANDS][5:8],
    "parts of a run": [*COMMANDS][8:11],
    "reference": [*COMMANDS][11:],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the commands and return its exit code.

    Args:
        argv: The command line without the program's name. None reads it from ``sys.argv``.
    """
    try:
        return _run(*((sys.argv[1:] if argv is None else argv) or ["--help"]))
    except KeyboardInterrupt:  # during the imports
        return 130


def _run(name: str, *words: str) -> int:
    """Run a command with the words of its command line, and return the exit code."""
    if name in ("-h", "--help"):
        print(_overview())
        return 0
    if name == "--version":
        print(f"hestia_tune {__version__}")
        return 0
    from hestia_tune.commands import launch  # with the options of a config, a third of a second
    from hestia_tune.config.section import nearest

    if name not in COMMANDS:
        rule = f"there is no command {name!r}{nearest(name, COMMANDS)}"
        print(f"hestia: error: {rule}; `hestia --help` lists the commands", file=sys.stderr)
        return 2
    function, about, options, reads_config = COMMANDS[name]
    if reads_config:
        error_name = name if name == "validate" else f"hestia_{name}"
        return launch.main(function, error_name, words, about=about, options=options)
    parser = argparse.ArgumentParser(prog=f"hestia {name}", description=about)
    options(parser)
    try:
        own = vars(parser.parse_args(words))
    except SystemExit as stop:  # --help, or a wrong argument
        return int(stop.code or 0)

    def run() -> int:
        if name in ("init", "report", "compare", "inspect"):
            launch.say_loading()
        return pkgutil.resolve_name(function)(**own)

    return launch.guarded(run, name)


def _overview() -> str:
    """Return the text of ``hestia --help``."""
    lines = ["usage: hestia COMMAND ..."]
    for title, names in _GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:<12} {COMMANDS[name].about}" for name in names)]
    lines += [
        "",
        "Give a config by its path or name: hestia qat mine.yaml optimizer.lr=1e-3",
        "Options of a command: hestia COMMAND --help",
        "torchtune starts the same commands: tune run hestia_qat --config mine.yaml",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
