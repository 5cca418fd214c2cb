from .compressed_tensors import write_compressed_tensors
from .gguf import write_gguf
from .huggingface import write_huggingface
from .mlx import write_mlx
from .onnx import write_onnx
from .openvino import write_openvino

__all__ = [
    "write_compressed_tensors",
    "write_gguf",
    "write_huggingface",
    "write_mlx",
    "write_onnx",
    "write_openvino",
]
