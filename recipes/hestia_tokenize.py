"""``tune run hestia_tokenize --config NAME``: token shards, for those who train many times."""

import sys

from hestia_tune.commands.launch import main
from hestia_tune.commands.tokenize import run_tokenize

if __name__ == "__main__":
    sys.exit(main(run_tokenize, "hestia_tokenize"))
