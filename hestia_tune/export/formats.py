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


# What groups of 256 cost, as measured on docs/convert.md ("Groups of 256").
GROUPS_OF_256 = (
    "groups of 256 instead of 128 raised the loss of a small Llama by 0.04 without training, and by "
    "less than 0.001 after 100 steps (docs/convert.md)"
)


def suggested_group_size(widths: Iterable[int], formats: Iterable[str]) -> int | str:
    """Return the group size for a model whose formats are known.

    GGUF's type TQ2_0, which is small and fast on a CPU, has one scale for 256 weights.

    Args:
        widths: Length of the rows of every quantized weight.
        formats: Names of the formats that can hold the model.

    Returns:
        256 if it divides every row and "gguf" is one of the formats. Otherwise the largest of 128,
        the paper's size, 64 and 32 that divides every row, or else "channel".
    """
    every, sizes = set(widths), (128, 64, 32)
    if "gguf" in set(formats):
        sizes = (256, *sizes)
    fitting = (size for size in sizes if not any(width % size for width in every))
    return next(fitting, "channel")


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
