"""``tune run hestia_reconstruct --config NAME``: a hard model, one window of blocks at a time."""

import sys

if __name__ == "__main__":
    try:
        from hestia_tune.commands.launch import main
        from hestia_tune.commands.reconstruct import run_reconstruct
    except KeyboardInterrupt:  # the imports take seconds
        sys.exit(130)
    sys.exit(main(run_reconstruct, "hestia_reconstruct"))
