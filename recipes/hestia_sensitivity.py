"""``tune run hestia_sensitivity --config NAME``: measure the sensitivity of every layer."""

import sys

from hestia_tune.commands.launch import main


def run(config) -> int:
    """Run the command. Its imports take seconds, so --help does without them."""
    from hestia_tune.commands.sensitivity import run_sensitivity

    return run_sensitivity(config)


if __name__ == "__main__":
    sys.exit(main(run, "hestia_sensitivity"))
