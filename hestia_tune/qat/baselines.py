"""The components of the methods that Hestia is compared with, under the names of their papers.

One line of the command puts a method in Hestia's place: `quantizer._component_=hestia_tune.LSQ
~schedule`. Data, budget, evaluation and export stay as they are. No method here has a temperature:
`StraightThroughComponent` says what that means for the schedule.
"""

from hestia_tune import methods
from hestia_tune.qat.prepare import Component


class StraightThroughComponent(Component):
    """A method without a temperature as a component; its options are the fields of the method.

    In a config, ``schedule`` then has only the pressure (``rho``, 0 if it is left out). It must not
    have ``tau_init``, ``alpha`` or ``hard_fraction``: delete the section by ``~schedule``.
    ``sensitivity: auto`` computes nothing.
    """

    has_temperature = False


class AbsMean(StraightThroughComponent):
    """BitNet b1.58's rule; `methods.AbsMeanMethod`: group_size."""

    options_type = methods.AbsMeanMethod


class TWN(StraightThroughComponent):
    """Ternary weight networks; `methods.TWNMethod`: group_size, delta."""

    options_type = methods.TWNMethod


class INT2(StraightThroughComponent):
    """Symmetric two-bit integers; `methods.INT2Method`: group_size, start."""

    options_type = methods.INT2Method


class LSQ(StraightThroughComponent):
    """Learned step size; `methods.LSQMethod`: group_size, start."""

    options_type = methods.LSQMethod


class DLT(StraightThroughComponent):
    """A learned step and offset; `methods.DLTMethod`: group_size, start."""

    options_type = methods.DLTMethod


class Tequila(StraightThroughComponent):
    """AbsMean with a bias of dead weights; `methods.TequilaMethod`: group_size, epsilon."""

    options_type = methods.TequilaMethod


class SEQ(StraightThroughComponent):
    """ParetoQ's stretched levels; `methods.SEQMethod`: group_size, start, bits."""

    options_type = methods.SEQMethod
