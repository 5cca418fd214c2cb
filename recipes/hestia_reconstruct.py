"""``tune run hestia_reconstruct --config NAME``: make blocks ternary, window by window."""

import sys

if __name__ == "__main__":
    try:
        from hestia_tune.commands.launch import main
        from hestia_tune.commands.qat import run_reconstruct
    except KeyboardInterrupt:  # the imports take seconds
        sys.exit(130)
    sys.exit(main(run_reconstruct, "hestia_reconstruct"))
