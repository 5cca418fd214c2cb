"""Sections of the YAML file as frozen dataclasses that check themselves.

A field carries its type, its range (`option`) and, in the string below it, its meaning.
`Section.parse` reads a section once, by ``OmegaConf.structured``. The rest of the package receives
the parsed section and does not check it again. The same checks run when Python code makes a
section.
"""

import ast
import dataclasses
import difflib
import inspect
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, TypeVar, cast

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from hestia_tune.errors import InputError, InputTypeError

T = TypeVar("T", bound="Section")


def nearest(key: str, known: Iterable[str]) -> str:
    """Return '; did you mean X?' if a known name is close to ``key``, or else an empty string."""
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
    """Declare a field of a `Section` with a check beyond the check of its type.

    Args:
        default: The default value. Lists and mappings are copied. Without a default the user must
            give the option.
        low: The smallest allowed number. The check skips None and words.
        high: The largest allowed number.
        choices: The allowed words. They apply to a single word, to every word in a list, and to a
            word in place of a number.
        remedy: The end of the error message for a number out of range.
    """
    rules = {"low": low, "high": high, "choices": choices, "remedy": remedy}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=rules)
    return dataclasses.field(default=default, metadata=rules)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the YAML file. Its fields are plain, or `option` declares them.

    Raises:
        InputTypeError: If a value has the wrong type.
        InputError: If a key is unknown or missing, or a value is not allowed.
    """

    section: ClassVar[str] = ""

    @classmethod
    def parse(cls: type[T], values: Any) -> T:
        """Read the section from a plain mapping or a DictConfig. None gives all defaults."""
        try:
            if OmegaConf.is_config(values):
                values = OmegaConf.to_container(values, resolve=True)
            if not isinstance(values, Mapping | None):
                rule = f"{cls.section or 'the config'} must be a mapping of options"
                raise InputTypeError(f"{rule}; got {values!r}")
            _check_plain(cls, values or {}, cls.section)
            merged = OmegaConf.merge(OmegaConf.structured(cls), values or {})
            return cast(T, OmegaConf.to_object(merged))
        except InputError as error:  # a copy by OmegaConf, which has changed the message
            raise error.__context__ or error from None
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
                value = typed[field.name]  # The value has its type now: "1e-3" is a float.
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
        self.check()

    def check(self) -> None:
        """Raise InputError if the options contradict each other. Subclasses override this."""


def _check_plain(section: type[Section], values: Mapping[str, Any], name: str) -> None:
    """Raise InputTypeError for a number as a switch, or a list and a mapping in each other's place.

    OmegaConf takes the first for true, and does not name the key of the others.
    """
    for field in dataclasses.fields(section):
        key, value = f"{name}.{field.name}".lstrip("."), values.get(field.name)
        is_section = isinstance(field.default, Section)
        # A list of components is a list; a component with defaults is a mapping.
        has_defaults = field.default_factory is not dataclasses.MISSING and isinstance(value, list)
        kind = "list" if str(field.type).startswith("list") else ""
        if is_section or str(field.type).startswith("dict") or (has_defaults and kind != "list"):
            kind = "mapping"
        if field.type is bool and isinstance(value, int | float) and not isinstance(value, bool):
            raise InputTypeError(f"{key} must be true or false; got {value!r}")
        if kind == "list" and isinstance(value, Mapping):
            raise InputTypeError(f"{key}: give a list, such as [a, b]; got {value!r}")
        if kind == "mapping" and not isinstance(value, Mapping | None):
            raise InputTypeError(f"{key} must be a mapping of options; got {value!r}")
        if is_section and value is not None:
            _check_plain(type(field.default), value, key)


def _in_our_words(error: OmegaConfBaseException, section: str) -> Exception:
    """Return an OmegaConf error as an InputError of one line that names the whole key."""
    inner = error.__cause__ or error.__context__
    if str(error).startswith("Could not create instance") and isinstance(inner, Exception):
        if isinstance(inner, OmegaConfBaseException):
            return _in_our_words(inner, section)
        return inner  # The section itself has raised this error.
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
        text = f"{key}: null is not allowed; leave the key out to use its defaults"
    for cls in Section.__subclasses__():
        text = text.replace(cls.__name__, f"the mapping {cls.section}")
    return InputTypeError(text)


def describe(section: type[Section], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield (key, type, default, meaning) of every option of a section and its subsections.

    The meaning is the string below the field in the source code.
    """
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    texts = {}
    for pair in pairwise(cast(ast.ClassDef, tree).body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                texts[name] = " ".join(text.split())
    for field in dataclasses.fields(section):
        if isinstance(field.type, type) and issubclass(field.type, Section):
            yield from describe(field.type, f"{prefix}{field.name}.")
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        elif default is dataclasses.MISSING:
            default = "must be given"
        shown = "null" if default is None else str(default)
        kind, choices = inspect.formatannotation(field.type), field.metadata.get("choices")
        kind = " | ".join(choices) if choices and kind == "str" else kind
        yield f"{prefix}{field.name}", kind, shown, texts.get(field.name, "")
