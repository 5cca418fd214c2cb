"""Train pretrained LLMs to ternary weights, by quantization-aware training."""

import lazy_loader

# The names of `__init__.pyi`. Each is imported when it is first used: torch, torchao and torchtune
# take seconds, and --help needs none of them.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

__version__ = "0.1.0"
