"""The formats that `hestia_convert` writes, one line each, in the order in which they are shown.

A line is all that the rest of the package knows of a format: `init`, `validate`, `convert`, the
choices of ``convert.formats``, the errors and the table of docs/formats.md take everything else
from the object that the line names. The names cost no import, so that config and --help stay fast.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hestia_tune.export.format import Format

# Name -> "module:object" of a `hestia_tune.export.format.Format`.
FORMATS = {
    "torchao": "hestia_tune.export.torchao:TORCHAO",
    "intx": "hestia_tune.export.torchao:INTX",
    "huggingface": "hestia_tune.export.huggingface:HUGGINGFACE",
    "compressed_tensors": "hestia_tune.export.compressed_tensors:COMPRESSED_TENSORS",
    "gguf": "hestia_tune.export.gguf:GGUF",
    "onnx": "hestia_tune.export.onnx:ONNX",
    "mlx": "hestia_tune.export.mlx:MLX",
    "openvino": "hestia_tune.export.openvino:OPENVINO",
}


def load_format(name: str) -> Format:
    """Return the format of a name in `FORMATS`. Its module is imported when it is first needed."""
    return pkgutil.resolve_name(FORMATS[name])


def all_formats() -> Iterator[Format]:
    """Yield every format, in the order of `FORMATS`."""
    yield from map(load_format, FORMATS)
