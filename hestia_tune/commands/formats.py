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
    "methods": (
        "Methods",
        "Each row is a method. The model is a small Llama in groups of 256 weights, after two\n"
        "steps of training.",
    ),
    "groups": (
        "Group sizes",
        "Each row is a `group_size`. The model is the same Llama with Hestia's ternary codes.",
    ),
    "families": (
        "Families of models",
        "Each row is a family of models with Hestia's ternary codes in groups of 256. The models\n"
        "are not trained.",
    ),
}
_HEAD = f"""# What every format holds

Can `convert.formats` write your model, and is the file exact? This command prints this page:

```bash
python -m hestia_tune formats
```

Find the row of your method, your group size and your family of models. A cell says what happens in
a format:

| cell | meaning |
|---|---|
| {EXACT} | The file holds the weights of the hard model without a change. |
| a percentage, for `gguf` | The format rounds the weights. The number is the relative error of the weights. |
| a percentage, for `onnx, int8 head` | The format rounds the output head to 8 bits. The number is the relative error of the logits. |
| a percentage, for Gemma in `mlx` | mlx-lm computes another GELU than transformers. The number is the relative error of the logits. |
| no, and a number | The format refuses the model and writes nothing. The number is the number of the reason under [Why not](#why-not). |

If the config or the shapes already show that a format refuses the model, `hestia_qat` refuses it
before training. If your cell says "no", choose a format with "{EXACT}" in your row.

A script makes this page. For each row it converts a small random model, and loads the file with the
library of the format. [Convert](convert.md) says which program loads which format, and what the
programs round while they run. `hestia_convert` also compares every file with the model.
"""  # noqa: E501


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
    lines += ["## Why not", "", "The numbers are the numbers in the tables above.", ""]
    lines += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(lines) + "\n"
