"""``tune run hestia_convert --config NAME``: write the hard model as files that runtimes load."""

import sys

if __name__ == "__main__":
    try:
        from hestia_tune.commands.convert import run_convert
        from hestia_tune.commands.launch import main
    except KeyboardInterrupt:  # the imports take seconds
        sys.exit(130)
    sys.exit(main(run_convert, "hestia_convert"))
