"""``tune run hestia_qat --config NAME``: train a model to ternary weights."""

import sys

if __name__ == "__main__":
    try:
        from hestia_tune.commands.launch import main
        from hestia_tune.commands.qat import run_qat
    except KeyboardInterrupt:  # the imports take seconds
        sys.exit(130)
    sys.exit(main(run_qat, "hestia_qat"))
