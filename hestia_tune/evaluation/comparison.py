"""Results of several models side by side, with what the differences are worth.

Rows are models, columns tasks and their average. Each row but the first is compared with the first:

- a task on the same documents, scored right or wrong: McNemar's exact test, which asks whether the
  documents that only one of the two gets right could be a coin's doing;
- a task on the same documents with other scores: the z-test of the mean difference per document;
- different documents, or none on record: the z-test of two independent means;
- the average of K tasks: the z-test of the mean of the K differences, whose standard error is
  sqrt(sum of squares) / K, tasks being independent.

Two models answer the same documents alike, so paired tests see differences that the standard errors
of the accuracies would hide. No correction is made for the number of comparisons.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hestia_tune.evaluation.perplexity import PerplexityResult
from hestia_tune.evaluation.rendering import render_markdown
from hestia_tune.evaluation.significance import Difference, compare_samples, z_test
from hestia_tune.files import write_atomically

AVERAGE = "average"


@dataclass(frozen=True, kw_only=True)
class ModelResult:
    """What one model did.

    Args:
        name: of its row; unlike the other rows'.
        tasks: what `evaluate_tasks` returned; None if no tasks were run.
        perplexity: name of a text -> result on it.
        settings: what the model is (path, dtype, tau, pressure, ...), for the record.
    """

    name: str
    tasks: Mapping[str, Any] | None = None
    perplexity: Mapping[str, PerplexityResult] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of the table: value, its standard error, and how it differs from the first row."""

    value: float
    stderr: float | None = None
    difference: Difference | None = None


@dataclass(frozen=True)
class Comparison:
    """The finished table; build it by `compare`.

    Args:
        results: rows, the first being what the others are compared with.
        tables: metric -> row name -> column -> cell.
        percent: the metrics that are fractions, shown as percent.
        notes: what makes rows not comparable.
    """

    results: tuple[ModelResult, ...]
    tables: Mapping[str, Mapping[str, Mapping[str, Cell]]]
    percent: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """Tables for the screen: percent, standard errors, differences with stars."""
        return render_markdown(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything, with NaN and infinity as None."""
        models = {
            result.name: {
                "settings": dict(result.settings),
                "tasks": result.tasks,
                "perplexity": {k: v.to_dict() for k, v in result.perplexity.items()},
            }
            for result in self.results
        }
        tables = {
            metric: {
                name: {column: asdict(cell) for column, cell in row.items()}
                for name, row in rows.items()
            }
            for metric, rows in self.tables.items()
        }
        return _plain(
            {"schema_version": 1, "tables": tables, "notes": list(self.notes), "models": models}
        )

    def save(self, path: str | Path) -> None:
        """Writes `to_dict` as JSON, whole or not at all."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False, default=str)
        # One line per list of numbers, not one per number.
        text = re.sub(r"\[[\s\d.,eE+\-]+\]", lambda found: "".join(found[0].split()), text)
        write_atomically(path, text + "\n")


def compare(
    results: Sequence[ModelResult], *, metrics: Sequence[str] = ("acc", "acc_norm")
) -> Comparison:
    """Puts results side by side.

    Args:
        results: the first is what the others are compared with.
        metrics: fractions, one table each, over the tasks that have it. A task with none of them
            stands in a table of its own first metric, without an average.

    Raises:
        ValueError: if there are no results or two of one name.
    """
    names = [result.name for result in results]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"each result needs a name of its own; got {names}")
    evaluated = [result for result in results if result.tasks is not None]
    columns = list(dict.fromkeys(name for result in evaluated for name in _columns(result)))
    by_metric: dict[str, list[str]] = {metric: [] for metric in metrics}
    for column in columns:
        found = [m for result in evaluated for m in _entry(result, column).get("metrics", {})]
        for metric in [m for m in metrics if m in found] or found[:1]:
            by_metric.setdefault(metric, []).append(column)
    tables = {
        metric: _table(evaluated, chosen, metric, metric in metrics and len(chosen) > 1)
        for metric, chosen in by_metric.items()
        if chosen
    }
    return Comparison(
        results=tuple(results),
        tables=tables,
        percent=tuple(metrics),
        notes=tuple(_notes(evaluated)),
    )


def _columns(result: ModelResult) -> list[str]:
    """Groups that have a value of their own (the outermost ones), and tasks in none of these."""
    groups = result.tasks["groups"]
    inside = {name for group in groups.values() for name in group["tasks"]}
    todo = list(inside)
    while todo:  # a group's group's tasks are inside too
        for name in groups.get(todo.pop(), {}).get("tasks", ()):
            if name not in inside:
                inside.add(name)
                todo.append(name)
    return [name for name in (*groups, *result.tasks["tasks"]) if name not in inside]


def _entry(result: ModelResult, column: str) -> Mapping[str, Any]:
    found = result.tasks["tasks"].get(column) or result.tasks["groups"].get(column)
    return found or {}


def _table(
    results: Sequence[ModelResult], columns: Sequence[str], metric: str, with_average: bool
) -> dict[str, dict[str, Cell]]:
    rows: dict[str, dict[str, Cell]] = {}
    for result in results:
        row: dict[str, Cell] = {}
        for column in columns:
            found = _entry(result, column).get("metrics", {}).get(metric)
            if found is None:
                continue
            difference = None
            if result is not results[0]:
                difference = _difference(result, results[0], column, metric)
            row[column] = Cell(value=found["value"], stderr=found["stderr"], difference=difference)
        if with_average and len(row) == len(columns):
            row[AVERAGE] = _average(list(row.values()))
        rows[result.name] = row
    return rows


def _difference(
    result: ModelResult, baseline: ModelResult, column: str, metric: str
) -> Difference | None:
    values = [_entry(one, column).get("metrics", {}).get(metric) for one in (result, baseline)]
    if None in values:
        return None
    samples = [one.tasks["samples"].get(column, {}) for one in (result, baseline)]
    scores = [one.get("metrics", {}).get(metric) for one in samples]
    if None not in scores and samples[0]["documents"] == samples[1]["documents"]:
        return compare_samples(*scores)
    errors = [value["stderr"] for value in values]
    stderr = None if None in errors else math.hypot(*errors)
    return z_test(values[0]["value"] - values[1]["value"], stderr, "unpaired z")


def _average(cells: Sequence[Cell]) -> Cell:
    """The mean of tasks; tasks are independent, so variances add."""
    differences = [cell.difference for cell in cells]
    difference = None
    if None not in differences:
        tests = {"unpaired z" if d.test == "unpaired z" else "paired z" for d in differences}
        difference = z_test(
            math.fsum(d.value for d in differences) / len(cells),
            _average_error([d.stderr for d in differences]),
            "paired z" if tests == {"paired z"} else "unpaired z",
        )
    return Cell(
        value=math.fsum(cell.value for cell in cells) / len(cells),
        stderr=_average_error([cell.stderr for cell in cells]),
        difference=difference,
    )


def _average_error(errors: Sequence[float | None]) -> float | None:
    return None if None in errors else math.hypot(*errors) / len(errors)


def _notes(results: Sequence[ModelResult]) -> list[str]:
    """What differs between rows that should not, and what was cut."""
    notes = []
    for result in results:
        for what in ("limit", "num_fewshot", "seed", "add_bos"):
            values = [one.tasks["settings"].get(what) for one in (result, results[0])]
            if values[0] != values[1]:
                notes.append(
                    f"{result.name} was run with {what} {values[0]}, {results[0].name} with "
                    f"{values[1]}"
                )
        for task, entry in result.tasks["tasks"].items():
            other = results[0].tasks["tasks"].get(task, entry)
            if entry["version"] != other["version"]:
                notes.append(
                    f"{result.name} was run on version {entry['version']} of {task}, "
                    f"{results[0].name} on {other['version']}"
                )
        if result.tasks["truncated_requests"]:
            notes.append(
                f"{result.tasks['truncated_requests']} requests to {result.name} were longer than "
                "its window and lost tokens from the left"
            )
    return notes


def _plain(value: Any) -> Any:
    """The same with plain containers, and None for what JSON has no number for."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
