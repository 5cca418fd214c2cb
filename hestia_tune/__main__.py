"""What needs no config: ``python -m hestia_tune configs`` and ``python -m hestia_tune compare``."""

import argparse
import sys

from hestia_tune.commands.compare import compare_runs
from hestia_tune.commands.configs import config_path, packaged_configs


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hestia_tune", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    configs = commands.add_parser("configs", help="list the packaged configs, or print one")
    configs.add_argument("name", nargs="?", help="the config to print, ready to copy and edit")
    compare = commands.add_parser("compare", help="one table of the validation losses of runs")
    compare.add_argument("runs", nargs="+", metavar="RUN", help="an output folder of hestia_qat")
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "compare":
            print(compare_runs(arguments.runs))
        elif arguments.name is None:
            print("\n".join(packaged_configs()))
        else:
            print(config_path(arguments.name).read_text(encoding="utf-8"), end="")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
