"""The packed model as torchtune sees it: a folder to write and to load.

folder/
    model.pt                        packed weights and the rest in bfloat16, torchtune's names
    hestia.json                     the model section, the method, the packed layers
    config.json, tokenizer files    copied
    generate.yaml                   for `tune run generate`, with `PackedWeights` in it
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
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path
from torchtune.training import quantization

from hestia_tune.config.run import TRANSFORMERS_MODEL
from hestia_tune.errors import InputError
from hestia_tune.files import read_json, read_state
from hestia_tune.methods import Method
from hestia_tune.models.build import plain_on_meta, ready_for_inference
from hestia_tune.models.checkpoints import add_biases, load_weights
from hestia_tune.models.folder import DESCRIPTION_FILE
from hestia_tune.qat.linear import select_linears
from hestia_tune.tensors import pack, use_kernel

log = utils.get_logger("DEBUG")
FORMAT_VERSION = 1
_BUILDERS = ("torchtune.models.", "hestia_tune.models.")
WEIGHTS_FILE = "model.pt"


@dataclass(eq=False)
class PackedWeights:
    """torchtune's ``quantizer`` for its own recipes on packed checkpoints, such as generate.

    On a CPU nothing is compiled, though generate asks for it: that takes minutes, to be slower.

    Args:
        method: the key of the checkpoint's method, such as "ternary, group_size=128".
        include, exclude: the layers, as for training; see `hestia_tune.HestiaQATQuantizer`.
        kernel: what multiplies once weights are loaded; see `hestia_tune.use_kernel`. On a GPU
            "auto" leaves it to the compiler, whose products dequantize; with the name of a kernel
            nothing is compiled.
    """

    method: str
    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    kernel: str = "auto"

    def __post_init__(self):
        self._method = Method.from_key(self.method)

    def quantize(self, model: nn.Module) -> nn.Module:
        """Puts empty packed weights, to be loaded, in place of the dense ones; returns ``model``.

        Linears of a shape that the method cannot take stay dense, as in training.
        """
        for name, linear in select_linears(model, self.include, self.exclude or ()).items():
            try:
                self._method.check_layer(linear.in_features, linear.out_features, name)
            except ValueError:
                continue
            empty = pack(self._method, torch.zeros_like(linear.weight.detach()))
            linear.weight = nn.Parameter(empty, requires_grad=False)
            if self._method.needs_training:
                add_biases(model, [f"{name}.bias"])
        model.register_load_state_dict_post_hook(self._loaded)
        return model

    def _loaded(self, model: nn.Module, _: Any) -> None:
        """On a CPU, or with a kernel's name, chooses the kernels and switches the compiler off."""
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
    """A ready torchtune model from a packed folder that `tune run hestia_convert` wrote.

    For speed on a CPU, write the formats ``onnx`` or ``gguf`` and use their programs. They decode
    about twice as fast.

    Args:
        folder: the one with hestia.json in it.
        dtype: of the computation; packed weights present it, all others are cast to it.
        kernel: what multiplies by packed weights; see `hestia_tune.use_kernel`. "auto" may round
            activations to 8 bits; "dequantize" computes as the hard model does, to the last bit.

    Raises:
        InputError: if the folder is of another kind or version, or on an unknown kernel; or if its
            weights are missing.
        InputError: if the library of the named kernel is.
    """
    file = Path(folder) / DESCRIPTION_FILE
    facts = read_json(file) if file.is_file() else {}
    found = (facts.get("format_version"), facts.get("weights"))
    if found != (FORMAT_VERSION, WEIGHTS_FILE):
        raise InputError(
            f"{folder} holds no packed model: {DESCRIPTION_FILE} has format_version {found[0]} and "
            f"weights in {found[1]} instead of {FORMAT_VERSION} and {WEIGHTS_FILE}; give a folder "
            "that `tune run hestia_convert` of this version wrote (convert.formats: [torchao])"
        )
    section = facts["model"]
    _check_builder(section, file)
    if section["_component_"] == TRANSFORMERS_MODEL:  # of this folder, whatever the file says
        section["path"] = str(folder)
    model = plain_on_meta(section)
    state = read_state(Path(folder) / WEIGHTS_FILE)
    load_weights(model, state, str(folder))
    ready_for_inference(model, device, dtype)
    log.info(use_kernel(model, kernel))
    return model


def _check_builder(section: Mapping[str, Any], file: Path) -> None:
    """Refuses a model section of a file that would call anything but a builder of models."""
    name = str(section.get("_component_"))
    plain = all(isinstance(value, bool | int | float | str | None) for value in section.values())
    builder = None
    if plain and name.startswith(_BUILDERS):
        with contextlib.suppress(InstantiationError):
            builder = _get_component_from_path(name)
    # Where it is defined, not where it is found: a path may lead on into what a module imports.
    if not (inspect.isfunction(builder) and f"{builder.__module__}.".startswith(_BUILDERS)):
        raise InputError(
            f"{file} names {name} as the model's builder; only functions of "
            f"{' and '.join(_BUILDERS)} with plain options are called; write the folder anew with "
            "hestia_convert"
        )
