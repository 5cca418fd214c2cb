"""Hard models as files that other runtimes load, each read back before it gets its name."""

from hestia_tune.export.compressed_tensors import write_compressed_tensors
from hestia_tune.export.folder import write_huggingface
from hestia_tune.export.gguf import write_gguf
from hestia_tune.export.onnx import write_onnx

__all__ = ["write_compressed_tensors", "write_gguf", "write_huggingface", "write_onnx"]
