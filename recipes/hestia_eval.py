"""``tune run hestia_eval --config NAME``: zero-shot tasks and perplexity, models side by side."""

import sys

from hestia_tune.commands.evaluate import run_evaluation
from hestia_tune.commands.launch import main

if __name__ == "__main__":
    sys.exit(main(run_evaluation, "hestia_eval"))
