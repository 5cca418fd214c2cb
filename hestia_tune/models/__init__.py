"""Models of a config: built, named, loaded, tokenized, packed."""

from typing import Any

from hestia_tune.components import torchtune_module
from hestia_tune.models.decoder import HuggingFaceCheckpointer, hugging_face
from hestia_tune.models.tokenizers import AutoTokenizer, HuggingFaceTokenizer

__all__ = ["AutoTokenizer", "HuggingFaceCheckpointer", "HuggingFaceTokenizer", "hugging_face"]

# Component of torchtune's models -> its module in `hestia_tune.torchtune`, for configs.
_NEED_TORCHTUNE = {"PackedWeights": "models", "llama": "models"}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCHTUNE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(torchtune_module(_NEED_TORCHTUNE[name], f"{__name__}.{name}"), name)
