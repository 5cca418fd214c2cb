"""``tune run hestia_sensitivity --config NAME``: Hessian traces of the layers to be quantized."""

import sys

from hestia_tune.commands.launch import main
from hestia_tune.commands.sensitivity import run_sensitivity

if __name__ == "__main__":
    sys.exit(main(run_sensitivity, "hestia_sensitivity"))
