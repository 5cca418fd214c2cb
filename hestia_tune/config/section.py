"""Sections of the YAML file as frozen dataclasses that check themselves.

A field carries its type, its range (`option`) and, in the string below it, its meaning.
`Section.parse` reads a section once, and reports all its errors together. ``OmegaConf.structured``
checks the types. The rest of the package receives the parsed section and does not check it again.
The same checks run when Python code makes a section.
"""

import ast
import dataclasses
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, TypeVar, cast, get_args, get_origin

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
    """Hold a part of the YAML file. Its fields are plain, or `option` declares them.

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
        typed = OmegaConf.structured(type(self))
        OmegaConf.set_readonly(typed, False)
        with collecting() as check:
            for field in dataclasses.fields(self):
                with check():
                    self._check_field(field, typed)
        self.check()

    def _check_field(self, field: dataclasses.Field, typed: Any) -> None:
        """Give one option its type, so that "1e-3" becomes a float, and check its rules.

        Args:
            field: The field of the option.
            typed: An OmegaConf structure of the section.
        """
        key, value = f"{self.section}.{field.name}".lstrip("."), getattr(self, field.name)
        # OmegaConf takes a number for a switch, and does not name the key of a wrong list.
        is_section = isinstance(field.default, Section)
        is_mapping = isinstance(value, Section if is_section else Mapping)
        # A component with defaults is a mapping. Without defaults it may be a list of components.
        needs_mapping = is_section or str(field.type).startswith("dict")
        if field.default_factory is not dataclasses.MISSING and field.type is Any:
            needs_mapping = isinstance(value, list)
        if needs_mapping and not is_mapping:
            raise InputTypeError(f"{key} must be a mapping of options; got {value!r}")
        is_switch = bool in (field.type, *get_args(field.type))
        if is_switch and isinstance(value, int | float) and not isinstance(value, bool):
            words = ["true", "false", *_choices(field)]
            rule = f"{', '.join(words[:-1])} or {words[-1]}"
            raise InputTypeError(f"{key} must be {rule}; got {value!r}")
        try:
            OmegaConf.update(typed, field.name, value, merge=False)
        except OmegaConfBaseException as error:
            text = str(error).splitlines()[0]
            if "is not a ListConfig" in text:
                text = f"give a list, such as [a, b]; got {value!r}"
            elif "is not Optional" in text:
                text = "null is not allowed; leave the key out to use its default"
            raise InputTypeError(f"{key}: {text}") from None
        if value is not None and not OmegaConf.is_config(typed[field.name]):
            value = typed[field.name]
            object.__setattr__(self, field.name, value)
        if not (rules := field.metadata):
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
    return tuple(choices()) if callable(choices) else choices


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
