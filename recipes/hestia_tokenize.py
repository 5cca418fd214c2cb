"""``tune run hestia_tokenize --config NAME``: tokenize a text once, for many runs."""

import sys

if __name__ == "__main__":
    try:
        from hestia_tune.commands.launch import main
        from hestia_tune.commands.tokenize import run_tokenize
    except KeyboardInterrupt:  # the imports take seconds
        sys.exit(130)
    sys.exit(main(run_tokenize, "hestia_tokenize"))
