"""Makes docs/formats.md: what the formats are, and every method, group size and family in each.

    PYTHONPATH=tests:tests/export python tests/export/formats_table.py [ROW ...]

The first table comes from the registry of formats. For the others, it converts a tiny model for
each row and loads what was written. With names of rows, it measures only these and keeps the rest
of the page: the page is the only place that holds the cells.

A cell is "exact", a relative error, or the reason why the format refuses the model. The error of a
GGUF file is that of its weights, as the package gguf reads them, because llama.cpp rounds
activations. The error of every other file is that of the logits, which its own library computes in
float32.
"""

import contextlib
import io
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from families import FAMILIES, MIXTURES, MORE, OTHERS, STATE_SPACES, family_config, make_family
from gguf_models import read_tensor_infos
from omegaconf import DictConfig, OmegaConf
from readers import (
    genai_logits,
    mlx_logits,
    openvino_session,
    packed_logits,
    transformers_logits,
)
from tiny import make_config, make_model_dir, run

from hestia_tune.commands.convert import ConvertRecipe
from hestia_tune.errors import InputError
from hestia_tune.export import onnx
from hestia_tune.export.format import all_formats
from hestia_tune.export.gguf import BLOCK_TYPES
from hestia_tune.export.gguf_families import LlamaModel
from hestia_tune.models.contents import KINDS
from hestia_tune.models.decoder import load_hard

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
NOISE = 1e-4  # libraries multiply the same weights in other orders
TOKENS = torch.arange(2, 22)[None]
LLAMA = {"embed_dim": 256, "intermediate_dim": 512, "num_layers": 1}
# Widths that are multiples of GGUF's largest block, by the names of every config class.
WIDE = dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim"), 256)
WIDE |= dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size"), 512)
WIDE |= {"n_layer": 2, "n_layers": 2, "n_head": 4, "n_heads": 4, "max_seq_len": 64}
ALL_FAMILIES = FAMILIES | OTHERS | MORE | MIXTURES | STATE_SPACES
METHODS = (
    "HestiaQATQuantizer",
    "HestiaQATQuantizer, scale: learned",
    "HestiaQATQuantizer, threshold: learned",
    "HestiaQATQuantizer, offset: learned",
    "HestiaQATQuantizer, codebook: binary",
    "HestiaQATQuantizer, codebook: int2",
    "TwoBit",
    "TwoBit, scale: learned",
    "Fairy2iQATQuantizer, num_stages: 1",
    "Fairy2iQATQuantizer, num_stages: 2",
    "AbsMean",
    "TWN",
    "INT2, start: absmax",
    "INT2, start: least_squares",
    "INT4",
    "LSQ",
    "DLT",
    "Tequila",
    "SEQ, bits: ternary",
    "SEQ, bits: 2",
)
GROUPS = ("16", "32", "64", "128", "256", "channel", "tensor")
TABLES = {"methods": METHODS, "groups": GROUPS, "families": tuple(ALL_FAMILIES)}


EXACT = "exact"
TITLES = {
    "methods": (
        "Methods",
        "Each row is a method. The model is a small Llama after two steps of training. Every 256\n"
        "weights of a row share one scale. Only Fairy2i has scales for a whole matrix. INT2 with\n"
        "`start: absmax` uses only three of its four values.",
    ),
    "groups": (
        "Group sizes",
        "Each row is a `group_size`, the number of weights that share a scale. The model is the\n"
        "same Llama, with the method of the first row above: `HestiaQATQuantizer`. Its weight\n"
        "matrices have rows of 256 or 512 weights. With `channel`, each row has one scale. With\n"
        "`tensor`, each matrix has one scale.\n\n"
        "The length of the rows of your matrices (`in_features`) matters too. It must be a\n"
        "multiple of 256 for `TQ1_0` and `TQ2_0`, of 64 for `Q2_0`, and of 32 for `Q4_0`, `onnx`\n"
        "and `mlx`. Rows of 576 weights, for example, do not fit into `TQ1_0` or `TQ2_0`, for\n"
        "any group size.",
    ),
    "families": (
        "Families of models",
        "Each row is a family of models, with `HestiaQATQuantizer` and groups of 256 weights. The\n"
        "models are not trained.",
    ),
}
HEAD = """# What every format holds

`hestia convert` writes a trained model in the file formats that `convert.formats` names. This page
says what the formats are, which of them can hold your model, and whether the file is exact.

```bash
hestia convert demo 'convert.formats=[all]'   # every format that can hold the model
```

## The formats

"""
CELLS = f"""
The column "codes" names the codes that a format holds exactly: binary (−1, 1), ternary (−1, 0, 1),
two bits (−1, 0, 1, 2, with a signed scale), four levels (−3, −1, 1, 3), 4-bit integers (−8 to 7) and
powers of i (Fairy2i). "None" stands for weights that are no product of a code and a scale, as in the
method DLT.

## Reading the tables

The tables below are measured. Find the row of your method, of your group size, and of your family of
models. A format is a column. It cannot hold your model if one of its cells in these three rows says
"no", or if the `in_features` of a quantized layer does not [fit](#group-sizes). The file is exact if
the three cells say "exact". `onnx` has [more limits](convert.md#what-the-command-checks). If your
group size has no row, read [what a format needs](convert.md#what-the-command-checks). If your family
has no row, read [which models are refused](families.md#what-is-limited-or-refused). The columns of
`gguf` are the [block types](convert.md#block-types-of-gguf), the values of `convert.block_type`.

| cell | meaning |
|---|---|
| {EXACT} | The file holds the weights of the hard model without a change. In the hard model, which a run writes at its end, every quantized weight is a code times a scale. |
| a percentage, for `onnx, int8 head` | With the option `convert.onnx_head=int8`, the format `onnx` rounds the output head to 8 bits. The number is the relative error of the logits. |
| a percentage, for Gemma and GPT-NeoX in `mlx` | mlx-lm computes the activation function GELU with a different formula than transformers. The number is the relative error of the logits. |
| no, and a number | The format refuses the model and writes nothing. The number is the number of the reason under [Why not](#why-not). |

Often the config or the shapes of the weights already show that a format refuses the model. If
`convert.formats` names this format, `hestia qat` ends with an error before the training, and
`hestia validate` makes the same checks and trains nothing.

A test converts a small model with random weights for each row, and loads the file with the library
of the format. [Convert](convert.md) says what the programs round while they run. `hestia convert`
also compares every file with the model.
"""  # noqa: E501
WHY_NOT = """## Why not

The numbers are the numbers in the tables above. The reasons are the errors of `hestia convert`,
shortened. These words are in them:

| word | meaning |
|---|---|
| even | the method `HestiaQATQuantizer` with `codebook: binary` or `codebook: int2` |
| fairy2i, int2, int4, dlt, seq | the method of this name in the first table |
| codes | the integers that are multiplied by the scale; −1 to 1 for ternary weights |
| block | A GGUF file stores the weights in blocks. The type of the blocks limits the group size and the codes ([limits](convert.md#block-types-of-gguf)). |
| plain | a layer with the forward function of `torch.nn.Linear`; Falcon's layers have their own |
| packed | stored in few bits |
| `X` must load (or run) a model with the hard model's logits; it raises: `E` | The program `X` must compute the logits of transformers: before training with a small random model, and then with the written file. `X` failed with the error `E`. |
| their relative difference | The logits of the program differ, here behind the sliding window of 16 tokens that the small model has. |
"""  # noqa: E501
Tables = dict[str, dict[str, dict[str, str | float]]]


def registry_table() -> str:
    """Return the table of all formats in the registry."""
    heads = ("format", "what it is", "runs in", "codes", "groups", "models", "experts", "extra")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for form in all_formats():
        codes = [", ".join(name for levels, name in KINDS.items() if levels in form.codes)]
        codes += ["powers of i"] * any(map(is_complex, form.codes))
        codes += ["none"] * (() in form.codes)
        names = [name.removesuffix("ForCausalLM") for name in form.architectures]
        cells = (
            f"`{form.name}`",
            form.about,
            form.runs_in,
            "; ".join(codes),
            f"multiples of {form.group_multiple}" if form.group_multiple > 1 else "any",
            ", ".join(names) or "any",
            "yes" if form.holds_stacks else "no",
            f"`{form.extra}`" if form.extra else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def is_complex(codes: tuple[complex, ...]) -> bool:
    return any(isinstance(code, complex) for code in codes)


def formats_page(tables: Tables) -> str:
    """Return docs/formats.md for the cells of `read_page`."""
    reasons: dict[str, int] = {}
    lines = [HEAD + registry_table() + CELLS]
    for key, (title, text) in TITLES.items():
        names = list(next(iter(tables[key].values())))
        lines += [f"## {title}", "", text, "", f"| | {' | '.join(names)} |"]
        lines += ["|---|" + "---|" * len(names)]
        for row, cells in tables[key].items():
            shown = []
            for cell in cells.values():
                if isinstance(cell, float):
                    cell = f"{100 * cell:.2g}%"
                elif cell != EXACT:
                    cell = f"no, {reasons.setdefault(cell, len(reasons) + 1)}"
                shown.append(cell)
            lines.append(f"| {row} | {' | '.join(shown)} |")
        lines.append("")
    lines.append(WHY_NOT)
    lines += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(lines) + "\n"


def read_page() -> Tables:
    """Return the measured cells of docs/formats.md: table -> row -> column -> cell."""
    text = PAGE.read_text(encoding="utf-8")
    listed = re.findall(r"(?m)^(\d+)\. (.*)$", text.partition(WHY_NOT)[2])
    reasons, tables = {f"no, {number}": reason for number, reason in listed}, {}
    for key, (title, _) in TITLES.items():
        section = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        lines = [line[1:-1].split("|") for line in section.splitlines() if line[:1] == "|"]
        (_, *names), _, *rows = [[cell.strip() for cell in line] for line in lines]
        tables[key] = {
            row: {
                name: round(float(cell[:-1]) / 100, 6)
                if cell.endswith("%")
                else reasons.get(cell, cell)
                for name, cell in zip(names, cells, strict=True)
            }
            for row, *cells in rows
        }
    return tables


def columns() -> dict[str, list[str]]:
    """Return name of a column -> the overrides that ask for its format."""
    return {
        name: [f"convert.formats=[{form.name}]", *option]
        for form in all_formats()
        for name, *option in form.variants.items() or [(form.name,)]
    }


def make_method(folder: Path, row: str, group_size: str = "256") -> DictConfig:
    """Train a Llama for two steps and return its config."""
    model = make_model_dir(folder / "model", **LLAMA)
    name, *options = row.split(", ")
    quantizer = dict(option.split(": ") for option in options)
    if name != "Fairy2iQATQuantizer":
        quantizer["group_size"] = group_size
    cfg = make_config(model, folder / "out", "max_steps=2", "dataset_val=null")
    cfg.model |= LLAMA
    dots = [f"quantizer.{key}={value}" for key, value in quantizer.items()]
    cfg.quantizer = {"_component_": f"hestia_tune.{name}"}
    cfg = OmegaConf.merge(cfg, OmegaConf.from_dotlist(dots))
    assert run(cfg).finished
    return cfg


def make_naive(folder: Path, family: str) -> DictConfig:
    """Make a model of a family and return a config that converts it without training."""
    changes = WIDE | ({"head_dim": 64} if "head_dim" in ALL_FAMILIES[family][1] else {})
    if family in ("Gemma 2", "Gemma 3"):  # a window, and a global layer
        changes |= {"sliding_window": 64, "num_hidden_layers": 6, "query_pre_attn_scalar": 64}
    if family in ("GPT-NeoX", "GPT-J"):  # mlx-lm knows their usual width only
        changes |= {"intermediate_size": 1024, "n_inner": 1024}
    make_family(folder / "model", family, **changes)
    overrides = ("convert.source=pretrained", "quantizer.group_size=256")
    return family_config(folder / "model", folder / "out", *overrides)


def cells(table: str, row: str, only: set[str] | None = None) -> dict[str, str | float]:
    """Return name of a column -> cell of one row.

    Args:
        table: A name in `TABLES`.
        row: A row of the table.
        only: Names of the columns. None: all.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if table == "families":
            cfg = make_naive(folder, row)
        else:
            cfg = make_method(folder, *((row,) if table == "methods" else (METHODS[0], row)))
        return {
            column: cell(cfg, column, overrides)
            for column, overrides in columns().items()
            if only is None or column in only
        }


def cell(cfg: DictConfig, column: str, overrides: list[str]) -> str | float:
    """Convert a model and return the cell of one column."""
    overrides = OmegaConf.from_dotlist(["convert.overwrite=True", *overrides])
    try:
        with pytest.MonkeyPatch.context() as patch:
            # Products without rounded activations show whether the weights in the file are exact.
            patch.setattr(onnx, "write_onnx", partial(onnx.write_onnx, activation_bits=32))
            patch.setattr(onnx, "subprocess", SimpleNamespace(run=run_here))
            recipe = ConvertRecipe(OmegaConf.merge(cfg, overrides))
            recipe.run()
    except InputError as error:
        rule, *rest = str(error).split("; ")
        found = re.match("it raises.*|their relative difference", rest[0]) if rest else None
        return rule.partition(", such as")[0] + (f"; {found[0]}" if found else "")
    pairs = list(compare(recipe, column))
    difference = sum(float((a.double() - b).square().sum()) for a, b in pairs)
    error = (difference / sum(float(b.double().square().sum()) for _, b in pairs)) ** 0.5
    is_exact = error == 0 if column.startswith("gguf") else error < NOISE
    return EXACT if is_exact else float(f"{error:.2g}")


def run_here(command: list[str], cwd: Path, env: dict[str, str], **_) -> CompletedProcess:
    """Run ``python -m MODULE ARGUMENTS`` in this process, which saves the time of its imports."""
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        patch.setattr(sys, "argv", command[2:])
        patch.setattr(os, "environ", env)
        patch.chdir(cwd)
        runpy.run_module(command[2], run_name="__main__")
    return CompletedProcess(command, 0)


def compare(recipe: ConvertRecipe, column: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield what a format holds, and what the hard model has."""
    ((name, form),), source = recipe.formats.items(), recipe.source
    target = form.target(recipe.output)
    if name == "gguf":
        model, infos = LlamaModel(source), read_tensor_infos(target)
        types = {kind.ggml_id: kind for kind in BLOCK_TYPES.values()}
        for key, weight in model.tensors():
            kind, shape, position = infos[key]
            if kind in types:
                count = shape.numel() // types[kind].block * types[kind].num_bytes
                data = np.fromfile(target, np.uint8, count, offset=position)
                yield torch.from_numpy(types[kind].unpack(data)).view(shape), weight
        return
    with torch.no_grad():
        expected = load_hard(source, torch.float32)(TOKENS).logits
    if name == "onnx":
        yield genai_logits(target, TOKENS.tolist()), expected[:, -1]
    elif name == "openvino":
        run_model = openvino_session(target, DYNAMIC_QUANTIZATION_GROUP_SIZE="0")
        yield run_model(TOKENS, 0, [0]), expected
    else:
        kinds = {"torchao": packed_logits, "intx": packed_logits, "mlx": mlx_logits}
        yield kinds.get(name, transformers_logits)(target, TOKENS), expected


def main(rows: list[str]) -> None:
    found = read_page() if rows else {table: {} for table in TABLES}
    for table, names in TABLES.items():
        for row in names:
            if not rows or row in rows:
                found[table][row] = cells(table, row)
        found[table] = {row: found[table][row] for row in names}
    PAGE.write_text(formats_page(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
