"""Checks whether a format can hold a model.

The checks read names, shapes and config.json, but no weight. `hestia_convert` makes them before it
writes, and training makes them before its first step.
"""

from collections.abc import Iterable, Mapping

from hestia_tune.config.sections import ConvertConfig
from hestia_tune.errors import InputError
from hestia_tune.export.compressed_tensors import layout_of
from hestia_tune.export.gguf import check_gguf
from hestia_tune.export.linears import check_products
from hestia_tune.export.mlx import mlx_blocks
from hestia_tune.export.onnx import block_of
from hestia_tune.export.openvino import check_openvino
from hestia_tune.methods import Method
from hestia_tune.models.folder import ModelFolder

_CHECKS = {
    "compressed_tensors": layout_of,
    "intx": check_products,
    "mlx": mlx_blocks,
    "onnx": block_of,
    "openvino": check_openvino,
}


def check_format(
    name: str, source: ModelFolder, methods: Mapping[str, Method], settings: ConvertConfig
) -> None:
    """Raise InputError if a model cannot be written in a format.

    Args:
        name: Name of the format.
        source: The model.
        methods: Name -> method of every quantized layer.
        settings: The section that has the options of the formats.

    Raises:
        InputError: If the method, the architecture or a layer does not fit the format, or if a
            package is missing.
    """
    check_methods(methods, [name])
    if name == "gguf":
        check_gguf(source, settings.block_type)
    elif name in _CHECKS:
        _CHECKS[name](source)


def check_methods(methods: Mapping[str, Method], formats: Iterable[str]) -> None:
    """Raise InputError if the method of a layer cannot be written in one of these formats.

    Args:
        methods: Name -> method of every quantized layer.
        formats: Names of formats.
    """
    formats, names = list(formats), {}
    for name, method in methods.items():
        names.setdefault(method, name)
    for method, name in names.items():
        try:
            method.check_file_formats(formats)
        except InputError as error:
            raise InputError(f"{name}: {error}" if len(names) > 1 else str(error)) from None
