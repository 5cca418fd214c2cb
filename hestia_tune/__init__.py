"""Train pretrained LLMs to ternary weights, by quantization-aware training."""

import logging

import lazy_loader

# torchao 0.15 has kernels for one release of torch alone, which this package does not use, and says
# so at every import with another one. `torchtune` needs this torchao (see pyproject.toml).
logging.getLogger("torchao").addFilter(
    lambda record: not record.getMessage().startswith("Skipping import of cpp extensions")
)

# The names of `__init__.pyi`. Each is imported when it is first used: torch, torchao and torchtune
# take seconds, and --help needs none of them.
_listed, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    """Return a name of `__init__.pyi`, or the component or the config of any other method."""
    if name in __all__ or not name[:1].isupper():  # Modules have no capitals.
        return _listed(name)
    from hestia_tune.qat import prepare

    try:
        return prepare.__getattr__(name)
    except AttributeError:
        return _listed(name)  # It raises the error with the name of this package.


__version__ = "0.1.0"
