"""Define the configs of prepare and convert, and swap one module as a config says.

`HestiaConfig`, `Fairy2iConfig` and `MethodConfig` are registered with torchao, so
``quantize_(model, HestiaConfig(step="prepare"))`` works like torchao's own configs.
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler

from hestia_tune.errors import InputError, require_number
from hestia_tune.methods import EvenMethod, Fairy2iMethod, Method, TernaryMethod
from hestia_tune.methods.fairy2i import Granularity
from hestia_tune.methods.granularity import GroupSize
from hestia_tune.qat.experts import ExpertsWeight, quantized_experts
from hestia_tune.qat.linear import QuantizedLinear
from hestia_tune.qat.tequila_linear import TequilaLinear  # noqa: F401  (registers itself)
from hestia_tune.tensors import pack, packed_formats


@dataclass(frozen=True, kw_only=True)
class QATConfigBase(AOBaseConfig):
    """The base of the configs of all methods.

    Args:
        step: "prepare" swaps quantized linears in. "convert" swaps plain linears with hard weights
            back.
        tau: The temperature until a schedule sets another, at least 0. 0 is straight-through.
        pressure: The pressure until a schedule sets another, in [0, 1].
        target: The kind of weight that "convert" makes: "dense" (the hard weight in its own dtype)
            or a packed format of the method.

    Raises:
        InputError: If an option is wrong.
    """

    step: Literal["prepare", "convert"] = "prepare"
    tau: float = 0.3
    pressure: float = 1.0
    target: str = "dense"

    def __post_init__(self):
        if self.step not in ("prepare", "convert"):
            raise InputError(f'step must be "prepare" or "convert"; got {self.step!r}')
        require_number("tau", self.tau, 0, 100, "the paper starts at 0.3")
        require_number("pressure", self.pressure, 0, 1, "1 is fully quantized")
        allowed = ("dense", *packed_formats(self.method()))
        if self.target not in allowed:
            words = ", ".join(f'"{word}"' for word in allowed)
            raise InputError(f"target must be one of {words}; got {self.target!r}")

    @abc.abstractmethod
    def method(self) -> Method:
        """Return the method."""

    def pack(self, method: Method, latent: Tensor, parameters: Sequence[Tensor] = ()) -> Tensor:
        """Return the weight that replaces a latent weight in "convert", by its layer's method."""
        if self.target == "dense":
            return method.hard(latent, parameters)
        return pack(method, latent, self.target, parameters)


def transform(module: Any, config: QATConfigBase, name: str = "a linear") -> nn.Module:
    """Return the module that replaces a linear in ``quantize_``, for every method.

    For an `ExpertsWeight`, return the layer that "prepare" puts into its module. The errors of
    "convert" show the name. ``quantize_`` does not pass a name.
    """
    if isinstance(module, ExpertsWeight):
        return quantized_experts(module, config.method(), tau=config.tau, pressure=config.pressure)
    if config.step == "convert":
        is_quantized = isinstance(module, QuantizedLinear)
        return module.to_hard_linear(config.pack, name) if is_quantized else module
    if isinstance(module, QuantizedLinear):
        return module
    method = config.method()
    method.check_layer(module.in_features, module.out_features, str(module))
    return QuantizedLinear.from_linear(module, method, tau=config.tau, pressure=config.pressure)


@dataclass(frozen=True, kw_only=True)
class MethodConfig(QATConfigBase):
    """QAT by any method for ``torchao.quantization.quantize_``.

    Args:
        of: The method, such as ``LSQMethod(group_size=64)``.
        step: See `QATConfigBase`, also for ``pressure`` and ``target``.
        tau: See `QATConfigBase`. A method without a temperature ignores it.
    """

    of: Method

    def method(self) -> Method:
        return self.of


@dataclass(frozen=True, kw_only=True)
class HestiaConfig(QATConfigBase):
    """Ternary QAT for ``torchao.quantization.quantize_``.

    Args:
        group_size: Weights that share a scale: an int that divides in_features (128 in the
            paper), "channel" or "tensor".
        scale: "absmean" (Eq. 1) or "learned", a factor per group that training finds. See
            `hestia_tune.methods.TernaryMethod`, also for the next three options.
        threshold: "half" of the scale, or "learned".
        offset: "none" or "learned".
        start: Where learned parameters start: "absmean" or "least_squares".
        codebook: "ternary"; or "binary" (1 bit) or "int2" (2 bits) of
            `hestia_tune.methods.EvenMethod`, which learns no scales.
        target: "dense", "ternary" (a packed `hestia_tune.TernaryTensor`) or "intx" (torchao's int2
            tensor). The other codebooks have "dense", and their own name for a packed weight.
        step: See `QATConfigBase`, also for ``tau`` and ``pressure``.

    Raises:
        InputError: If an option is wrong.

    Note:
        ``quantize_`` by itself takes every linear, the output head too. Pass
        ``filter_fn=hestia_tune.is_transformer_linear``, or use `HestiaQATQuantizer`.
    """

    group_size: GroupSize = 128
    scale: Literal["absmean", "learned"] = "absmean"
    threshold: Literal["half", "learned"] = "half"
    offset: Literal["none", "learned"] = "none"
    start: Literal["absmean", "least_squares"] = "absmean"
    codebook: Literal["ternary", "binary", "int2"] = "ternary"

    def method(self) -> Method:
        group = {"group_size": self.group_size}
        learned = {name: getattr(self, name) for name in ("scale", "threshold", "offset", "start")}
        ternary = TernaryMethod(**group, **learned)
        if self.codebook == "ternary":
            return ternary
        if ternary != TernaryMethod(**group):
            raise InputError(
                "scale, threshold, offset and start are options of the codebook ternary; got "
                f"{ternary.key()} with the codebook {self.codebook}; leave them out"
            )
        return EvenMethod(**group, codebook=self.codebook)


@dataclass(frozen=True, kw_only=True)
class Fairy2iConfig(QATConfigBase):
    """Complex-valued QAT for ``torchao.quantization.quantize_``; tau is in squared radians.

    Args:
        num_stages: Residual stages, 1 to 4, each of one bit per real weight (2 in the paper).
        granularity: "tensor" (two scales per matrix and stage, as in the paper), or the number of
            complex columns that share scales.
        target: "dense" or "fairy2i" (a packed `hestia_tune.Fairy2iTensor`).
        step: See `QATConfigBase`, also for ``tau`` and ``pressure``.

    Raises:
        InputError: If an option is wrong.
    """

    num_stages: int = 2
    granularity: Granularity = "tensor"

    def method(self) -> Method:
        return Fairy2iMethod(num_stages=self.num_stages, granularity=self.granularity)


for _config in (MethodConfig, HestiaConfig, Fairy2iConfig):
    register_quantize_module_handler(_config)(transform)
