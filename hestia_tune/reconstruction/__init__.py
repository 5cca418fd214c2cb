"""Block reconstruction: a model made low-bit one window of blocks after the other."""

from hestia_tune.reconstruction.engine import Reconstruction, WindowResult, windows
from hestia_tune.reconstruction.layers import require_weights_alone

__all__ = ["Reconstruction", "WindowResult", "require_weights_alone", "windows"]
