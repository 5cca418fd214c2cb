"""The reference of all options of a config, made from the dataclasses, as text and as Markdown."""

import textwrap

from hestia_tune.config import ChatConfig, GeneratedConfig, StreamConfig, TextConfig
from hestia_tune.config.run import RunConfig
from hestia_tune.config.section import describe


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


def options_page() -> str:
    """Return the reference of all YAML options as Markdown, made from the dataclasses."""
    lines = [
        "# Options",
        "",
        "Every key of the YAML file. Any key can be overridden on the command line, such as",
        "`optimizer.lr=1e-3` or `schedule.rho=0`. This page is made by",
        "`python -m hestia_tune options`.",
    ]
    parts = {
        "A run": (RunConfig, ""),
        "`dataset` with `hestia_tune.data.streaming_text_dataset`": (StreamConfig, "dataset."),
        "`dataset` with `hestia_tune.data.streaming_chat_dataset`": (ChatConfig, "dataset."),
        "`dataset` with `hestia_tune.data.self_generated_dataset`": (GeneratedConfig, "dataset."),
        "A text of `eval.perplexity`": (TextConfig, "eval.perplexity.NAME."),
    }
    for title, (section, prefix) in parts.items():
        lines += ["", f"## {title}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for key, kind, default, meaning in describe(section, prefix):
            cells = (f"`{key}`", f"`{kind}`", f"`{default}`", meaning)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"
