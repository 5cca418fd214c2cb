"""Options of a run as frozen keyword-only dataclasses that check themselves.

`from_mapping` builds one from a YAML section and turns an unknown key into an error that names the
nearest known one.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def require_number(name: str, value: Any, low: float, high: float, remedy: str) -> None:
    """Raises TypeError unless ``value`` is a number, ValueError unless low <= value <= high."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number; got {value!r}; {remedy}")
    if not (low <= value <= high) or math.isinf(value):
        raise ValueError(f"{name} must be in [{low:g}, {high:g}]; got {value}; {remedy}")


def nearest(key: str, known: Iterable[str]) -> str:
    """'; did you mean X?' if some known name is close to ``key``, else an empty string."""
    close = difflib.get_close_matches(key, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def one_line(error: BaseException, limit: int = 300) -> str:
    """An error's message on one line of at most ``limit`` characters; its type if it has none."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


def from_mapping(cls: type[T], mapping: Mapping[str, Any] | None, section: str) -> T:
    """Builds the dataclass ``cls`` from a section of the YAML file (None: all defaults).

    Raises:
        ValueError: on a key that ``cls`` does not have.
        TypeError: if the section is not a mapping.
    """
    if mapping is not None and not isinstance(mapping, Mapping):
        raise TypeError(f"{section} must be a mapping of options; got {mapping!r}")
    values = {} if mapping is None else dict(mapping)
    known = [field.name for field in dataclasses.fields(cls)]
    for key in values:
        if key not in known:
            raise ValueError(
                f"unknown key {section}.{key}{nearest(key, known)}; known: {', '.join(known)}"
            )
    return cls(**values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The YAML's ``schedule`` section.

    Args:
        rho: fraction of the steps spent raising the pressure from 0 to 1 (Eq. 8), in [0, 1].
        tau_init: temperature during compression (Eq. 12), a number >= 0, or "auto" for the one
            that fits the model's own weights best. 0 with rho 0 is straight-through training.
        alpha: strength of the sensitivity in the temperature (Eq. 13), in [-4, 4]; 0 is uniform.
    """

    rho: float = 0.2
    tau_init: float | str = 0.3
    alpha: float = 0.4

    def __post_init__(self):
        require_number("schedule.rho", self.rho, 0, 1, "the paper uses 0.2")
        require_number("schedule.alpha", self.alpha, -4, 4, "the paper uses 0.4")
        if self.tau_init != "auto":
            require_number("schedule.tau_init", self.tau_init, 0, 100, 'or use "auto"')
