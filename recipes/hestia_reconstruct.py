"""``tune run hestia_reconstruct --config NAME``: make blocks ternary, window by window."""

import sys

from hestia_tune.commands.launch import main


def run(config) -> int:
    """Run the command. Its imports take seconds, so --help does without them."""
    from hestia_tune.commands.qat import run_reconstruct

    return run_reconstruct(config)


if __name__ == "__main__":
    sys.exit(main(run, "hestia_reconstruct"))
