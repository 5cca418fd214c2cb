"""Block reconstruction: a model made low-bit one window of blocks after the other."""

from hestia_tune.reconstruction.engine import Reconstruction, WindowResult, windows

__all__ = ["Reconstruction", "WindowResult", "windows"]
