"""Sections of the YAML file as frozen dataclasses that check themselves.

A field carries its type, its range (`option`) and, in the string below it, its meaning.
`Section.parse` reads a section once, and reports all its errors together. The rest of the package
receives the parsed section. The same checks run when Python code makes a section.
"""

import ast
import contextlib
import dataclasses
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, Union, cast, get_args, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hestia_tune.errors import InputError, InputTypeError, collecting, nearest, require_number

T = TypeVar("T", bound="Section")


def option(
    default: Any = dataclasses.MISSING,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] = (),
    remedy: str = "",
    removed: Mapping[str, str] | None = None,
) -> Any:
    """Declare a field of a `Section` with a check beyond the check of its type.

    Args:
        default: The default value. Lists and mappings are copied. Without a default the user must
            give the option.
        low: The smallest allowed number. The check skips None and words.
        high: The largest allowed number.
        choices: The allowed words. They apply to a single word, to every word in a list, and to a
            word in place of a number. A function gives them when a value is checked.
        remedy: The end of the error message for a number out of range.
        removed: Word that earlier versions allowed -> why it is gone, and what to set instead.
    """
    rules = {"low": low, "high": high, "choices": choices, "remedy": remedy}
    rules["removed"] = removed or {}
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
    def parse(cls: type[T], values: Any, key: str = "") -> T:
        """Read the section from a plain mapping or a DictConfig. None gives all defaults.

        Args:
            values: The options.
            key: Name of the section in messages. The default is the section's own name.

        Raises:
            InputError: If options are wrong. The message has one line for each of them.
        """
        key = key or cls.section
        try:
            if OmegaConf.is_config(values):
                values = OmegaConf.to_container(values, resolve=True)
        except OmegaConfBaseException as error:
            raise InputError(f"{error.full_key or key}: {str(error).splitlines()[0]}") from None
        if not isinstance(values, Mapping | None):
            rule = f"{key or 'the config'} must be a mapping of options"
            raise InputTypeError(f"{rule}; got {values!r}")
        known, parsed = {field.name: field for field in dataclasses.fields(cls)}, {}
        section: Any = None
        required = {name for name, f in known.items() if f.default is f.default_factory}
        with collecting() as check:
            for name, value in (values or {}).items():
                whole = f"{key}.{name}".lstrip(".")
                with check():
                    if name not in known:
                        raise InputError(f"unknown key {whole}{nearest(name, known)}")
                    parsed[name] = _with_sections(known[name].type, value, whole)
            for name in sorted(required - (values or {}).keys()):
                with check():
                    raise InputError(f"{key}.{name} must be given".lstrip("."))
            # A section with a wrong part is not checked as a whole. The whole file is, so that its
            # other options are reported too.
            right = all(name in parsed for name in values or () if name in known)
            with check():
                if required <= parsed.keys() and (right or not key):
                    section = cls(**parsed)
        return section

    def __post_init__(self):
        with collecting() as check:
            for field in dataclasses.fields(self):
                with check():
                    self._check_field(field)
        self.check()

    def _check_field(self, field: dataclasses.Field) -> None:
        """Give one option its type, so that "1e-3" becomes a float, and check its rules."""
        key, value = f"{self.section}.{field.name}".lstrip("."), getattr(self, field.name)
        is_section = isinstance(field.default, Section)
        is_mapping = isinstance(value, Section if is_section else Mapping)
        # A component with defaults is a mapping. Without defaults it may be a list of components.
        needs_mapping = is_section or str(field.type).startswith("dict")
        if field.default_factory is not dataclasses.MISSING and field.type is Any:
            needs_mapping = isinstance(value, list)
        if needs_mapping and not is_mapping:
            raise InputTypeError(f"{key} must be a mapping of options; got {value!r}")
        rules = field.metadata
        value = _typed(field.type, value, key, _choices(field))
        object.__setattr__(self, field.name, value)
        if not rules:
            return
        choices = _choices(field)
        for word in value if isinstance(value, list) else [value]:
            if isinstance(word, str) and word in rules["removed"]:
                raise InputError(f"{key}: there is no {word} any more, {rules['removed'][word]}")
            if isinstance(word, str) and choices and word not in choices:
                kind = "" if math.isinf(rules["low"]) else "a number or "
                kind = "true, false or " if "bool" in str(field.type) else kind
                raise InputError(f"{key} must be {kind}one of {', '.join(choices)}; got {word}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            require_number(key, value, rules["low"], rules["high"], rules["remedy"])

    def check(self) -> None:
        """Raise InputError if the options contradict each other. Subclasses override this."""


def _choices(field: dataclasses.Field) -> tuple[str, ...]:
    """Return the allowed words of an option."""
    choices: Any = field.metadata.get("choices", ())
    found: Any = choices() if callable(choices) else choices
    return tuple(found)


_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _typed(kind: Any, value: Any, key: str, words: tuple[str, ...] = ()) -> Any:
    """Return the value of an option with the type of its field.

    A text that a number or a switch can be read from is read, because command lines give texts. A
    field of several types takes a value of one of them as it is.

    Args:
        kind: The annotation of the field.
        value: The value.
        key: Name of the option, for the error.
        words: Words that the option takes in place of true and false, for the error.

    Raises:
        InputTypeError: If the value has another type.
    """
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if Any in kinds or get_origin(kind) is dict or isinstance(value, Section):
        return value
    if value is None:
        if NoneType in kinds:
            return None
        raise InputTypeError(f"{key}: null is not allowed; leave the key out to use its default")
    kinds = tuple(each for each in kinds if each is not NoneType)
    if isinstance(value, list | tuple):
        for each in kinds:
            if get_origin(each) is list:
                (of_items,) = get_args(each)
                return [_typed(of_items, item, f"{key}[{n}]") for n, item in enumerate(value)]
    if len(kinds) > 1 and type(value) in kinds:
        return value
    if bool in kinds:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _SWITCHES:
            return _SWITCHES[value.lower()]
        rule = ["true", "false", *words]
        raise InputTypeError(f"{key} must be {', '.join(rule[:-1])} or {rule[-1]}; got {value!r}")
    first, others = kinds[0], kinds[1:]
    if get_origin(first) is list:
        raise InputTypeError(f"{key}: give a list, such as [a, b]; got {value!r}")
    is_text = isinstance(value, str | int | float | PurePath) and not isinstance(value, bool)
    if kinds == (str,) and is_text:
        return str(value)
    if not others and isinstance(value, str | int | float) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            if first is float or not isinstance(value, float):
                return first(value)
    names = {int: "a whole number", float: "a number", str: "a text"}
    rule = " or ".join(dict.fromkeys(names.get(each, "a list") for each in kinds))
    raise InputTypeError(f"{key} must be {rule}; got {value!r}")


def _with_sections(kind: Any, value: Any, key: str) -> Any:
    """Return the value of an option of a type, with all sections in it parsed."""
    if isinstance(kind, type) and issubclass(kind, Section):
        return kind.parse(value, key)
    if get_origin(kind) is dict and isinstance(value, Mapping):  # name -> section
        of_value = get_args(kind)[1]
        return {name: _with_sections(of_value, v, f"{key}.{name}") for name, v in value.items()}
    return value


def describe(section: type[Section], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield (key, type, default, meaning) of every option of a section and its subsections.

    The meaning is the string below the field in the source code.
    """
    texts = {}
    for kind in reversed(section.__mro__[:-1]):  # without object
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
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
        kind, choices = inspect.formatannotation(field.type), _choices(field)
        kind = " | ".join(choices) if choices and kind == "str" else kind
        yield f"{prefix}{field.name}", kind, shown, texts.get(field.name, "")
