"""``tune run hestia_qat --config NAME``: train a model to ternary weights."""

import sys

from hestia_tune.commands.launch import main


def run(config) -> int:
    """Run the command. Its imports take seconds, so --help does without them."""
    from hestia_tune.commands.qat import run_qat

    return run_qat(config)


if __name__ == "__main__":
    sys.exit(main(run, "hestia_qat"))
