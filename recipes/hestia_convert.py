"""``tune run hestia_convert --config NAME``: the hard model as files that runtimes load."""

import sys

from hestia_tune.commands.convert import run_convert
from hestia_tune.commands.launch import main

if __name__ == "__main__":
    sys.exit(main(run_convert, "hestia_convert"))
