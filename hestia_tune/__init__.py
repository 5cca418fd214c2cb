"""Train pretrained LLMs to ternary weights, by quantization-aware training."""

import importlib
import logging

import lazy_loader

# Logger -> what its notices say when torchao is imported: that kernels do not fit this machine or
# this torch, that an enum is registered in an old way, and that CUDA's compiler is here without a
# GPU. This package uses none of them. https://github.com/pytorch/ao/issues/2919
_NOTICES = {
    "torchao": ("Skipping import of cpp extensions", "Failed to load "),
    "torch.utils._pytree": ("is an Enum subclass",),
    "torch.utils.cpp_extension": ("No CUDA runtime is found",),
}
for _name, _texts in _NOTICES.items():
    logging.getLogger(_name).addFilter(
        lambda record, _texts=_texts: not any(text in record.getMessage() for text in _texts)
    )

# The names of `__init__.pyi`. Each is imported when it is first used: torch and torchao take
# seconds, and --help needs none of them.
_listed, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    """Return a name of `__init__.pyi`, or the component or the config of any other method."""
    if name in __all__ or not name[:1].isupper():  # Modules have no capitals.
        return _listed(name)
    prepare = importlib.import_module("hestia_tune.qat.prepare")
    try:
        return prepare.__getattr__(name)
    except AttributeError:
        return _listed(name)  # It raises the error with the name of this package.


__version__ = "0.1.0"
