"""The sections of a run's YAML file, as frozen dataclasses that check themselves.

A field carries its type and its range; a comment says what it does. `Section.parse` reads a
section once, by ``OmegaConf.structured``; what comes out is handed down as it is and never looked
at again. The same checks run when a section is made in Python.
"""

import dataclasses
import difflib
import functools
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

log = logging.getLogger(__name__)
T = TypeVar("T", bound="Section")


def nearest(key: str, known: Iterable[str]) -> str:
    """'; did you mean X?' if some known name is close to ``key``, else an empty string."""
    close = difflib.get_close_matches(key, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def one_line(error: BaseException, limit: int = 300) -> str:
    """An error's message on one line of at most ``limit`` characters; its type if it has none."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


@functools.cache
def warn_once(text: str) -> None:
    """Logs a warning, which this process then does not repeat."""
    log.warning(text)


def require_number(name: str, value: Any, low: float, high: float, remedy: str = "") -> None:
    """Raises TypeError unless ``value`` is a number, ValueError unless low <= value <= high."""
    remedy = f"; {remedy}" if remedy else ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number; got {value!r}{remedy}")
    if not (low <= value <= high) or math.isinf(value):
        rule = f"at least {low:g}" if math.isinf(high) else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{name} must be {rule}; got {value}{remedy}")


def option(
    default: Any = dataclasses.MISSING,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    choices: tuple[str, ...] = (),
    remedy: str = "",
) -> Any:
    """A field of a `Section` that is checked beyond its type.

    Args:
        default: a value; a list or mapping is copied; left out, the field must be given.
        low, high: the closed range of a number; None and words are not checked.
        choices: the words that are allowed, also inside a list, or in place of a number.
        remedy: ends the error of a value out of range.
    """
    rules = {"low": low, "high": high, "choices": choices, "remedy": remedy}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=rules)
    return dataclasses.field(default=default, metadata=rules)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the YAML file; its fields are plain, or declared by `option`.

    Raises:
        TypeError: on a value of the wrong type.
        ValueError: on an unknown key, a missing one, or a value that is not allowed.
    """

    section: ClassVar[str] = ""

    @classmethod
    def parse(cls: type[T], values: Any) -> T:
        """The section from a mapping, plain or of OmegaConf (None: all defaults)."""
        try:
            if OmegaConf.is_config(values):
                values = OmegaConf.to_container(values, resolve=True)
            if not isinstance(values, Mapping | None):
                raise TypeError(f"{cls.section} must be a mapping of options; got {values!r}")
            merged = OmegaConf.merge(OmegaConf.structured(cls), values or {})
            return cast(T, OmegaConf.to_object(merged))
        except OmegaConfBaseException as error:
            raise _in_our_words(error, cls.section) from None

    def __post_init__(self):
        try:
            typed = OmegaConf.structured(self)
        except OmegaConfBaseException as error:
            raise _in_our_words(error, self.section) from None
        for field in dataclasses.fields(self):
            name, value = f"{self.section}.{field.name}".lstrip("."), getattr(self, field.name)
            if value is not None and not OmegaConf.is_config(typed[field.name]):
                value = typed[field.name]  # as its type: "1e-3" is a float
                object.__setattr__(self, field.name, value)
            if not (rules := field.metadata):
                continue
            for word in value if isinstance(value, list) else [value]:
                if isinstance(word, str) and rules["choices"] and word not in rules["choices"]:
                    kind = "" if math.isinf(rules["low"]) else "a number or "
                    choices = ", ".join(rules["choices"])
                    raise ValueError(f"{name} must be {kind}one of {choices}; got {word}")
            if isinstance(value, int | float) and not isinstance(value, bool):
                require_number(name, value, rules["low"], rules["high"], rules["remedy"])


def _in_our_words(error: OmegaConfBaseException, section: str) -> Exception:
    """An error of OmegaConf, of something in a section, with the whole key, on one line."""
    inner = error.__cause__ or error.__context__
    if str(error).startswith("Could not create instance") and isinstance(inner, Exception):
        is_theirs = isinstance(inner, OmegaConfBaseException)
        return _in_our_words(inner, section) if is_theirs else inner  # a section's own error
    key = f"{section}.{error.full_key or error.key or ''}".strip(".")
    if isinstance(error, ConfigKeyError):
        known = [field.name for field in dataclasses.fields(error.object_type or Section)]
        return ValueError(f"unknown key {key}{nearest(key.rpartition('.')[2], known)}")
    if isinstance(error, MissingMandatoryValue):
        return ValueError(f"{key} must be given")
    text = f"{key}: {str(error).splitlines()[0]}".removeprefix(": ")
    if "is not a ListConfig" in text:
        text = f"{key}: give a list, such as [a, b]"
    elif "is not Optional" in text:
        text = f"{key}: null is not allowed; leave it out for its defaults"
    for cls in Section.__subclasses__():
        text = text.replace(cls.__name__, f"the mapping {cls.section}")
    return TypeError(text)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """The YAML's ``schedule`` section: pressure and temperature (Eqs. 8, 12, 13)."""

    section: ClassVar[str] = "schedule"
    # Fraction of the steps spent raising the pressure from 0 to 1 (Eq. 8).
    rho: float = option(0.2, low=0, high=1, remedy="the paper uses 0.2")
    # Temperature during compression (Eq. 12), or "auto" for the one that fits the model's own
    # weights best; 0 with rho 0 is straight-through training.
    tau_init: int | float | str = option(
        0.3, low=0, high=100, choices=("auto",), remedy='or use "auto"'
    )
    # Strength of the sensitivity in the temperature (Eq. 13); 0 is uniform.
    alpha: float = option(0.4, low=-4, high=4, remedy="the paper uses 0.4")
    # Last share of the steps at temperature 0, straight-through on hard codes, so that scales and
    # norms settle on them; the cosine of Eq. 12 ends where it begins.
    hard_fraction: float = option(0.0, low=0, high=0.9, remedy="0 is the paper's")

    def __post_init__(self):
        super().__post_init__()
        if self.hard_fraction and self.rho + self.hard_fraction > 1:
            raise ValueError(
                f"schedule.rho + hard_fraction must be at most 1; got {self.rho} + "
                f"{self.hard_fraction}"
            )
