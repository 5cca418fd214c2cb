"""``formats``: print which format holds which method, group size and family.

``hestia formats`` calls it. Every cell was measured: a test converts a tiny model
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
        "Each row is a method. The model is a small Llama after two steps of training. Every 256\n"
        "weights of a row share one scale. Only Fairy2i has scales for a whole matrix. INT2 with\n"
        "`start: absmax` uses only three of its four values.",
    ),
    "groups": (
        "Group sizes",
        "Each row is a `group_size`, the number of weights that share a scale. The model is the\n"
        "same Llama, with the method of the first row above: `HestiaQATQuantizer`. Its\n"
        "weight matrices have rows of 256 or 512 weights. With `channel`, each row has one scale.\n"
        "With `tensor`, each matrix has one scale.\n\n"
        "The length of the rows of your matrices (`in_features`) matters too. It must be a\n"
        "multiple of 256 for `TQ1_0`, `TQ2_0` and `Q2_K`, of 64 for `Q2_0`, and of 32 for `Q4_0`,\n"
        "`onnx` and `mlx`. So rows of 576 weights do not fit into `TQ1_0`, `TQ2_0` or `Q2_K`,\n"
        "whatever the group size is.",
    ),
    "families": (
        "Families of models",
        "Each row is a family of models, with `HestiaQATQuantizer` and groups of 256 weights. The\n"
        "models are not trained.",
    ),
}
_HEAD = f"""# What every format holds

`hestia_convert` writes a trained model in the file formats that the option `convert.formats` names.
Which formats can hold your model, and is the file exact? The tables on this page answer both
questions. This command prints the page in the terminal:

```bash
python -m hestia_tune formats
```

There are three tables. Find the row of your method, the row of your group size, and the row of your
family of models. A format is a column. It cannot hold your model if one of its cells in these three
rows says "no", or if the `in_features` of a quantized layer does not [fit](#group-sizes). The file
is exact if the three cells say "exact". `onnx` has
[more limits](convert.md#what-the-command-checks). If your group size has no row, read
[what a format needs](convert.md#what-the-command-checks). If your family has no row, read
[which models are refused](families.md#what-is-limited-or-refused).

The columns of `gguf` are the [block types](convert.md#block-types-of-gguf), the values of
`convert.block_type`. `intx` is the library torchao's own tensor, one byte for each weight. A cell
says what happens in a format:

| cell | meaning |
|---|---|
| {EXACT} | The file holds the weights of the hard model without a change. In the hard model, which a run writes at its end, every quantized weight is a code (a small integer, such as −1, 0 or 1) times a scale. |
| a percentage, for `gguf` | The format rounds the weights. The number is the relative error of the weights. |
| a percentage, for `onnx, int8 head` | With the option `convert.onnx_head=int8`, the format `onnx` rounds the output head to 8 bits. The number is the relative error of the logits. |
| a percentage, for Gemma and GPT-NeoX in `mlx` | mlx-lm computes the activation function GELU with a different formula than transformers. The number is the relative error of the logits. |
| no, and a number | The format refuses the model and writes nothing. The number is the number of the reason under [Why not](#why-not). |

Often the config or the shapes of the weights already show that a format refuses the model. If
`convert.formats` names this format, the training command `hestia_qat` ends with an error before the
training. The command `python -m hestia_tune validate CONFIG` makes the same checks and trains
nothing.

The command `python -m hestia_tune formats` only prints the page. A script measured the cells. For
each row, it converted a small model with random weights, and loaded the file with the library of
the format. [Convert](convert.md) says which program loads which format, and what the programs round
while they run. `hestia_convert` also compares every file with the model.
"""  # noqa: E501
_REASONS = """## Why not

The numbers are the numbers in the tables above. The reasons are the errors of `hestia_convert`,
shortened. These words are in them:

| word | meaning |
|---|---|
| even | the method `HestiaQATQuantizer` with `codebook: binary` or `codebook: int2` |
| fairy2i, int2, int4, dlt, seq | the method of this name in the first table |
| levels | the number of different codes; 3 for −1, 0 and 1 |
| block | A GGUF file stores the weights in blocks. The type of the blocks limits the group size and the number of levels ([limits](convert.md#block-types-of-gguf)). |
| plain | a layer with the forward function of `torch.nn.Linear`; Falcon's layers have their own |
| packed | stored in few bits |
| `X` must load (or run) a model with the hard model's logits; it raises: `E` | The program `X` must compute the logits of transformers: before training with a small random model, and then with the written file. `X` failed with the error `E`. |
| their relative difference | The logits of the program differ, here behind the sliding window of 16 tokens that the small model has. |
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
    lines.append(_REASONS)
    lines += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(lines) + "\n"


def print_formats() -> int:
    """Print the tables of formats, and return 0."""
    print(formats_page(), end="")
    return 0
