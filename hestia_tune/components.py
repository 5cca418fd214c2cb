"""Two-step quantizer components, ``prepare(model)`` and ``convert(model)``, one per method.

They wrap the torchao configs of `hestia_tune.qat`, know which linears to take and name them in
their errors.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torchao.quantization import quantize_
from torchao.quantization.transform_module import register_quantize_module_handler

from hestia_tune.qat import (
    HestiaConfig,
    QATConfigBase,
    QuantizedLinear,
    quantized_linears,
    transform,
)
from hestia_tune.quantizers import Fairy2iQuantizer, Quantizer
from hestia_tune.quantizers.fairy2i import (
    Granularity,
    validate_granularity,
    validate_num_stages,
)
from hestia_tune.quantizers.granularity import GroupSize
from hestia_tune.selection import clean_fqn, select_linears
from hestia_tune.tensors import Fairy2iTensor

log = logging.getLogger(__name__)


class QATQuantizerBase:
    """Two-step quantizer component: ``prepare(model)`` before training, ``convert(model)`` after.

    Args:
        config: the method and its options.
        include, exclude: which linears; see `select_linears`.
        skip_incompatible: leave out the linears whose shape the method cannot take, instead of
            raising an error.

    Attributes:
        skipped: names of the linears that `prepare` left out for their shape.
    """

    def __init__(
        self,
        config: QATConfigBase,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        skip_incompatible: bool = False,
    ):
        for option, patterns in (("include", include), ("exclude", exclude)):
            if isinstance(patterns, str):
                raise TypeError(f"{option} must be a list of patterns; got the string {patterns!r}")
        self.config = config
        self.quantizer = config.quantizer()
        self._include = None if include is None else list(include)
        self._exclude = list(exclude or ())
        self._skip_incompatible = skip_incompatible
        self.skipped: list[str] = []

    def _step(self, step: str) -> QATConfigBase:
        options = {name: getattr(self.config, name) for name in self.config.__dataclass_fields__}
        return type(self.config)(**(options | {"step": step}))

    def prepare(self, model: nn.Module) -> nn.Module:
        """Swaps the selected linears for quantized ones, in place; returns ``model``.

        Raises:
            ValueError: if a pattern matches nothing, or a layer cannot be quantized; the error
                names the layer, and the model is as it was.
        """
        chosen = select_linears(model, self._include, self._exclude)
        self.skipped = []
        for fqn, linear in chosen.items():
            try:
                self.quantizer.check_layer(linear.in_features, linear.out_features, fqn)
            except ValueError as error:
                if not self._skip_incompatible:
                    raise
                log.warning("not quantized: %s", error)
                self.skipped.append(fqn)
        chosen = {fqn: linear for fqn, linear in chosen.items() if fqn not in self.skipped}
        if not chosen:
            raise ValueError(
                f"none of the {len(self.skipped)} selected linears can be quantized by "
                f"{self.quantizer.key()}"
            )
        quantize_(
            model, self._step("prepare"), filter_fn=lambda module, fqn: clean_fqn(fqn) in chosen
        )
        # A module that stands in one parent under two names has been swapped under the first only.
        by_weight = {id(layer.weight): layer for layer in quantized_linears(model).values()}
        for fqn, module in list(model.named_modules(remove_duplicate=False)):
            if clean_fqn(fqn) in chosen and not isinstance(module, QuantizedLinear):
                parent, _, name = fqn.rpartition(".")
                setattr(model.get_submodule(parent), name, by_weight[id(module.weight)])
        return model

    def convert(self, model: nn.Module) -> nn.Module:
        """Swaps every quantized linear for a plain one with its hard weight, in place.

        Linears that shared a latent weight share the hard one; a weight shared with something that
        is not quantized, such as an embedding, is shared no longer.
        """
        latents = {
            fqn: module.weight
            for fqn, module in model.named_modules()
            if isinstance(module, QuantizedLinear)
        }
        quantize_(model, self._step("convert"), filter_fn=lambda module, fqn: fqn in latents)
        hard: dict[int, nn.Parameter] = {}
        for fqn, latent in latents.items():
            linear = model.get_submodule(fqn)
            linear.weight = hard.setdefault(id(latent), linear.weight)
        return model


class HestiaQATQuantizer(QATQuantizerBase):
    """Ternary QAT as a component (``_component_: hestia_tune.HestiaQATQuantizer``).

    Args:
        group_size: weights that share a scale: an int that divides in_features (128 in the
            paper), "channel" or "tensor".
        include: shell patterns of the linears to quantize; None takes every linear of the
            transformer blocks (attention q, k, v, output; MLP gate, up, down).
        exclude: shell patterns of linears to leave out.
        skip_incompatible: leave out the linears whose in_features the groups do not divide.

    Example:
        >>> quantizer = HestiaQATQuantizer(group_size=128)
        >>> model = quantizer.prepare(model)      # train, a ScheduleDriver sets tau and pressure
        >>> model = quantizer.convert(model)      # plain linears, every weight gamma·{-1, 0, 1}
    """

    def __init__(
        self,
        group_size: GroupSize = 128,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        skip_incompatible: bool = False,
    ):
        config = HestiaConfig(group_size=group_size)
        super().__init__(config, include, exclude, skip_incompatible)


@dataclass(frozen=True, kw_only=True)
class Fairy2iConfig(QATConfigBase):
    """Complex-valued QAT for ``torchao.quantization.quantize_``; tau is in squared radians.

    Args:
        num_stages: residual stages, 1 to 4, each one bit per real weight (2 in the paper).
        granularity: "tensor" (the paper's: two scales per matrix and stage) or an int, the complex
            columns that share them.
        target: what "convert" makes of a weight: "dense" or "fairy2i" (a packed
            `hestia_tune.Fairy2iTensor`).
        step, tau, pressure: see `hestia_tune.qat.QATConfigBase`.

    Raises:
        TypeError, ValueError: on values that are out of range.
    """

    num_stages: int = 2
    granularity: Granularity = "tensor"
    target: Literal["dense", "fairy2i"] = "dense"

    def __post_init__(self):
        super().__post_init__()
        validate_num_stages(self.num_stages)
        validate_granularity(self.granularity)
        if self.target not in ("dense", "fairy2i"):
            raise ValueError(f'target must be "dense" or "fairy2i"; got {self.target!r}')

    def quantizer(self) -> Fairy2iQuantizer:
        return Fairy2iQuantizer(num_stages=self.num_stages, granularity=self.granularity)

    def pack(self, latent: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
        if self.target == "dense":
            return super().pack(latent, quantizer)
        codes, scales = quantizer.codes(latent)
        return Fairy2iTensor.from_codes(codes, scales, dtype=latent.dtype)


register_quantize_module_handler(Fairy2iConfig)(transform)


class Fairy2iQATQuantizer(QATQuantizerBase):
    """Complex-valued QAT as a component (``_component_: hestia_tune.Fairy2iQATQuantizer``).

    With ``schedule: {rho: 0.0, tau_init: 0.0}`` it is straight-through (*Fairy2i* in the paper's
    Table 3), with a temperature relaxed (*Fairy2i-H*).

    Args:
        num_stages, granularity: see `Fairy2iConfig`.
        include: shell patterns of the linears to quantize; None takes every linear of the
            transformer blocks.
        exclude: shell patterns of linears to leave out.
        skip_incompatible: leave out the linears with an odd number of rows or columns.
    """

    def __init__(
        self,
        num_stages: int = 2,
        granularity: Granularity = "tensor",
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        skip_incompatible: bool = False,
    ):
        config = Fairy2iConfig(num_stages=num_stages, granularity=granularity)
        super().__init__(config, include, exclude, skip_incompatible)
