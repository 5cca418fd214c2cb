"""Writes hard models as files for other runtimes, and reads each file back."""

from hestia_tune.export.compressed_tensors import write_compressed_tensors
from hestia_tune.export.folder import write_huggingface
from hestia_tune.export.gguf import write_gguf
from hestia_tune.export.mlx import write_mlx
from hestia_tune.export.onnx import write_onnx
from hestia_tune.export.openvino import write_openvino

__all__ = [
    "write_compressed_tensors",
    "write_gguf",
    "write_huggingface",
    "write_mlx",
    "write_onnx",
    "write_openvino",
]
