"""Writes hard models as files for other runtimes, and reads each file back."""

import lazy_loader

# The names of `__init__.pyi`, which import torch. The names of the formats are read without it.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
