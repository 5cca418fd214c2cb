"""The components of the methods that Hestia is compared with, under the names of their papers.

Each is put in Hestia's place by one line of the command, `quantizer._component_=hestia_tune.LSQ
~schedule`, and takes data, budget, evaluation and export as they are. None has a temperature:
`StraightThroughComponent` says what that means for the schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torchao.quantization.transform_module import register_quantize_module_handler

from hestia_tune import methods
from hestia_tune.methods.straight_through import StraightThroughMethod
from hestia_tune.qat import QATConfigBase, QATQuantizerBase, transform


@dataclass(frozen=True, kw_only=True)
class MethodConfig(QATConfigBase):
    """QAT by any method for ``torchao.quantization.quantize_``.

    Args:
        of: the method, such as ``LSQMethod(group_size=64)``.
        step, tau, pressure, target: see `QATConfigBase`; a method without a temperature ignores
            ``tau``.
    """

    of: methods.Method

    def method(self) -> methods.Method:
        return self.of


register_quantize_module_handler(MethodConfig)(transform)


class StraightThroughComponent(QATQuantizerBase):
    """A method without a temperature as a component.

    In a config, ``schedule`` then has the pressure alone (``rho``, 0 if it is left out), and
    neither ``tau_init``, ``alpha`` nor ``hard_fraction``: delete the section by ``~schedule``.
    ``sensitivity: auto`` computes nothing.

    Args:
        scale_lr: learning rate of the method's own parameters; None takes the optimizer's.
        include: shell patterns of the linears to quantize; None takes every linear of the
            transformer blocks.
        exclude: shell patterns of linears to leave out.
        skip_incompatible: leave out the linears whose in_features the groups do not divide.
        options: of the method, such as ``group_size`` (128).

    Raises:
        TypeError, ValueError: on an option that the method does not have, or a wrong value.
    """

    method_type: ClassVar[type[StraightThroughMethod]]
    has_temperature = False

    def __init__(
        self,
        *,
        scale_lr: float | None = None,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        skip_incompatible: bool = False,
        **options: Any,
    ):
        method = self.method_type(**options)
        if scale_lr is not None and not method.trained_parameters:
            raise ValueError(
                f"scale_lr is read by methods that learn a scale; {method.name} learns none; "
                "leave it out"
            )
        config = MethodConfig(of=method)
        super().__init__(config, include, exclude, skip_incompatible, parameter_lr=scale_lr)


class AbsMean(StraightThroughComponent):
    """BitNet b1.58's rule; `methods.AbsMeanMethod`: group_size."""

    method_type = methods.AbsMeanMethod


class TWN(StraightThroughComponent):
    """Ternary weight networks; `methods.TWNMethod`: group_size, delta."""

    method_type = methods.TWNMethod


class INT2(StraightThroughComponent):
    """Symmetric two-bit integers; `methods.INT2Method`: group_size, start."""

    method_type = methods.INT2Method


class LSQ(StraightThroughComponent):
    """Learned step size; `methods.LSQMethod`: group_size, start."""

    method_type = methods.LSQMethod


class DLT(StraightThroughComponent):
    """A learned step and offset; `methods.DLTMethod`: group_size, start."""

    method_type = methods.DLTMethod


class Tequila(StraightThroughComponent):
    """AbsMean with a bias of dead weights; `methods.TequilaMethod`: group_size, epsilon."""

    method_type = methods.TequilaMethod


class SEQ(StraightThroughComponent):
    """ParetoQ's stretched levels; `methods.SEQMethod`: group_size, start, bits."""

    method_type = methods.SEQMethod
