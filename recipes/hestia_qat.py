"""``tune run hestia_qat --config NAME``: quantization-aware training to ternary weights."""

import sys

from hestia_tune.commands.launch import main
from hestia_tune.commands.qat import run_qat

if __name__ == "__main__":
    sys.exit(main(run_qat, "hestia_qat"))
