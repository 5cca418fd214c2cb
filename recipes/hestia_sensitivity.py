"""``tune run hestia_sensitivity --config NAME``: measure the sensitivity of every layer."""

import sys

if __name__ == "__main__":
    try:
        from hestia_tune.__main__ import main
    except KeyboardInterrupt:  # `main` catches a later one
        sys.exit(130)
    sys.exit(main(["sensitivity", *sys.argv[1:]]))
