"""Loads the packed model that hestia_convert writes in the format torchao.

folder/
    model.pt                        packed weights, other weights in bfloat16, the model's names
    hestia.json                     the model section, the method, the packed layers
    config.json, tokenizer files    copies from the model's folder
    generate.yaml                   a config for `tune run generate`, which loads it by
                                    `hestia_tune.torchtune.packed.PackedWeights`
"""

import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hestia_tune.components import find_component, has_torchtune
from hestia_tune.config.run import TRANSFORMERS_MODEL
from hestia_tune.errors import InputError
from hestia_tune.files import read_json, read_state
from hestia_tune.models.build import plain_on_meta, ready_for_inference
from hestia_tune.models.checkpoints import load_weights
from hestia_tune.models.folder import DESCRIPTION_FILE
from hestia_tune.tensors import use_kernel

log = logging.getLogger(__name__)
FORMAT_VERSION = 1
_BUILDERS = ("torchtune.models.", "hestia_tune.models.")
# `hestia_tune.models.llama` is defined there.
_HOMES = (*_BUILDERS, "hestia_tune.torchtune.models.")
WEIGHTS_FILE = "model.pt"


def load_quantized(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    kernel: str = "auto",
) -> nn.Module:
    """Load a packed folder that `tune run hestia_convert` wrote as a model for inference.

    For speed on a CPU, write the formats ``onnx`` or ``gguf`` and use their programs. They decode
    about twice as fast.

    Args:
        folder: The folder that contains hestia.json.
        device: The device of the model.
        dtype: The dtype of the computation. Packed weights appear in this dtype, and all other
            weights are cast to it.
        kernel: The kernel that multiplies by packed weights; see `hestia_tune.use_kernel`. "auto"
            may round activations to 8 bits. "dequantize" gives the hard model's results to the last
            bit.

    Raises:
        InputError: If the folder is of another kind or version, if its weights are missing, if the
            kernel is unknown, or if the kernel's library is missing.
    """
    file = Path(folder) / DESCRIPTION_FILE
    description = read_json(file) if file.is_file() else {}
    version, weights = description.get("format_version"), description.get("weights")
    if (version, weights) != (FORMAT_VERSION, WEIGHTS_FILE):
        raise InputError(
            f"{folder} holds no packed model: {DESCRIPTION_FILE} has format_version {version} and "
            f"weights in {weights} instead of {FORMAT_VERSION} and {WEIGHTS_FILE}; give a folder "
            "that `tune run hestia_convert` of this version wrote (convert.formats: [torchao])"
        )
    section = description["model"]
    _check_builder(section, file)
    if section["_component_"] == TRANSFORMERS_MODEL:  # read this folder's config.json only
        section["path"] = str(folder)
    model = plain_on_meta(section)
    load_weights(model, read_state(Path(folder) / WEIGHTS_FILE), str(folder))
    ready_for_inference(model, device, dtype)
    log.info(use_kernel(model, kernel))
    return model


def _check_builder(section: Mapping[str, Any], file: Path) -> None:
    """Raise InputError if a model section in a file calls anything but a builder of models."""
    name = str(section.get("_component_"))
    plain = all(isinstance(value, bool | int | float | str | None) for value in section.values())
    builder = None
    if plain and name.startswith(_BUILDERS):
        try:
            builder = find_component(name, "model")
        except InputError:
            if not has_torchtune():  # the error has the command that installs it
                raise
    # Check the module that defines the function, because a name may lead into imported modules.
    if not (inspect.isfunction(builder) and f"{builder.__module__}.".startswith(_HOMES)):
        raise InputError(
            f"{file} names {name} as the model's builder; only functions of "
            f"{' and '.join(_BUILDERS)} with plain options can be called; write the folder again "
            "with hestia_convert"
        )
