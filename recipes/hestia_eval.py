"""``tune run hestia_eval --config NAME``: compare models by zero-shot tasks and perplexity."""

import sys

from hestia_tune.commands.launch import main


def run(config) -> int:
    """Run the command. Its imports take seconds, so --help does without them."""
    from hestia_tune.commands.evaluate import run_evaluation

    return run_evaluation(config)


if __name__ == "__main__":
    sys.exit(main(run, "hestia_eval"))
