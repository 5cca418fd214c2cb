"""What ``python -m hestia_tune configs`` and ``options`` print."""

import ast
import importlib.util
import re
from pathlib import Path

from hestia_tune.config import GeneratedConfig, StreamConfig, TextConfig
from hestia_tune.config.files import load_config, packaged_configs
from hestia_tune.config.run import RunConfig
from hestia_tune.config.section import describe


def listing() -> str:
    """Return the recipes, the packaged configs and the overlays, one per line."""
    lines = ["recipes, for `tune run RECIPE --config CONFIG`:"]
    folder = Path(str(importlib.util.find_spec("hestia_qat").origin)).parent
    for path in sorted(folder.glob("hestia_*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        lines.append(f"  {path.stem:<22}{docstring.partition(': ')[2].rstrip('.')}")
    runs, overlays = [], []
    for name, path in packaged_configs().items():
        first = path.read_text(encoding="utf-8").partition("\n")[0].strip("# .")
        line = f"  {name:<22}{re.split('[:;.] ', first)[0]}"
        (runs if "model" in load_config(name) else overlays).append(line)
    lines += ["configs:", *runs, "overlays, for --config CONFIG+OVERLAY:"]
    return "\n".join([*lines, *(line for line in overlays if line.split()[0] != "base")])


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
        "`dataset` with `hestia_tune.data.self_generated_dataset`": (GeneratedConfig, "dataset."),
        "A text of `eval.perplexity`": (TextConfig, "eval.perplexity.NAME."),
    }
    for title, (section, prefix) in parts.items():
        lines += ["", f"## {title}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for key, kind, default, meaning in describe(section, prefix):
            cells = (f"`{key}`", f"`{kind}`", f"`{default}`", meaning)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"
