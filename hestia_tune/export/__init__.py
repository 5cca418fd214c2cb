"""Hard models as files that other runtimes load, each read back before it gets its name."""

from hestia_tune.export.compressed_tensors import write_compressed_tensors
from hestia_tune.export.gguf import gguf_summary, write_gguf
from hestia_tune.export.huggingface import write_huggingface

__all__ = ["gguf_summary", "write_compressed_tensors", "write_gguf", "write_huggingface"]
