"""The components of the methods that Hestia is compared with, under the names of their papers.

Each is put in Hestia's place by one line of the command, `quantizer._component_=hestia_tune.LSQ
~schedule`, and takes data, budget, evaluation and export as they are. None has a temperature:
`StraightThroughComponent` says what that means for the schedule.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from hestia_tune import methods
from hestia_tune.qat.prepare import MethodConfig, QATQuantizerBase


class StraightThroughComponent(QATQuantizerBase):
    """A method without a temperature as a component.

    In a config, ``schedule`` then has the pressure alone (``rho``, 0 if it is left out), and
    neither ``tau_init``, ``alpha`` nor ``hard_fraction``: delete the section by ``~schedule``.
    ``sensitivity: auto`` computes nothing.

    Args:
        scale_lr, include, exclude, skip_incompatible: see `QATQuantizerBase`.
        options: of the method, such as ``group_size`` (128).

    Raises:
        InputError: on an option that the method does not have, or a wrong value.
    """

    method_type: ClassVar[type[methods.GroupMethod]]
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
        config = MethodConfig(of=self.method_type(**options))
        super().__init__(config, include, exclude, skip_incompatible, scale_lr)


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
