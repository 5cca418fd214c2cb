"""The options of an evaluation, as they stand in the YAML file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hestia_tune.config import from_mapping


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """A text to measure perplexity on: one entry of ``eval.perplexity``.

    Args:
        source: a text file, a parquet file, or a Hugging Face dataset.
        column: of the text, in parquet files and datasets.
        name, split: of a dataset.
        limit: documents from the beginning; None is all.
        join: put between documents to make one of them all; None keeps them apart.
        window: tokens a forward sees; None is the model's longest, at most 2048.
        stride: tokens by which the window moves on; None is the window.
        max_tokens: score only the first so many tokens.
    """

    source: str
    column: str = "text"
    name: str | None = None
    split: str = "test"
    limit: int | None = None
    join: str | None = None
    window: int | None = None
    stride: int | None = None
    max_tokens: int | None = None

    def __post_init__(self):
        for key in ("limit", "window", "stride", "max_tokens"):
            require_count(f"eval.perplexity: {key}", getattr(self, key))
        if self.stride is not None and self.window is not None and self.stride > self.window:
            raise ValueError(
                f"eval.perplexity: stride {self.stride} must not be above window {self.window}; "
                "tokens between windows would not be scored"
            )


def require_count(name: str, value: Any, least: int = 1) -> None:
    """Raises unless ``value`` is None or an int of at least ``least``."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int; got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}; got {value}")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """The YAML's ``eval`` section.

    Args:
        models: what to compare, the first being what the others are compared with: "pretrained",
            "naive", "trained", "packed", "checkpoint", "checkpoint_hard", or folders.
        tasks: of lm-eval, or "hestia_zeroshot" (ARC-Easy, ARC-Challenge, HellaSwag, PIQA,
            WinoGrande); empty for none.
        include_path: folder with YAML files of tasks of your own.
        limit: documents per task (a fraction below 1); None is all.
        num_fewshot: examples in each prompt; None is as each task says.
        batch_size: an int, or "auto".
        window: longest input in tokens; None is the model's longest.
        perplexity: name -> `TextConfig` of each text.
        cache: keep answers, so that a killed evaluation goes on.
        output: path of the results; None is evaluation.json in the output folder.
        every_n_steps: during training, evaluate the hard model so often with ``tasks`` and
            ``perplexity``; None does not.
        at_end: evaluate the hard model so when training ends.
    """

    models: Sequence[str] = ("pretrained", "naive", "trained")
    tasks: Sequence[str] = ("hestia_zeroshot",)
    include_path: str | None = None
    limit: int | float | None = None
    num_fewshot: int | None = None
    batch_size: int | str = "auto"
    window: int | None = None
    perplexity: Mapping[str, Any] = field(default_factory=dict)
    cache: bool = True
    output: str | None = None
    every_n_steps: int | None = None
    at_end: bool = False

    def __post_init__(self):
        for key in ("models", "tasks"):
            value = getattr(self, key)
            strings = isinstance(value, Sequence) and all(isinstance(v, str) for v in value)
            if isinstance(value, str) or not strings:
                raise TypeError(f"eval.{key} must be a list of strings; got {value!r}")
            if len(set(value)) < len(value):
                raise ValueError(f"eval.{key} names something twice: {', '.join(value)}")
        if not self.models:
            raise ValueError("eval.models must name at least one model")
        if not isinstance(self.perplexity, Mapping):
            raise TypeError(f"eval.perplexity must map names to texts; got {self.perplexity!r}")
        texts = {
            name: from_mapping(TextConfig, text, f"eval.perplexity.{name}")
            if isinstance(text, Mapping)
            else text
            for name, text in self.perplexity.items()
        }
        if bad := [name for name, text in texts.items() if not isinstance(text, TextConfig)]:
            raise TypeError(f"eval.perplexity.{bad[0]} must be a mapping with a source")
        object.__setattr__(self, "perplexity", texts)
        if not self.tasks and not self.perplexity:
            raise ValueError("eval needs tasks or perplexity; both are empty")
        require_count("eval.window", self.window)
        require_count("eval.every_n_steps", self.every_n_steps)
        require_count("eval.num_fewshot", self.num_fewshot, least=0)
        if isinstance(self.limit, float) and not 0 < self.limit < 1:
            raise ValueError(f"eval.limit must be a count, or a share below 1; got {self.limit}")
        if not isinstance(self.limit, float):
            require_count("eval.limit", self.limit)
        for key in ("include_path", "output"):
            if getattr(self, key) is not None and not isinstance(getattr(self, key), str):
                raise TypeError(f"eval.{key} must be a path; got {getattr(self, key)!r}")
        size = self.batch_size
        if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f'eval.batch_size must be a positive int or "auto"; got {size!r}')
        for key in ("cache", "at_end"):
            if not isinstance(getattr(self, key), bool):
                raise TypeError(f"eval.{key} must be True or False; got {getattr(self, key)!r}")
