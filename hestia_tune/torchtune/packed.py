"""Lets torchtune's own recipes, such as `tune run generate`, load packed weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtune import utils
from torchtune.training import quantization

from hestia_tune.methods import Method
from hestia_tune.models.sources import add_parameters
from hestia_tune.qat.select import select_layers
from hestia_tune.tensors import pack, use_kernel

log = utils.get_logger("DEBUG")


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

        A linear stays dense if the method cannot quantize its shape, as in training. The weights of
        experts are dense in the file.
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
