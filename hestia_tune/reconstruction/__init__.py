"""Block reconstruction: a model is made low-bit, one window of blocks after the other."""

from hestia_tune.reconstruction.engine import Reconstruction
from hestia_tune.reconstruction.window import WindowResult, windows

__all__ = ["Reconstruction", "WindowResult", "windows"]
