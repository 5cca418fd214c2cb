"""Sections of the YAML file as frozen dataclasses that check themselves.

A field carries its type, its range (`option`) and, in the string below it, its meaning.
`Section.parse` reads a section once, by ``OmegaConf.structured``; what comes out is handed down as
it is and never checked again. The same checks run when a section is made in Python.
"""

import ast
import dataclasses
import difflib
import inspect
import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from hestia_tune.errors import InputError, InputTypeError

T = TypeVar("T", bound="Section")


def nearest(key: str, known: Iterable[str]) -> str:
    """Return '; did you mean X?' if a known name is close to ``key``, else an empty string."""
    close = difflib.get_close_matches(key, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def require_number(name: str, value: Any, low: float, high: float, remedy: str = "") -> None:
    """Raise InputTypeError unless ``value`` is a number, InputError unless it is in [low, high]."""
    remedy = f"; {remedy}" if remedy else ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputTypeError(f"{name} must be a number; got {value!r}{remedy}")
    if not (low <= value <= high) or math.isinf(value):
        rule = f"at least {low:g}" if math.isinf(high) else f"in [{low:g}, {high:g}]"
        raise InputError(f"{name} must be {rule}; got {value}{remedy}")


def option(
    default: Any = dataclasses.MISSING,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    choices: tuple[str, ...] = (),
    remedy: str = "",
) -> Any:
    """Declare a field of a `Section` that is checked beyond its type.

    Args:
        default: The default value; a list or a mapping is copied. Without one the field must be
            given.
        low, high: The closed range of a number. None and words are not checked.
        choices: The allowed words, also inside a list, or in place of a number.
        remedy: The end of the error for a value out of range.
    """
    rules = {"low": low, "high": high, "choices": choices, "remedy": remedy}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=rules)
    return dataclasses.field(default=default, metadata=rules)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the YAML file; its fields are plain, or declared by `option`.

    Raises:
        InputTypeError: If a value has the wrong type.
        InputError: If a key is unknown or missing, or a value is not allowed.
    """

    section: ClassVar[str] = ""

    @classmethod
    def parse(cls: type[T], values: Any) -> T:
        """Read the section from a mapping, plain or OmegaConf's. None gives all defaults."""
        try:
            if OmegaConf.is_config(values):
                values = OmegaConf.to_container(values, resolve=True)
            if not isinstance(values, Mapping | None):
                rule = f"{cls.section or 'the config'} must be a mapping of options"
                raise InputTypeError(f"{rule}; got {values!r}")
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
                    raise InputError(f"{name} must be {kind}one of {choices}; got {word}")
            if isinstance(value, int | float) and not isinstance(value, bool):
                require_number(name, value, rules["low"], rules["high"], rules["remedy"])


def _in_our_words(error: OmegaConfBaseException, section: str) -> Exception:
    """Return an error of OmegaConf as one of ours: the whole key, on one line."""
    inner = error.__cause__ or error.__context__
    if str(error).startswith("Could not create instance") and isinstance(inner, Exception):
        is_theirs = isinstance(inner, OmegaConfBaseException)
        return _in_our_words(inner, section) if is_theirs else inner  # a section's own error
    key = f"{section}.{error.full_key or error.key or ''}".strip(".")
    if isinstance(error, ConfigKeyError):
        known = [field.name for field in dataclasses.fields(error.object_type or Section)]
        return InputError(f"unknown key {key}{nearest(key.rpartition('.')[2], known)}")
    if isinstance(error, MissingMandatoryValue):
        return InputError(f"{key} must be given")
    text = f"{key}: {str(error).splitlines()[0]}".removeprefix(": ")
    if "is not a ListConfig" in text:
        text = f"{key}: give a list, such as [a, b]"
    elif "is not Optional" in text:
        text = f"{key}: null is not allowed; leave it out for its defaults"
    for cls in Section.__subclasses__():
        text = text.replace(cls.__name__, f"the mapping {cls.section}")
    return InputTypeError(text)


def describe(section: type[Section], prefix: str = "") -> Iterable[tuple[str, str, str, str]]:
    """Yield (key, type, default, meaning) of every option of a section and of those within it.

    The meaning is the string below the field in the source code.
    """
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    body = cast(ast.ClassDef, tree).body
    texts = {
        line.target.id: " ".join(below.value.value.split())
        for line, below in zip(body, body[1:], strict=False)
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(below.value.value, str)
    }
    for field in dataclasses.fields(section):
        kind = field.type if isinstance(field.type, type) else None
        if kind is not None and issubclass(kind, Section):
            yield from describe(kind, f"{prefix}{field.name}.")
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        shown = "must be given" if default is dataclasses.MISSING else _as_yaml(default)
        name = field.type.__name__ if isinstance(field.type, type) else str(field.type)
        choices = field.metadata.get("choices")
        name = " | ".join(choices) if choices and name == "str" else name.replace("typing.", "")
        yield f"{prefix}{field.name}", name, shown, texts.get(field.name, "")


def _as_yaml(value: Any) -> str:
    return "null" if value is None else str(value)
