"""Commands that start no run, such as ``python -m hestia_tune configs`` and ``init``."""

import argparse
import sys
from pathlib import Path

from hestia_tune.commands.formats import formats_page
from hestia_tune.commands.inspect import compare_runs, listing, options_page, run_validate
from hestia_tune.commands.launch import guarded
from hestia_tune.commands.launch import main as launch
from hestia_tune.config.files import text_of
from hestia_tune.errors import InputError


def main(argv: list[str] | None = None) -> int:
    """Run one of the commands and return its exit code.

    Args:
        argv: The command line without the program's name. None reads it from ``sys.argv``.
    """
    parser = argparse.ArgumentParser(prog="python -m hestia_tune", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    configs = commands.add_parser("configs", help="list recipes and configs, or print a config")
    configs.add_argument("name", nargs="?", help="the config to print, to copy and edit")
    init = commands.add_parser("init", help="write a first config for a model and a text")
    init.add_argument("model", help="a Hugging Face folder, or a name on the hub")
    init.add_argument("data", help="a parquet, JSON or text file, a folder of them, or a glob")
    init.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    init.add_argument("--output", metavar="FILE", help="default: the model's name with .yaml")
    init.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    validate = commands.add_parser("validate", help="check a config as hestia_qat would")
    validate.add_argument("name", help="a packaged config, a path, or NAME+OTHER")
    validate.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="options to change")
    commands.add_parser("options", help="print the reference of all options as Markdown")
    commands.add_parser("formats", help="print which format holds which method and model")
    compare = commands.add_parser("compare", help="print the validation losses of several runs")
    compare.add_argument("runs", nargs="+", metavar="RUN", help="an output folder of hestia_qat")
    report = commands.add_parser("report", help="write one HTML page about one run or several")
    report.add_argument("runs", nargs="+", metavar="RUN", help="an output folder of hestia_qat")
    where = "default: report.html in the run's folder, or in this folder for several runs"
    report.add_argument("--output", metavar="FILE", help=where)
    inspect = commands.add_parser("inspect", help="say what the weights of a model are")
    inspect.add_argument("folder", help="a model's folder, one of hestia_convert, or a GGUF file")
    arguments = parser.parse_args(argv)
    if arguments.command == "validate":
        sys.argv = ["validate", "--config", arguments.name, *arguments.overrides]
        return launch(run_validate, "validate")
    if arguments.command == "init":
        from hestia_tune.commands.init import run_init

        options = {key: value for key, value in vars(arguments).items() if key != "command"}
        return guarded(lambda: run_init(**options), "init")
    try:
        if arguments.command == "inspect":
            from hestia_tune.models.contents import contents_table  # a slow import: torchtune

            print(contents_table(Path(arguments.folder)))
        elif arguments.command == "compare":
            print(compare_runs(arguments.runs))
        elif arguments.command == "report":
            from hestia_tune.commands.report import write_report  # a slow import: torchtune

            print(write_report(arguments.runs, arguments.output))
        elif arguments.command == "formats":
            print(formats_page(), end="")
        elif arguments.command == "options":
            print(options_page(), end="")
        elif arguments.name is None:
            print(listing())
        else:
            print(text_of(arguments.name), end="")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
