"""Loads the packed model that hestia_convert writes for torchtune.

folder/
    model.pt                        packed weights, other weights in bfloat16, torchtune's names
    hestia.json                     the model section, the method, the packed layers
    config.json, tokenizer files    copies from the model's folder
    generate.yaml                   a config for `tune run generate`, which uses `PackedWeights`
"""

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtune import utils
from torchtune.training import quantization

from hestia_tune.config.run import TRANSFORMERS_MODEL
from hestia_tune.errors import InputError
from hestia_tune.files import read_json, read_state
from hestia_tune.methods import Method
from hestia_tune.models.build import find_component, plain_on_meta, ready_for_inference
from hestia_tune.models.checkpoints import add_parameters, load_weights
from hestia_tune.models.folder import DESCRIPTION_FILE
from hestia_tune.qat.select import select_layers
from hestia_tune.tensors import pack, use_kernel

log = utils.get_logger("DEBUG")
FORMAT_VERSION = 1
_BUILDERS = ("torchtune.models.", "hestia_tune.models.")
WEIGHTS_FILE = "model.pt"


@dataclass(eq=False)
class PackedWeights:
    """The ``quantizer`` component that lets torchtune's own recipes load packed weights.

    torchtune's generate recipe asks for compilation. On a CPU nothing is compiled, because
    compilation takes minutes and the result is slower.

    Args:
        method: The key of the checkpoint's method, such as "ternary, group_size=128".
        layers: Name -> key of the method, for every layer with another method.
        include: The layers to pack, as for training; see `hestia_tune.HestiaQATQuantizer`.
        exclude: The layers to leave out, as for training.
        kernel: The kernel that multiplies by packed weights; see `hestia_tune.use_kernel`. On a
            GPU, "auto" compiles products that dequantize; with the name of a kernel nothing is
            compiled.
    """

    method: str
    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    kernel: str = "auto"
    layers: Mapping[str, str] | None = None

    def __post_init__(self):
        self._method = Method.from_key(self.method)
        self._others = {name: Method.from_key(key) for name, key in (self.layers or {}).items()}

    def quantize(self, model: nn.Module) -> nn.Module:
        """Replace dense weights by empty packed weights, and return the model to be loaded.

        A linear stays dense if the method cannot quantize its shape, as in training. Stacks are
        dense in the file.
        """
        for name, linear in select_layers(model, self.include, self.exclude or ()).items():
            if not isinstance(linear, nn.Linear):
                continue
            method = self._others.get(name, self._method)
            try:
                method.check_layer(linear.in_features, linear.out_features, name)
            except ValueError:
                continue
            zeros = torch.zeros_like(linear.weight.detach())
            empty = pack(method, zeros, parameters=method.initial_parameters(zeros))
            linear.weight = nn.Parameter(empty, requires_grad=False)
            add_parameters(model, [f"{name}.{key}" for key in method.extra_names])
        model.register_load_state_dict_post_hook(self._loaded)
        return model

    def _loaded(self, model: nn.Module, _: Any) -> None:
        """Choose the kernels and switch the compiler off, unless a GPU should compile."""
        device = next(model.parameters()).device
        if device.type == "cpu" or self.kernel not in ("auto", "dequantize"):
            torch.compiler.set_stance("force_eager")
            log.info(use_kernel(model, self.kernel))


quantization._quantizer_to_mode[PackedWeights] = "hestia"


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
            may round products to bfloat16. "dequantize" gives the hard model's results to the last
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
        with contextlib.suppress(InputError):
            builder = find_component(name, "model")
    # Check the module that defines the function, because a name may lead into imported modules.
    if not (inspect.isfunction(builder) and f"{builder.__module__}.".startswith(_BUILDERS)):
        raise InputError(
            f"{file} names {name} as the model's builder; only functions of "
            f"{' and '.join(_BUILDERS)} with plain options can be called; write the folder again "
            "with hestia_convert"
        )
