"""Offer the methods that Hestia is compared with as components, under the names of their papers.

One part of the command line puts a method in Hestia's place: `quantizer._component_=hestia_tune.LSQ
~schedule`. Data, budget, evaluation and export do not change. No method here has a temperature.
`StraightThroughComponent` explains what the schedule may then contain.
"""

from hestia_tune import methods
from hestia_tune.qat.prepare import Component


class StraightThroughComponent(Component):
    """A method without a temperature as a component; its options are the fields of the method.

    In a config, ``schedule`` may then set only the pressure (``rho``, 0 by default). It must not
    set ``tau_init``, ``alpha`` or ``hard_fraction``: delete the section by ``~schedule``.
    ``sensitivity: auto`` computes nothing.
    """

    has_temperature = False


class AbsMean(StraightThroughComponent):
    """The rule of BitNet b1.58; see `methods.AbsMeanMethod`. Option: group_size."""

    options_type = methods.AbsMeanMethod


class TWN(StraightThroughComponent):
    """Ternary weight networks; see `methods.TWNMethod`. Options: group_size, delta."""

    options_type = methods.TWNMethod


class INT2(StraightThroughComponent):
    """Symmetric two-bit integers; see `methods.INT2Method`. Options: group_size, start."""

    options_type = methods.INT2Method


class INT4(StraightThroughComponent):
    """Symmetric four-bit integers; see `methods.INT4Method`. Option: group_size."""

    options_type = methods.INT4Method


class LSQ(StraightThroughComponent):
    """Learned step size; see `methods.LSQMethod`. Options: group_size, start."""

    options_type = methods.LSQMethod


class DLT(StraightThroughComponent):
    """A learned step and offset; see `methods.DLTMethod`. Options: group_size, start."""

    options_type = methods.DLTMethod


class Tequila(StraightThroughComponent):
    """AbsMean with a bias of dead weights; see `methods.TequilaMethod`.

    Options: group_size, epsilon.
    """

    options_type = methods.TequilaMethod


class SEQ(StraightThroughComponent):
    """Stretched levels of ParetoQ; see `methods.SEQMethod`. Options: group_size, start, bits."""

    options_type = methods.SEQMethod
