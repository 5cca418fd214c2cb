"""Models as torchtune has them: built, named, loaded, tokenized, packed."""

from hestia_tune.models.build import llama
from hestia_tune.models.hugging_face_files import HuggingFaceCheckpointer
from hestia_tune.models.hugging_face_model import hugging_face
from hestia_tune.models.packed import PackedWeights
from hestia_tune.models.tokenizers import AutoTokenizer, HuggingFaceTokenizer

__all__ = [
    "AutoTokenizer",
    "HuggingFaceCheckpointer",
    "HuggingFaceTokenizer",
    "PackedWeights",
    "hugging_face",
    "llama",
]
