"""Train pretrained LLMs to ternary weights, by quantization-aware training."""

import logging

import lazy_loader

# Logger -> what its notices say when torchao is imported: that kernels do not fit this machine or
# this torch, and that an enum is registered in an old way. This package uses none of them.
# https://github.com/pytorch/ao/issues/2919
_NOTICES = {
    "torchao": ("Skipping import of cpp extensions", "Failed to load "),
    "torch.utils._pytree": ("is an Enum subclass",),
}
for _name, _texts in _NOTICES.items():
    logging.getLogger(_name).addFilter(
        lambda record, _texts=_texts: not any(text in record.getMessage() for text in _texts)
    )

# The names of `__init__.pyi`. Each is imported when it is first used: torch and torchao take
# seconds, and --help needs none of them.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

__version__ = "0.1.0"
