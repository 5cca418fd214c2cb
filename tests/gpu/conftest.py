"""Tests here use what the tests beside them define."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "integrations")]
