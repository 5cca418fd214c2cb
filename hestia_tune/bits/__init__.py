"""Spend a budget of bits: which linear gets how many bits per weight."""

from hestia_tune.bits.allocation import Allocation, allocate
from hestia_tune.bits.budget import Budget, Layer
from hestia_tune.bits.file import (
    BITS_FILE,
    chosen,
    kept,
    read_choices,
    settings_of,
    with_choices,
)

__all__ = [
    "BITS_FILE",
    "Allocation",
    "Budget",
    "Layer",
    "allocate",
    "chosen",
    "kept",
    "read_choices",
    "settings_of",
    "with_choices",
]
