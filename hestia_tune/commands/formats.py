"""``formats``: print which format holds which method, group size and family.

``python -m hestia_tune formats`` calls it. Every cell was measured: a test converts a tiny model
for each row, loads what was written, and compares the result with formats.json beside this file. So
the command converts nothing and needs no optional package.
"""

from pathlib import Path

from hestia_tune.files import read_json

DATA_FILE = Path(__file__).with_name("formats.json")
EXACT = "exact"
_TITLES = {
    "methods": ("Methods", "Groups of 256 weights, in a small Llama after two steps of training."),
    "groups": ("Group sizes", "Hestia's ternary codes in the same Llama."),
    "families": ("Families of models", "Hestia's ternary codes in groups of 256, not trained."),
}
_HEAD = f"""# What every format holds

`python -m hestia_tune formats` prints this page. It says what `convert.formats` can write, and how
exact the files are:

- **{EXACT}**: the file holds the hard model's weights without a change.
- **A percentage**: for `gguf`, the relative error of the weights, which are rounded. For other
  formats, the relative error of the logits: the 8-bit head of `onnx` is rounded, and mlx-lm
  computes another GELU than transformers for Gemma.
- **no**: the format refuses the model and leaves nothing behind. The number leads to
  [the reason](#why-not). What a config and shapes show is refused before training.

A test makes the page. It converts a small random model for each row and loads what was written with
the format's own library. [Convert](convert.md) says who loads which format, and what the programs
round while they run. Every file is also compared with its model when you convert.
"""


def formats_page() -> str:
    """Return the tables of formats as Markdown, made from formats.json."""
    tables, reasons, lines = read_json(DATA_FILE), {}, [_HEAD]
    for key, (title, text) in _TITLES.items():
        names = list(next(iter(tables[key].values())))
        lines += [f"## {title}", "", text, "", f"| | {' | '.join(names)} |"]
        lines += ["|---|" + "---|" * len(names)]
        for row, cells in tables[key].items():
            shown = []
            for cell in cells.values():
                if isinstance(cell, float):
                    cell = f"{cell:.2%}"
                elif cell != EXACT:
                    cell = f"no, {reasons.setdefault(cell, len(reasons) + 1)}"
                shown.append(cell)
            lines.append(f"| {row} | {' | '.join(shown)} |")
        lines.append("")
    lines += ["## Why not", ""]
    lines += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(lines) + "\n"
