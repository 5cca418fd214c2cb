"""``python -m hestia_tune configs`` lists the packaged configs, ``... configs NAME`` prints one."""

import argparse
import sys

from hestia_tune.commands.configs import config_path, packaged_configs


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hestia_tune", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    configs = commands.add_parser("configs", help="list the packaged configs, or print one")
    configs.add_argument("name", nargs="?", help="the config to print, ready to copy and edit")
    arguments = parser.parse_args(argv)
    if arguments.name is None:
        print("\n".join(packaged_configs()))
        return 0
    try:
        print(config_path(arguments.name).read_text(encoding="utf-8"), end="")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
