"""``tune run hestia_qat --config NAME``: train a model to ternary weights."""

import sys

if __name__ == "__main__":
    try:
        from hestia_tune.__main__ import main
    except KeyboardInterrupt:  # `main` catches a later one
        sys.exit(130)
    sys.exit(main(["qat", *sys.argv[1:]]))
