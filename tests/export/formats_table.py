"""Writes the tables of docs/format_support.md: formats, and each method, group and family in them.

    PYTHONPATH=tests:tests/export python tests/export/formats_table.py [ROW ...]

The prose of the page is written by hand. Each table stands between two comments, ``<!-- table: NAME
-->`` and ``<!-- end of table -->``, and only what is between them is replaced. The table of formats
comes from the registry of formats. For the others, a tiny model is converted for each row, and what
was written is loaded. With names of rows, only these are measured and the other cells stay: the
page is the only place that holds the cells.

A cell is "exact", a bound of the relative error, or the reason why the format refuses the model.
The error of a GGUF file is that of its weights, as the package gguf reads them, because llama.cpp
rounds activations. The error of every other file is that of the logits, which its own library
computes in float32. Rows with the same cells share a line of the page.
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

PAGE = Path(__file__).parents[2] / "docs" / "format_support.md"
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
BOUNDS = {0.001: "below 0.1%", 0.01: "below 1%"}
# Errors of `hestia convert` -> what they have in common for all models, methods and block types.
REASONS = {
    r"a model of .* can only be written as .*": "the format does not hold the codes of the method",
    r"no block of \w+ holds .*": "no block of this type holds these codes in groups of this size",
    r"(\w+) export knows the architectures? .*": r"\1 export does not know the architecture",
    r"\w+ files cannot hold the weights of experts": "the format cannot hold expert weights",
    r"(the installed mlx-lm does not know the model_type) \w+": r"\1",
    r"(.*) a packed \w+ (with the hard model's logits.*)": r"\1 a packed model \2",
}
Tables = dict[str, dict[str, dict[str, str]]]


def registry_table() -> str:
    """Return the table of all formats in the registry."""
    heads = ("format", "what it is", "runs in", "codes", "groups", "experts", "extra")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for form in all_formats():
        codes = [", ".join(name for levels, name in KINDS.items() if levels in form.codes)]
        codes += ["powers of i"] * any(map(is_complex, form.codes))
        codes += ["none"] * (() in form.codes)
        cells = (
            f"`{form.name}`",
            form.about,
            form.runs_in,
            "; ".join(codes),
            f"multiples of {form.group_multiple}" if form.group_multiple > 1 else "any",
            "yes" if form.holds_stacks else "no",
            f"`{form.extra}`" if form.extra else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def is_complex(codes: tuple[complex, ...]) -> bool:
    return any(isinstance(code, complex) for code in codes)


def formats_page(text: str, tables: Tables) -> str:
    """Return the text of docs/format_support.md with other tables.

    Args:
        text: The page.
        tables: What `read_page` returns.
    """
    reasons: dict[str, int] = {}
    written = {"formats": registry_table()}
    for key, rows in tables.items():
        names = list(next(iter(rows.values())))
        lines: dict[tuple[str, ...], list[str]] = {}  # cells -> rows
        for row, cells in rows.items():
            shown = (
                cell
                if cell == EXACT or cell.endswith("%")
                else f"no, {reasons.setdefault(cell, len(reasons) + 1)}"
                for cell in cells.values()
            )
            lines.setdefault(tuple(shown), []).append(row)
        table = [f"||{'|'.join(names)}|", "|---|" + "---|" * len(names)]
        table += [f"|{'; '.join(which)}|{'|'.join(cells)}|" for cells, which in lines.items()]
        written[key] = "\n".join(table) + "\n"
    written["reasons"] = "".join(f"{number}. {reason}\n" for reason, number in reasons.items())
    for name, table in written.items():
        before, _, after = parts(text, name)
        text = f"{before}\n{table}\n{after}"
    return text


def parts(text: str, name: str) -> tuple[str, str, str]:
    """Return the page before a table, the table with the lines around it, and the page behind it.

    Args:
        text: The page.
        name: A name in `TABLES`, "formats" or "reasons".

    Raises:
        ValueError: If the page has no comments around this table.
    """
    start, stop = f"<!-- table: {name} -->\n", "<!-- end of table -->\n"
    at = text.index(start) + len(start)
    end = text.index(stop, at)
    return text[:at], text[at:end], text[end:]


def read_page() -> Tables:
    """Return the measured cells of docs/format_support.md: table -> row -> column -> cell."""
    text = PAGE.read_text(encoding="utf-8")
    listed = re.findall(r"(?m)^(\d+)\. (.*)$", parts(text, "reasons")[1])
    reasons, tables = {f"no, {number}": reason for number, reason in listed}, {}
    for key, names in TABLES.items():
        found = parts(text, key)[1].strip().splitlines()
        lines = [line[1:-1].split("|") for line in found]
        (_, *columns), _, *rows = [[cell.strip() for cell in line] for line in lines]
        measured = {
            row: {n: reasons.get(cell, cell) for n, cell in zip(columns, cells, strict=True)}
            for which, *cells in rows
            for row in which.split("; ")
        }
        known = {name: measured.pop(name) for name in names if name in measured}
        tables[key] = known | measured
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


def cells(table: str, row: str, only: set[str] | None = None) -> dict[str, str]:
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


def cell(cfg: DictConfig, column: str, overrides: list[str]) -> str:
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
        return reason(str(error))
    pairs = list(compare(recipe, column))
    difference = sum(float((a.double() - b).square().sum()) for a, b in pairs)
    error = (difference / sum(float(b.double().square().sum()) for _, b in pairs)) ** 0.5
    is_exact = error == 0 if column.startswith("gguf") else error < NOISE
    if is_exact:
        return EXACT
    return next((text for bound, text in BOUNDS.items() if error < bound), f"{100 * error:.2g}%")


def reason(error: str) -> str:
    """Return the reason in an error, without the remedy and the names and sizes of the model."""
    rule, *rest = error.split("; ")
    found = re.match("it raises.*|their relative difference", rest[0]) if rest else None
    text = rule.partition(", such as")[0] + (f"; {found[0]}" if found else "")
    for pattern, short in REASONS.items():
        if match := re.fullmatch(pattern, text):
            return match.expand(short)
    return text


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
    PAGE.write_text(formats_page(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
