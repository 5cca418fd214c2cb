"""The reference of all options, as help text and as docs/options.md, from the config's dataclasses.

A dataclass has the type, the range and the meaning of its keys. Only the order of the page and the
text above each part stand here.
"""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from hestia_tune.config import (
    BitsConfig,
    ChatConfig,
    ConvertConfig,
    DistillationConfig,
    EstimationConfig,
    EvalConfig,
    GeneratedConfig,
    ReconstructionConfig,
    ScheduleConfig,
    SourceConfig,
    StreamConfig,
    TextConfig,
)
from hestia_tune.config.run_config import RunConfig
from hestia_tune.config.section import Section, describe


def options_text() -> str:
    """Return the options of a run as plain text, by section, for --help."""
    groups: dict[str, list[str]] = {}
    for key, kind, default, meaning in describe(RunConfig):
        default = default if default == "must be given" else f"default {default}"
        text = textwrap.fill(f"{meaning} ({kind}; {default})", 90)
        lines = groups.setdefault(key.rpartition(".")[0] or "run", [])
        lines += [f"  {key}", textwrap.indent(text, " " * 6)]
    parts = (f"{group}:\n" + "\n".join(lines) for group, lines in groups.items())
    return "options of the config, by section:\n\n" + "\n\n".join(parts)


# Heading of docs/options.md -> its keys. Those that are in no other group are below "Run".
_KEYS_OF_RUN = {
    "Run": "output_dir overwrite_output resume_from_checkpoint device dtype compile "
    "cuda_graphs seed",
    "Model and method": "model tokenizer checkpointer init frozen_modules quantizer",
    "Data and validation": "dataset shuffle num_workers dataset_val batch_size_val "
    "run_val_every_n_steps max_val_batches",
    "Training": "optimizer loss lr_scheduler clip_grad_norm batch_size global_batch_size "
    "gradient_accumulation_steps epochs max_steps_per_epoch max_steps",
    "Memory": "enable_activation_checkpointing enable_activation_offloading fsdp_cpu_offload "
    "fsdp_reshard_after_forward",
    "Logs and checkpoints": "log_level log_every_n_steps metric_logger profiler "
    "save_every_n_steps keep_last_checkpoints",
}
# Heading of docs/options.md -> the section, and a text about it.
_SECTIONS = {
    "schedule": (
        ScheduleConfig,
        "Pressure and temperature; see [Schedule](how_it_works.md#schedule).",
    ),
    "distillation": (DistillationConfig, "Training towards the predictions of a teacher."),
    "sensitivity_estimation": (
        EstimationConfig,
        "How the sensitivity of the layers is measured; see "
        "[Sensitivity](how_it_works.md#sensitivity).",
    ),
    "reconstruct": (
        ReconstructionConfig,
        "Training of one window of blocks after another; see "
        "[Reconstruction](budgets.md#reconstruction).",
    ),
    "bits": (BitsConfig, "A budget of bits per weight; see [Budgets](bits.md#budgets)."),
    "convert": (
        ConvertConfig,
        "Which files `hestia convert` writes, and from which model; see [Formats and "
        "runtimes](formats.md).",
    ),
    "eval": (
        EvalConfig,
        "Which models `hestia eval` compares, and on what; see [Evaluation](evaluate.md).",
    ),
    "eval.perplexity": (
        TextConfig,
        "The options of each text, below a name of your choice; see "
        "[Perplexity](evaluate.md#perplexity).",
    ),
    "Datasets": (
        SourceConfig,
        "Options that text and chat datasets of `hestia_tune.data` share, under `dataset` and "
        "`dataset_val`; [Data](data.md) has examples.",
    ),
    "Text datasets": (
        StreamConfig,
        "Further options of `streaming_text_dataset` and `text_dataset`.",
    ),
    "Chat datasets": (
        ChatConfig,
        "Further options of `streaming_chat_dataset` and `chat_dataset`; see "
        "[Chats](data.md#chats).",
    ),
    "Generated datasets": (
        GeneratedConfig,
        "All options of `self_generated_dataset`; see [Generated data](data.md#generated-data).",
    ),
}
_TYPES = {int: "integer", float: "number", str: "string"}
# What is code in the text of an option: a word in quotes, null, and names of options and files.
_CODE = re.compile(r'"([^"\s]+)"|((?<![\w/])(?:[\w.]*\w_\w[\w.]*\w|null|\w+\.json)(?!\w))')


def options_page() -> str:
    """Return the reference of all YAML options as Markdown, made from the dataclasses."""
    lines = [
        "# Options",
        "",
        "The keys of the YAML file. Override any of them on the command line, as in",
        "`optimizer.lr=1e-3 schedule.rho=0`; `~lr_scheduler` deletes a key. A component, such as",
        "`model` or `optimizer`, is a section with a `_component_`, whose other keys are its",
        "arguments. `hestia options` prints this page.",
    ]
    every = {key: (field, text) for key, field, text in _options(RunConfig)}
    grouped = {key for keys in _KEYS_OF_RUN.values() for key in keys.split()}
    for title, keys in _KEYS_OF_RUN.items():
        lines += ["", f"## {title}", ""]
        rest = every.keys() - grouped if title == "Run" else set()
        for key in [*keys.split(), *(key for key in every if key in rest)]:
            lines += _option_lines(key, key, *every[key])
    for title, (section, about) in _SECTIONS.items():
        prefix = {"eval.perplexity": "eval.perplexity.NAME"}.get(title, section.section)
        # A key is an option of several datasets, and an anchor stands once on the page: of
        # dataset.seed, as dataset.seed and generated_dataset.seed.
        anchor = title.lower().replace(" ", "_").replace("datasets", "dataset")
        own = inspect.get_annotations(section) if issubclass(section, SourceConfig) else None
        lines += ["", f"## {title}", "", *textwrap.wrap(about, 116), ""]
        for name, field, text in _options(section):
            if own is None or name in own:
                lines += _option_lines(f"{prefix}.{name}", f"{anchor}.{name}", field, text)
    return "\n".join(lines) + "\n"


def _options(section: type[Section]) -> Iterator[tuple[str, dataclasses.Field, str]]:
    """Yield (name, field, meaning) of every option of a section, without its subsections."""
    fields = {field.name: field for field in dataclasses.fields(section)}
    for name, _, _, meaning in describe(section):
        if name in fields:
            yield name, fields[name], meaning


def _option_lines(key: str, anchor: str, field: dataclasses.Field, text: str) -> list[str]:
    """Return an item of the list of options: key, values, default and meaning."""
    is_set = field.default_factory is not dataclasses.MISSING
    default = field.default_factory() if is_set else field.default
    values = _values_of(field)
    facts = ["required" if default is dataclasses.MISSING else f"default `{_in_yaml(default)}`"]
    if values:
        facts.insert(0, values)
    spans = re.split(r"(`[^`]*`)", text)
    spans[::2] = [_CODE.sub(lambda match: f"`{match[1] or match[2]}`", span) for span in spans[::2]]
    whole = f'<a id="{anchor}"></a>`{key}` ({", ".join(facts)}): {"".join(spans)}'
    options = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(whole, 116, initial_indent="- ", subsequent_indent="  ", **options)


def _values_of(field: dataclasses.Field) -> str:
    """Return the values that an option may have, as Markdown. Empty: its text says it."""
    kinds = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
    choices = field.metadata.get("choices", ())
    words = [f"`{word}`" for word in (choices() if callable(choices) else choices)]
    found = []
    for kind in kinds:
        if get_origin(kind) is list:
            several = "a list of them" if str in kinds else f"list of {', '.join(words)}"
            found.append(several if words else "list")
        elif kind is str and words:
            found += words
        elif kind is bool:
            found += ["`True`", "`False`"]
        elif kind is NoneType:
            found.append("`null`")
        elif kind is int and float in kinds:
            continue
        elif kind is not Any and get_origin(kind) is not dict:
            found.append(_TYPES[kind])
    return " or ".join([", ".join(found[:-1]), found[-1]]) if len(found) > 1 else "".join(found)


def _in_yaml(value: Any) -> str:
    """Return a default as a command line or a YAML file has it."""
    if isinstance(value, dict) and "_component_" in value:
        return value["_component_"]
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return "null" if value is None else str(value)
