"""``tune run hestia_convert --config NAME``: write the hard model as files that runtimes load."""

import sys

from hestia_tune.commands.launch import main


def run(config) -> int:
    """Run the command. Its imports take seconds, so --help does without them."""
    from hestia_tune.commands.convert import run_convert

    return run_convert(config)


if __name__ == "__main__":
    sys.exit(main(run, "hestia_convert"))
