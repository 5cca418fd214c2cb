"""Makes the table of formats: every method, group size and family, in every format.

    PYTHONPATH=tests:tests/export python tests/export/formats_table.py [ROW ...]

It converts a tiny model for each row, loads what was written, and writes the result to
hestia_tune/commands/formats.json and docs/formats.md. With names of rows, it prints only these.

A cell is "exact", a relative error, or the reason why the format refuses the model. The error of a
GGUF file is that of its weights, as the package gguf reads them, because llama.cpp rounds
activations. The error of every other file is that of the logits, which its own library computes in
float32.
"""

import contextlib
import io
import json
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

from hestia_tune.commands import convert
from hestia_tune.commands.convert import ConvertRecipe
from hestia_tune.commands.formats import DATA_FILE, formats_page
from hestia_tune.config.sections import FILE_FORMATS
from hestia_tune.errors import InputError
from hestia_tune.export import onnx
from hestia_tune.export.gguf_families import LlamaModel
from hestia_tune.export.gguf_types import BLOCK_TYPES
from hestia_tune.models.hugging_face_files import load_hard

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


def columns() -> dict[str, list[str]]:
    """Return name of a column -> the overrides that ask for its format."""
    found = {}
    for name in FILE_FORMATS:
        asked = [f"convert.formats=[{name}]"]
        if name == "gguf":
            found |= {
                f"{name} {kind}": [*asked, f"convert.block_type={kind}"] for kind in BLOCK_TYPES
            }
        else:
            found[name] = asked
        if name == "onnx":
            found["onnx, int8 head"] = [*asked, "convert.onnx_head=int8"]
    return found


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
    if family in ("Gemma 2", "Gemma 3"):  # windows longer than the tokens, and a global layer
        changes |= {"sliding_window": 64, "num_hidden_layers": 6, "query_pre_attn_scalar": 64}
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
            patch.setattr(convert, "write_onnx", partial(onnx.write_onnx, activation_bits=32))
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
    return "exact" if is_exact else float(f"{error:.2g}")


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
    (name,), source = recipe.formats, recipe.source
    target = recipe.target(name)
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
    found = {
        table: {row: cells(table, row) for row in names if not rows or row in rows}
        for table, names in TABLES.items()
    }
    if rows:
        print(json.dumps(found, indent=1))
        return
    DATA_FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(formats_page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
