"""Results of several models side by side, with what the differences are worth.

Rows are tasks and their average, columns models. Each model but the first is compared with it:

- a task on the same documents, scored right or wrong: McNemar's exact test, which asks whether the
  documents that only one of the two gets right could be a coin's doing;
- a task on the same documents with other scores: the paired t-test;
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

from hestia_tune.files import write_atomically

AVERAGE = "average"
PERCENT = ("acc", "acc_norm")  # fractions; a table each, over the tasks that have them
_MEASURES = ("token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
_STARS = ((0.001, "***"), (0.01, "**"), (0.05, "*"))


@dataclass(frozen=True, kw_only=True)
class Difference:
    """This model minus the first one.

    Args:
        value: the difference.
        stderr: its standard error, or None if unknown.
        p_value: two-sided, of no difference; None if it cannot be told.
        test: "mcnemar", "paired t", "paired z" or "unpaired z".
    """

    value: float
    stderr: float | None
    p_value: float | None
    test: str


@dataclass(frozen=True, kw_only=True)
class ModelResult:
    """What one model did, ready for JSON.

    Args:
        name: of its column; unlike the others'.
        tasks: what `evaluate_tasks` returned; None if no tasks were run.
        perplexity: name of a text -> what `perplexity` returned.
        settings: what the model is (path, dtype, tau, pressure, ...), for the record.
    """

    name: str
    tasks: Mapping[str, Any] | None = None
    perplexity: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number: value, its standard error, and how it differs from the first model's."""

    value: float
    stderr: float | None = None
    difference: Difference | None = None

    def text(self, metric: str) -> str:
        """ "12.3 ± 1.0 (-4.5**)", fractions in percent."""
        factor, digits = (100.0, 1) if metric in PERCENT else (1.0, 4)
        text = f"{factor * self.value:.{digits}f}"
        if self.stderr is not None:
            text += f" ± {factor * self.stderr:.{digits}f}"
        if self.difference is not None:
            p_value = self.difference.p_value
            stars = "?" if p_value is None else next((s for p, s in _STARS if p_value < p), "")
            text += f" ({factor * self.difference.value:+.{digits}f}{stars})"
        return text


@dataclass(frozen=True)
class Comparison:
    """The finished table; build it by `compare`.

    Args:
        results: the models, the first being what the others are compared with.
        tables: metric -> model -> task -> cell.
        notes: what makes models not comparable.
    """

    results: tuple[ModelResult, ...]
    tables: Mapping[str, Mapping[str, Mapping[str, Cell]]]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """A table for the screen, a model per column; what its signs mean; notes."""
        names = [result.name for result in self.results]
        rows = [["task or text", "measure", *names]]
        for metric, table in self.tables.items():
            tasks = list(dict.fromkeys(task for row in table.values() for task in row))
            for task in sorted(tasks, key=lambda task: task == AVERAGE):
                cells = [table.get(name, {}).get(task) for name in names]
                unit = f"{metric}, %" if metric in PERCENT else metric
                rows.append([task, unit, *(cell.text(metric) if cell else "" for cell in cells)])
        for text in dict.fromkeys(text for result in self.results for text in result.perplexity):
            for measure in _MEASURES:
                found = [result.perplexity.get(text, {}).get(measure) for result in self.results]
                shown = ["" if value is None else f"{value:.4f}" for value in found]
                rows.append([text, measure.replace("_", " "), *shown])
            sizes = [result.perplexity.get(text) for result in self.results]
            shown = [f"{m['tokens']}, {m['window']}/{m['stride']}" if m else "" for m in sizes]
            rows.append([text, "tokens, window/stride", *shown])
        parts = [_grid(rows)] if len(rows) > 1 else []
        if len(names) > 1 and self.tables:
            first = next(iter(next(iter(self.tables.values()))))
            parts.append(
                f"± standard error; in parentheses the difference from {first}: * p < 0.05, "
                "** p < 0.01, *** p < 0.001, ? unknown."
            )
        return "\n\n".join([*parts, *(f"Note: {note}." for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Everything, with NaN and infinity as None."""
        found = asdict(self)
        models = {one["name"]: one for one in found.pop("results")}
        return _plain({"schema_version": 1, **found, "models": models})

    def save(self, path: str | Path) -> None:
        """Writes `to_dict` as JSON, whole or not at all."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False, default=str)
        # One line per list of numbers, not one per number.
        text = re.sub(r"\[[\s\d.,eE+\-]+\]", lambda found: "".join(found[0].split()), text)
        write_atomically(path, text + "\n")


def compare(results: Sequence[ModelResult]) -> Comparison:
    """Puts results side by side.

    A task with neither accuracy stands in a table of its own first metric, without an average.

    Args:
        results: the first is what the others are compared with.

    Raises:
        ValueError: if there are no results or two of one name.
        ImportError: if tasks are to be compared and scipy is not installed.
    """
    names = [result.name for result in results]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"each result needs a name of its own; got {names}")
    evaluated = [result for result in results if result.tasks is not None]
    columns = list(dict.fromkeys(name for result in evaluated for name in _columns(result)))
    by_metric: dict[str, list[str]] = {metric: [] for metric in PERCENT}
    for column in columns:
        found = [metric for result in evaluated for metric in _metrics(result, column)]
        for metric in [m for m in PERCENT if m in found] or found[:1]:
            by_metric.setdefault(metric, []).append(column)
    tables: dict[str, dict[str, dict[str, Cell]]] = {}
    for metric, chosen in by_metric.items():
        for result in evaluated if chosen else ():
            row = {
                column: Cell(
                    **_metrics(result, column)[metric],
                    difference=_difference(result, evaluated[0], column, metric),
                )
                for column in chosen
                if metric in _metrics(result, column)
            }
            if metric in PERCENT and len(chosen) == len(row) > 1:
                row[AVERAGE] = _average(list(row.values()))
            tables.setdefault(metric, {})[result.name] = row
    return Comparison(tuple(results), tables, tuple(_notes(evaluated)))


def paired(scores: Sequence[float], baseline: Sequence[float]) -> Difference:
    """Compares scores of the same documents: McNemar's exact test for 0 and 1, else the t-test.

    The standard error is that of the mean difference per document (n - 1 in the variance).

    Raises:
        ValueError: if the lengths differ or there are no documents.
    """
    from scipy import stats

    if len(scores) != len(baseline) or not scores:
        raise ValueError(
            f"scores of the same documents are needed; got {len(scores)} and {len(baseline)}"
        )
    differences = [a - b for a, b in zip(scores, baseline, strict=True)]
    mean = math.fsum(differences) / len(scores)
    stderr = float(stats.sem(differences)) if len(scores) > 1 else None
    if {*scores, *baseline} <= {0.0, 1.0}:
        wins, losses = differences.count(1.0), differences.count(-1.0)
        p_value = stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
        return Difference(value=mean, stderr=stderr, p_value=float(p_value), test="mcnemar")
    if not stderr:  # one document, or always the same difference
        return z_test(mean, stderr, "paired t")
    p_value = float(stats.ttest_rel(scores, baseline).pvalue)
    return Difference(value=mean, stderr=stderr, p_value=p_value, test="paired t")


def z_test(difference: float, stderr: float | None, test: str) -> Difference:
    """Two-sided p-value of a difference with a known standard error, by the normal distribution."""
    p_value = None if stderr is None else float(difference == 0)
    if stderr:
        p_value = math.erfc(abs(difference) / stderr / math.sqrt(2))
    return Difference(value=difference, stderr=stderr, p_value=p_value, test=test)


def _columns(result: ModelResult) -> list[str]:
    """Groups that have a value of their own (the outermost ones), and tasks in none of these."""
    groups = result.tasks["groups"]
    inside = {name for group in groups.values() for name in group["tasks"]}
    todo = list(inside)
    while todo:  # a group's group's tasks are inside too
        more = set(groups.get(todo.pop(), {}).get("tasks", ())) - inside
        inside |= more
        todo += more
    return [name for name in (*groups, *result.tasks["tasks"]) if name not in inside]


def _metrics(result: ModelResult, column: str) -> Mapping[str, Any]:
    found = result.tasks["tasks"].get(column) or result.tasks["groups"].get(column) or {}
    metrics = found.get("metrics", {})  # JSON has no NaN, so a stored one has become None
    return {m: c | {"value": math.nan} if c["value"] is None else c for m, c in metrics.items()}


def _difference(
    result: ModelResult, baseline: ModelResult, column: str, metric: str
) -> Difference | None:
    values = [_metrics(one, column).get(metric) for one in (result, baseline)]
    if result is baseline or None in values:
        return None
    samples = [one.tasks["samples"].get(column, {}) for one in (result, baseline)]
    scores = [one.get("metrics", {}).get(metric) for one in samples]
    if None not in scores and samples[0]["documents"] == samples[1]["documents"]:
        return paired(*scores)
    errors = [value["stderr"] for value in values]
    stderr = None if None in errors else math.hypot(*errors)
    return z_test(values[0]["value"] - values[1]["value"], stderr, "unpaired z")


def _average(cells: Sequence[Cell]) -> Cell:
    """The mean of tasks; tasks are independent, so variances add."""

    def mean(values: list[float]) -> float:
        return math.fsum(values) / len(cells)

    def error(errors: list[float | None]) -> float | None:
        return None if None in errors else math.hypot(*errors) / len(cells)

    differences, difference = [cell.difference for cell in cells], None
    if None not in differences:
        is_paired = all(d.test != "unpaired z" for d in differences)
        difference = z_test(
            mean([d.value for d in differences]),
            error([d.stderr for d in differences]),
            "paired z" if is_paired else "unpaired z",
        )
    return Cell(
        value=mean([cell.value for cell in cells]),
        stderr=error([cell.stderr for cell in cells]),
        difference=difference,
    )


def _notes(results: Sequence[ModelResult]) -> list[str]:
    """What differs between rows that should not, and what was cut."""
    notes = []
    for result in results:
        tasks, first = result.tasks, results[0].tasks
        names = ("limit", "num_fewshot", "seed", "add_bos")
        pairs = [(name, tasks["settings"].get(name), first["settings"].get(name)) for name in names]
        pairs += [
            (f"version of {name}", entry["version"], first["tasks"].get(name, entry)["version"])
            for name, entry in tasks["tasks"].items()
        ]
        notes += [
            f"{result.name} was run with {what} {value}, {results[0].name} with {other}"
            for what, value, other in pairs
            if value != other
        ]
        if tasks["truncated_requests"]:
            notes.append(
                f"{tasks['truncated_requests']} requests to {result.name} were longer than its "
                "window and lost tokens from the left"
            )
    return notes


def _grid(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first row being its header."""
    # Bars would end a cell, stars set it in bold.
    rows = [[cell.replace("|", "\\|").replace("*", "\\*") for cell in row] for row in rows]
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    padded = [[c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def _plain(value: Any) -> Any:
    """The same with plain containers, and None for what JSON has no number for."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
