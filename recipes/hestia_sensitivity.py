"""``tune run hestia_sensitivity --config NAME``: measure the sensitivity of every layer."""

import sys

if __name__ == "__main__":
    try:
        from hestia_tune.commands.launch import main
        from hestia_tune.commands.sensitivity import run_sensitivity
    except KeyboardInterrupt:  # the imports take seconds
        sys.exit(130)
    sys.exit(main(run_sensitivity, "hestia_sensitivity"))
