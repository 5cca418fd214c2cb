"""``hestia report``: write one HTML page about one run or several.

The page shows what the commands wrote into the runs' folders, under the default names. The only
thing that it computes is the share of zeros in every layer, for which it reads the weights of the
hard model. The page is one file without scripts, and its pictures are inside. So it can be mailed,
and opened without a network. All sentences for the reader are in the template ``report.html``.

A part of the page is left out if the run has no files for it. A list at the end of the page says
which command makes these files.
"""

import base64
import contextlib
import re
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2

import hestia_tune
from hestia_tune.commands.convert import SIZES_FILE, sizes_table
from hestia_tune.commands.inspect import compare_runs
from hestia_tune.errors import InputError
from hestia_tune.evaluation.compare import Comparison
from hestia_tune.files import read_json, read_json_lines, write_atomically
from hestia_tune.methods.groups import TERNARY
from hestia_tune.models.contents import read_matrices
from hestia_tune.plots import plot_runs, plot_zeros
from hestia_tune.training.outputs import PRETRAINED

_TEMPLATE = Path(__file__).with_name("report.html")
_HEADLINES = ("kl divergence", "top1 agreement, %", "perplexity ratio")
Table = list[list[str]]  # the first row is the header


def write_report(runs: Sequence[str], output: str | None = None) -> Path:
    """Write the page of one run or of several runs, and return its path.

    Args:
        runs: Output folders of ``hestia_qat``.
        output: Path of the page. None: report.html in the run's folder, or in the current folder
            for several runs.

    Raises:
        InputError: If a folder has no metrics of a run, or a file in it is damaged.
    """
    for run in runs:
        if not (Path(run) / "metrics.jsonl").is_file():
            reason = "has no metrics.jsonl" if Path(run).is_dir() else "is no folder"
            raise InputError(f"{run} {reason}; give an output_dir of hestia_qat")
    parts = {run: _parts(Path(run)) for run in runs}
    facts = {run: _facts(Path(run), parts[run]) for run in parts}
    labels = dict.fromkeys(label for values in facts.values() for label in values)
    several, shared = len(parts) > 1, {}
    if several:
        histories = {run: _history(Path(run)) for run in parts}
        measured = [run for run in parts if parts[run]["losses"]]
        shared = {"losses": _losses(*measured), "picture": _drawn(plot_runs, histories)}
    page = jinja2.Template(
        _TEMPLATE.read_text(encoding="utf-8"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    ).render(
        title=f"{len(parts)} runs" if several else Path(runs[0]).resolve().name,
        summary=[
            ["", *parts] if several else [],
            *([label, *(values.get(label, "") for values in facts.values())] for label in labels),
        ],
        shared=shared,
        parts=parts,
        version=hestia_tune.__version__,
    )
    path = Path(output or Path("" if several else runs[0]) / "report.html")
    write_atomically(path, page)
    return path


def print_report(runs: Sequence[str], output: str | None = None) -> int:
    """Write the page, print its path, and return 0."""
    print(write_report(runs, output))
    return 0


def _parts(folder: Path) -> dict[str, Any]:
    """Return name in the template -> content of every part of a run's page.

    A table is a `Table`, a picture is a data URI. What the run lacks is empty.
    """
    found = _read(folder / "evaluation.json", models={}, tables={})
    models, evaluation = found["models"], ""
    if models:
        evaluation = Comparison(models, found["tables"]).markdown()
    prompts: dict[str, dict[str, str]] = {}
    for name, model in models.items():
        for prompt, text in model.get("continuations", {}).items():
            prompts.setdefault(prompt, {})[name] = text
    curves = _picture(folder / "curves.png")
    return {
        "losses": _losses(str(folder)),
        "curves": curves,
        "history": "" if curves else _drawn(plot_runs, {folder.name: _history(folder)}),
        "sensitivity": _picture(folder / "sensitivity.png"),
        "zeros": _zeros(folder / "hard_model"),
        "reconstruction": _picture(folder / "reconstruction" / "errors.png"),
        "sizes": _table(sizes_table(_read(folder / "converted" / SIZES_FILE))),
        "evaluation": _table(evaluation),
        "legend": evaluation.partition("\n\n")[2],
        "prompts": prompts,
    }


def _facts(folder: Path, parts: dict[str, Any]) -> dict[str, str]:
    """Return label -> value of what describes a run in short."""
    rows, results = _history(folder), _read(folder / "results.json", layers=[], data=[])
    last = {key: value for row in rows for key, value in row.items()}
    pretrained = results.get("validation_loss", {}).get(PRETRAINED)
    speeds = [row[key] for row in rows if (key := "tokens_per_second_per_gpu") in row]
    facts = {
        "method": results.get("quantizer"),
        "pretrained model": results.get("base_model"),
        "quantized layers": len(results["layers"]),
        "training data": ", ".join(results["data"]),
        "training steps": last.get("step"),
        "training tokens": f"{last.get('tokens_seen', 0):,}",
        "training speed": speeds and f"{statistics.median(speeds):,.0f} tokens/s per process",
        "validation loss, pretrained": f"{pretrained:.4f}" if pretrained else None,
        "validation loss, hard weights": last.get("val_loss_hard")
        and f"{last['val_loss_hard']:.4f}",
        "zeros": last.get("zero_fraction") and f"{last['zero_fraction']:.1%}",
    }
    header, *measured = parts["evaluation"] or [[]]
    for text, measure, *cells in measured:
        if measure in _HEADLINES and "trained" in header:
            facts[f"{measure.replace('kl', 'KL')}, {text}"] = cells[header.index("trained") - 2]
    for sizes in list(_read(folder / "converted" / SIZES_FILE).values())[:1]:
        whole = sizes["bytes"] * 16 / sizes["whole_bits_per_weight"]
        facts["size in bfloat16, MB"] = f"{whole / 1e6:.1f}"
    facts |= {f"size as {name}, MB": size for name, size, *_ in parts["sizes"][1:]}
    return {label: str(value) for label, value in facts.items() if value}


def _read(path: Path, **default: Any) -> dict[str, Any]:
    """Return the content of a JSON file, or the default if there is no file."""
    return read_json(path) if path.is_file() else default


def _history(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics. A line that a kill has cut off is skipped."""
    return read_json_lines(folder / "metrics.jsonl")


def _losses(*runs: str) -> Table:
    """Return the validation losses of runs, or nothing if a run has none (yet)."""
    with contextlib.suppress(InputError):
        return _table(compare_runs(runs)) if runs else []
    return []


def _table(markdown: str) -> Table:
    """Return the rows of a Markdown table, or nothing if there is only a header."""
    lines = [line for line in markdown.splitlines() if line[:1] == "|" and set(line) - {*"|-: "}]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    table = [[re.sub(r"\\(.)", r"\1", cell.strip()) for cell in row] for row in rows]
    return table if len(table) > 1 else []


def _zeros(folder: Path) -> str:
    """Return a picture of the zeros of a ternary model, or nothing for other models."""
    if not (folder / "config.json").is_file():
        return ""
    matrices, _ = read_matrices(folder)
    zeros = {m.name: m.zeros / m.size for m in matrices if m.levels == TERNARY}
    return _drawn(plot_zeros, zeros) if zeros else ""


def _drawn(plot: Callable[..., None], *arguments: Any) -> str:
    """Return a picture that a function of `hestia_tune.plots` draws."""
    with tempfile.TemporaryDirectory() as folder:
        plot(*arguments, path=Path(folder) / "picture.png")
        return _picture(Path(folder) / "picture.png")


def _picture(path: Path) -> str:
    """Return a PNG file as a data URI, or nothing if there is no file."""
    if not path.is_file():
        return ""
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
