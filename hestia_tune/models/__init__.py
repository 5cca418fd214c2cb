"""Models as torchtune has them: built, named, loaded, tokenized, packed."""

from hestia_tune.models.builders import llama
from hestia_tune.models.packed import PackedWeights
from hestia_tune.models.tokenizers import HuggingFaceTokenizer

__all__ = ["HuggingFaceTokenizer", "PackedWeights", "llama"]
