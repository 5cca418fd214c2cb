"""``tune run hestia_reconstruct --config NAME``: a hard model, one window of blocks at a time."""

import sys

from hestia_tune.commands.launch import main
from hestia_tune.commands.reconstruct import run_reconstruct

if __name__ == "__main__":
    sys.exit(main(run_reconstruct, "hestia_reconstruct"))
