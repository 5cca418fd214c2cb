"""``tune run hestia_reconstruct --config NAME``: make blocks ternary, window by window."""

import sys

if __name__ == "__main__":
    try:
        from hestia_tune.commands.launch import main
    except KeyboardInterrupt:  # `main` catches a later one
        sys.exit(130)
    sys.exit(main("hestia_tune.commands.qat:run_reconstruct", "hestia_reconstruct"))
