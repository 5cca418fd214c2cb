"""``tune run hestia_convert --config NAME``: write the hard model as files that runtimes load."""

import sys

if __name__ == "__main__":
    try:
        from hestia_tune.__main__ import main
    except KeyboardInterrupt:  # `main` catches a later one
        sys.exit(130)
    sys.exit(main(["convert", *sys.argv[1:]]))
