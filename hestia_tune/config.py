"""The sections of a run's YAML file, as frozen dataclasses that check themselves.

A field carries its type, its range and its text. `Section.parse` reads a section once, by
``OmegaConf.structured``; what comes out is handed down as it is and never looked at again. The same
checks run when a section is made in Python.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

T = TypeVar("T", bound="Section")


def nearest(key: str, known: Iterable[str]) -> str:
    """'; did you mean X?' if some known name is close to ``key``, else an empty string."""
    close = difflib.get_close_matches(key, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def one_line(error: BaseException, limit: int = 300) -> str:
    """An error's message on one line of at most ``limit`` characters; its type if it has none."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


def require_number(name: str, value: Any, low: float, high: float, remedy: str = "") -> None:
    """Raises TypeError unless ``value`` is a number, ValueError unless low <= value <= high."""
    remedy = f"; {remedy}" if remedy else ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number; got {value!r}{remedy}")
    if not (low <= value <= high) or math.isinf(value):
        rule = f"at least {low:g}" if math.isinf(high) else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{name} must be {rule}; got {value}{remedy}")


def option(
    default: Any = MISSING,
    text: str = "",
    *,
    low: float = -math.inf,
    high: float = math.inf,
    choices: tuple[str, ...] = (),
    remedy: str = "",
) -> Any:
    """A field of a `Section`.

    Args:
        default: a value; a list or mapping is copied; left out, the field must be given.
        text: what it does.
        low, high: the closed range of a number; None and words are not checked.
        choices: the words that are allowed, also inside a list.
        remedy: ends the error of a value out of range.
    """
    rules = {"text": text, "low": low, "high": high, "choices": choices, "remedy": remedy}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=rules)
    return dataclasses.field(default=default, metadata=rules)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the YAML file; subclasses declare fields by `option`.

    Raises:
        TypeError: on a value of the wrong type.
        ValueError: on an unknown key, a missing one, or a value that is not allowed.
    """

    section: ClassVar[str] = ""

    @classmethod
    def parse(cls: type[T], values: Any, section: str | None = None) -> T:
        """The section from a mapping (None: all defaults).

        Args:
            values: a mapping, plain or of OmegaConf.
            section: its name in errors, if it is not the class's own.
        """
        prefix = cls.section if section is None else section
        if OmegaConf.is_config(values):
            values = OmegaConf.to_container(values, resolve=True)
        if not isinstance(values, Mapping | None):
            raise TypeError(f"{prefix} must be a mapping of options; got {values!r}")
        try:
            return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), values or {}))
        except OmegaConfBaseException as error:
            raise in_our_words(error, prefix) from None

    def __post_init__(self):
        try:
            typed = OmegaConf.structured(self)
        except OmegaConfBaseException as error:
            raise in_our_words(error, self.section) from None
        for field in dataclasses.fields(self):
            name, value = f"{self.section}.{field.name}".lstrip("."), getattr(self, field.name)
            if value is not None and not OmegaConf.is_config(typed[field.name]):
                value = typed[field.name]  # as its type: "1e-3" is a float
                object.__setattr__(self, field.name, value)
            self._check_rules(name, value, field.metadata)

    @staticmethod
    def _check_rules(name: str, value: Any, rules: Mapping[str, Any]) -> None:
        for word in value if isinstance(value, list | tuple) else [value]:
            if rules["choices"] and word is not None and word not in rules["choices"]:
                raise ValueError(
                    f"{name} must be one of {', '.join(rules['choices'])}; got {word}"
                    f"{nearest(str(word), rules['choices'])}"
                )
        if isinstance(value, int | float) and not isinstance(value, bool):
            require_number(name, value, rules["low"], rules["high"], rules["remedy"])


_TYPE_WORDS = {
    "list": "a list",
    "dict": "a mapping",
    "bool": "True or False",
    "int": "an int",
    "float": "a number",
    "str": "a string",
    "None": "null",
}


def in_our_words(error: OmegaConfBaseException, section: str) -> Exception:
    """An error of OmegaConf with the whole key, the rule and the value, on one line."""
    key = f"{section}.{error.full_key or error.key or ''}".strip(".")
    is_section = dataclasses.is_dataclass(error.object_type)  # else a plain mapping
    fields = dataclasses.fields(error.object_type) if is_section else ()
    if isinstance(error, ConfigKeyError):
        known = [field.name for field in fields]
        hint = nearest(key.rpartition(".")[2], known)
        listed = f"; known: {', '.join(known)}" if len(known) < 20 else ""
        return ValueError(f"unknown key {key}{hint}{listed}")
    if str(error).startswith("Could not create instance"):  # a section's own error
        inner = error.__cause__ or error.__context__
        nested = isinstance(inner, OmegaConfBaseException)
        return in_our_words(inner, section) if nested else inner
    if isinstance(error, MissingMandatoryValue):
        return ValueError(f"{key} must be given")
    declared = {field.name: str(field.type) for field in fields}.get(str(error.key), "")
    declared = re.sub(r"\[.*\]", "", declared)
    words = [word for name, word in _TYPE_WORDS.items() if re.search(rf"\b{name}\b", declared)]
    return TypeError(
        f"{key} must be {' or '.join(words) or 'of another type'}; got {error.value!r}"
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """The YAML's ``schedule`` section: pressure and temperature (Eqs. 8, 12, 13)."""

    section: ClassVar[str] = "schedule"
    rho: float = option(
        0.2,
        "fraction of the steps spent raising the pressure from 0 to 1 (Eq. 8)",
        low=0,
        high=1,
        remedy="the paper uses 0.2",
    )
    tau_init: int | float | str = option(
        0.3,
        'temperature during compression (Eq. 12), or "auto" for the one that fits the model\'s own '
        "weights best; 0 with rho 0 is straight-through training",
        low=0,
        high=100,
        remedy='or use "auto"',
    )
    alpha: float = option(
        0.4,
        "strength of the sensitivity in the temperature (Eq. 13); 0 is uniform",
        low=-4,
        high=4,
        remedy="the paper uses 0.4",
    )

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.tau_init, str) and self.tau_init != "auto":
            raise TypeError(
                f'schedule.tau_init must be a number; got {self.tau_init!r}; or use "auto"'
            )


@dataclass(frozen=True, kw_only=True)
class EstimationConfig(Section):
    """The YAML's ``sensitivity_estimation`` section."""

    section: ClassVar[str] = "sensitivity_estimation"
    curvature: str = option(
        "hessian",
        '"hessian" (Eq. 10, the paper\'s), or "fisher", the Gauss-Newton matrix by plain backward '
        "passes, all layers at once",
        choices=("hessian", "fisher"),
    )
    num_samples: int = option(50, "calibration samples, drawn from the dataset by the seed", low=1)
    batch_size: int = option(
        1,
        "samples that go through the model together; every batch has probes of its own, so small "
        "batches give more of them at the same cost",
        low=1,
    )
    target_standard_error: float = option(
        0.01,
        "of the scores; a layer gets more probes until it is met",
        low=1e-6,
        high=0.5,
        remedy="0.01 is the default",
    )
    min_probes: int = option(
        2,
        "per batch, the least that every layer gets (a standard error needs 2); with few batches "
        "it is raised until there are 8 in all",
        low=2,
    )
    num_probes: int = option(20, "per batch, the most that a layer gets", low=2)
    fixed: bool = option(
        False,
        "Hutch++ on every batch with just rank and num_probes (Appendix B), whatever the standard "
        'error; of "hessian" only',
    )
    rank: int = option(10, "sketch columns of Hutch++, for fixed", low=0)
    kappa: float = option(
        1.0, "gain of the scores (Eq. 11)", low=0, high=1e3, remedy="the paper uses 1"
    )
    epsilon: float = option(
        1e-8, "keeps Eq. 11 finite if all traces are equal", low=0, high=1, remedy="the paper's"
    )
    seed: int | None = option(None, "of samples and probes; null takes the run's own", low=0)
    vectors_at_once: int = option(
        1,
        "probes that go through a block together, at as many times its memory; more than 1 pays on "
        "GPUs with small models",
        low=1,
    )
    output: str | None = option(
        None, "path of the artifact; null is sensitivity.json in output_dir"
    )
    overwrite: bool = option(
        False, "replace an artifact of another model, or of other settings, found there"
    )

    def __post_init__(self):
        super().__post_init__()
        if self.min_probes > self.num_probes:
            raise ValueError(
                f"{self.section}.min_probes {self.min_probes} must not be above num_probes "
                f"{self.num_probes}; raise num_probes"
            )
        if self.fixed and self.curvature != "hessian":
            raise ValueError(
                f"{self.section}.fixed is Hutch++, which the fisher trace does not need; "
                "use curvature: hessian, or leave fixed out"
            )


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(Section):
    """The YAML's ``convert`` section."""

    section: ClassVar[str] = "convert"
    formats: list[str] = option(
        ["torchao"],
        "what to write",
        choices=("torchao", "huggingface", "compressed_tensors", "gguf"),
    )
    source: str = option(
        "trained",
        '"trained", the hard model in output_dir; "pretrained", the checkpoint that training would '
        "start from, quantized as it is (naive); or a Hugging Face folder, hard if hestia_qat "
        "wrote it, else quantized as it is",
    )
    output: str | None = option(None, "the folder to write into; null is converted in output_dir")
    target: str = option(
        "ternary",
        'of "torchao": "ternary", TernaryTensor; or "intx", torchao\'s own int2 tensors, a byte '
        "per weight, that need nothing of this package",
        choices=("ternary", "intx"),
    )
    block_type: str | list[str] = option("auto", 'of "gguf": see `hestia_tune.export.write_gguf`')
    overwrite: bool = option(False, "replace what is there")

    def __post_init__(self):
        super().__post_init__()
        if not self.formats:
            raise ValueError("convert.formats must name at least one format")


@dataclass(frozen=True, kw_only=True)
class TextConfig(Section):
    """A text to measure perplexity on: one entry of ``eval.perplexity``."""

    section: ClassVar[str] = "eval.perplexity"
    source: str = option(text="a text file, a parquet file, or a Hugging Face dataset")
    column: str = option("text", "of the text, in parquet files and datasets")
    name: str | None = option(None, "configuration of a dataset")
    split: str = option("test", "of a dataset")
    limit: int | None = option(None, "documents from the beginning; null is all", low=1)
    join: str | None = option(
        None, "put between documents to make one of them all; null keeps them apart"
    )
    window: int | None = option(
        None, "tokens a forward sees; null is the model's longest, at most 2048", low=1
    )
    stride: int | None = option(
        None, "tokens by which the window moves on; null is the window", low=1
    )
    max_tokens: int | None = option(None, "score only the first so many tokens", low=1)

    def __post_init__(self):
        super().__post_init__()
        if self.stride is not None and self.window is not None and self.stride > self.window:
            raise ValueError(
                f"eval.perplexity: stride {self.stride} must not be above window {self.window}; "
                "tokens between windows would not be scored"
            )


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Section):
    """The YAML's ``eval`` section."""

    section: ClassVar[str] = "eval"
    models: list[str] = option(
        ["pretrained", "naive", "trained"],
        'what to compare, the first with all others: "pretrained", "naive", "trained", "packed", '
        '"checkpoint", "checkpoint_hard", or folders',
    )
    tasks: list[str] = option(
        ["hestia_zeroshot"],
        'of lm-eval, or "hestia_zeroshot" (ARC-Easy, ARC-Challenge, HellaSwag, PIQA, WinoGrande); '
        "empty for none",
    )
    include_path: str | None = option(None, "folder with YAML files of tasks of your own")
    limit: int | float | None = option(None, "documents per task (a fraction below 1); null is all")
    num_fewshot: int | None = option(
        None, "examples in each prompt; null is as each task says", low=0
    )
    batch_size: int | str = option("auto", 'an int, or "auto"', low=1)
    window: int | None = option(None, "longest input in tokens; null is the model's longest", low=1)
    perplexity: dict[str, TextConfig] = option({}, "name -> text")
    output: str | None = option(None, "path of the results; null is evaluation.json in output_dir")
    every_n_steps: int | None = option(
        None,
        "during training, evaluate the hard model so often; null does not",
        low=1,
    )
    at_end: bool = option(False, "evaluate the hard model when training ends")

    def __post_init__(self):
        super().__post_init__()
        for key in ("models", "tasks"):
            value = getattr(self, key)
            if len(set(value)) < len(value):
                raise ValueError(f"eval.{key} names something twice: {', '.join(value)}")
        if not self.models:
            raise ValueError("eval.models must name at least one model")
        if not self.tasks and not self.perplexity:
            raise ValueError("eval needs tasks or perplexity; both are empty")
        if self.limit is not None and not (
            self.limit >= 1 if isinstance(self.limit, int) else 0 < self.limit < 1
        ):
            raise ValueError(f"eval.limit must be a count, or a share below 1; got {self.limit}")
        if isinstance(self.batch_size, str) and self.batch_size != "auto":
            raise ValueError(
                f'eval.batch_size must be a positive int or "auto"; got {self.batch_size!r}'
            )


@dataclass(frozen=True, kw_only=True)
class TokenizeConfig(Section):
    """The YAML's ``tokenize`` section."""

    section: ClassVar[str] = "tokenize"
    output: str | None = option(None, "folder of the token file; null is tokens in output_dir")
    max_tokens: int | None = option(
        None, "stops at the document that reaches so many; null takes dataset.max_tokens", low=1
    )
    verify: bool = option(True, "reads the file again at the end and compares its checksum")
