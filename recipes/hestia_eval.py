"""``tune run hestia_eval --config NAME``: compare models by zero-shot tasks and perplexity."""

import sys

if __name__ == "__main__":
    try:
        from hestia_tune.__main__ import main
    except KeyboardInterrupt:  # `main` catches a later one
        sys.exit(130)
    sys.exit(main(["eval", *sys.argv[1:]]))
