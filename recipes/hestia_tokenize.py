"""``tune run hestia_tokenize --config NAME``: tokenize a text once, for many runs."""

import sys

if __name__ == "__main__":
    try:
        from hestia_tune.__main__ import main
    except KeyboardInterrupt:  # `main` catches a later one
        sys.exit(130)
    sys.exit(main(["tokenize", *sys.argv[1:]]))
