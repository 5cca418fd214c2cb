"""``tune run hestia_tokenize --config NAME``: tokenize a text once, for many runs."""

import sys

from hestia_tune.commands.launch import main


def run(config) -> int:
    """Run the command. Its imports take seconds, so --help does without them."""
    from hestia_tune.commands.tokenize import run_tokenize

    return run_tokenize(config)


if __name__ == "__main__":
    sys.exit(main(run, "hestia_tokenize"))
