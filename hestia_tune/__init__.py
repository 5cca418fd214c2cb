"""Train pretrained LLMs to ternary weights, by quantization-aware training."""

import logging

import lazy_loader

# torchao says at every import which of its kernels do not fit this machine or this torch. This
# package uses none of them. https://github.com/pytorch/ao/issues/2919
_NOTICES = ("Skipping import of cpp extensions", "Failed to load ")
logging.getLogger("torchao").addFilter(lambda record: not record.getMessage().startswith(_NOTICES))

# The names of `__init__.pyi`. Each is imported when it is first used: torch and torchao take
# seconds, and --help needs none of them.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

__version__ = "0.1.0"
