"""``tune run hestia_reconstruct --config NAME``: make blocks ternary, window by window."""

import sys

if __name__ == "__main__":
    try:
        from hestia_tune.__main__ import main
    except KeyboardInterrupt:  # `main` catches a later one
        sys.exit(130)
    sys.exit(main(["reconstruct", *sys.argv[1:]]))
