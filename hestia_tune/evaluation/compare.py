"""Results of several models side by side, with what the differences are worth.

Rows are tasks and their average, columns models. Each model but the first is compared with it:

- a task on the same documents, scored right or wrong: McNemar's exact test, which asks whether the
  documents that only one of the two gets right could be a coin's doing;
- a task on the same documents with other scores: the paired t-test;
- different documents, or a group of tasks: the z-test of two independent means;
- the average of K tasks: the z-test of the mean of the K differences, whose standard error is
  sqrt(sum of squares) / K, tasks being independent.

Two models answer the same documents alike, so paired tests see differences that the standard errors
of the accuracies would hide. No correction is made for the number of comparisons.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hestia_tune.files import write_atomically

AVERAGE = "average"
PERCENT = ("acc", "acc_norm")  # fractions; a table each, over the tasks that have them
_MEASURES = ("token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
_LEVELS = (0.05, 0.01, 0.001)  # a star each

# ``value``; its standard error ``stderr``, None if unknown; of a cell ``difference`` from the first
# model, an estimate with ``p_value`` (two-sided, of no difference) and ``test``, the test's name.
Estimate = dict[str, Any]


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

    def joined(self, earlier: "ModelResult | None") -> "ModelResult":
        """This result and what an earlier one of the same model has besides."""
        if earlier is None:
            return self
        old, new = earlier.tasks or {}, self.tasks or {}
        tasks = {key: {**old.get(key, {}), **new.get(key, {})} for key in {**old, **new}}
        perplexity = {**earlier.perplexity, **self.perplexity}
        asked = {**earlier.settings["asked"], **self.settings["asked"]}
        settings = {**self.settings, "asked": asked}
        return replace(self, tasks=tasks or None, perplexity=perplexity, settings=settings)


@dataclass(frozen=True)
class Comparison:
    """The finished table of models, by `compare`; ``tables``: metric -> model -> task -> cell."""

    models: Mapping[str, ModelResult]
    tables: Mapping[str, Mapping[str, Mapping[str, Estimate]]]

    def markdown(self) -> str:
        """A table for the screen, a model per column, and what its signs mean."""
        names = list(self.models)
        rows = [["task or text", "measure", *names]]
        for metric, table in self.tables.items():
            unit = f"{metric}, %" if metric in PERCENT else metric.replace("_", " ")
            for task in dict.fromkeys(task for row in table.values() for task in row):
                cells = [table.get(name, {}).get(task) for name in names]
                rows.append([task, unit, *(_shown(cell, metric) if cell else "" for cell in cells)])
        # Bars would end a cell, stars set it in bold.
        rows = [[cell.replace("|", "\\|").replace("*", "\\*") for cell in row] for row in rows]
        widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
        rows.insert(1, ["-" * width for width in widths])
        padded = [[c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows]
        return "\n".join(f"| {' | '.join(row)} |" for row in padded) + (
            f"\n\n± standard error; in parentheses the difference from {names[0]}: * p < 0.05, "
            "** p < 0.01, *** p < 0.001, ? unknown."
        )

    def save(self, path: str | Path, others: Sequence[ModelResult] = ()) -> None:
        """Writes everything as JSON, whole or not at all, with NaN and infinity as null; ``others``
        are kept in it, too, outside the tables."""
        everything = asdict(self) | {"others": [asdict(one) for one in others]}
        plain = json.loads(json.dumps(everything, default=str), parse_constant=lambda name: None)
        text = json.dumps({"schema_version": 3} | plain, indent=1)
        # One line per list of numbers, not one per number.
        text = re.sub(r"\[[\s\d.,eE+\-]+\]", lambda found: "".join(found[0].split()), text)
        write_atomically(path, text + "\n")


def compare(results: Sequence[ModelResult]) -> Comparison:
    """Puts results of different names side by side; the others are compared with the first.

    A group of tasks with a value of its own stands for its tasks; a task with neither accuracy
    is shown by its first metric, without an average.
    """
    tables: dict[str, dict[str, dict[str, Estimate]]] = {}
    for result in results:
        scores, rows = _task_scores(result), {}
        for task, found in scores.items():
            for metric in [m for m in PERCENT if m in found] or list(found)[:1]:
                difference = _difference(result, results[0], task, metric)
                rows.setdefault(metric, {})[task] = found[metric] | {"difference": difference}
        for metric in PERCENT:
            if len(rows.get(metric, ())) > 1:
                rows[metric][AVERAGE] = _average(list(rows[metric].values()))
        for text, measured in result.perplexity.items():
            for measure in _MEASURES:
                value = math.inf if measured[measure] is None else measured[measure]  # from JSON
                rows.setdefault(measure, {})[text] = {"value": value, "stderr": None}
        for metric, row in rows.items():
            tables.setdefault(metric, {})[result.name] = row
    return Comparison({result.name: result for result in results}, tables)


def _task_scores(result: ModelResult) -> dict[str, dict[str, Estimate]]:
    """Task or group -> metric -> estimate, without the tasks of a group that has a value.

    lm-eval's keys are "acc,FILTER" and "acc_stderr,FILTER"; the filter "none" is not named.
    """
    found: dict[str, dict[str, Estimate]] = {}
    if result.tasks is None:
        return found
    for task, row in result.tasks["results"].items():
        for key, value in row.items():
            metric, _, rule = key.partition(",")
            if rule and not metric.endswith("_stderr") and isinstance(value, int | float):
                error = row.get(f"{metric}_stderr,{rule}")
                stderr = float(error) if isinstance(error, int | float) else None
                cell = {"value": float(value), "stderr": stderr}
                found.setdefault(task, {})[key.removesuffix(",none")] = cell
    groups = result.tasks["group_subtasks"]
    inside = {task for group in groups if group in found for task in groups[group]}
    return {task: scores for task, scores in found.items() if task not in inside}


def paired(scores: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Compares scores of the same documents: McNemar's exact test for 0 and 1, else the t-test.

    The standard error is that of the mean difference per document (n - 1 in the variance).
    """
    from scipy import stats

    differences = [a - b for a, b in zip(scores, baseline, strict=True)]
    mean = math.fsum(differences) / len(scores)
    stderr = float(stats.sem(differences)) if len(scores) > 1 else None
    if {*scores, *baseline} <= {0.0, 1.0}:
        wins, losses = differences.count(1.0), differences.count(-1.0)
        p_value = stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
        return z_test(mean, stderr, "mcnemar") | {"p_value": float(p_value)}
    found = z_test(mean, stderr, "paired t")
    if stderr:  # else one document, or always the same difference
        found["p_value"] = float(stats.ttest_rel(scores, baseline).pvalue)
    return found


def z_test(difference: float, stderr: float | None, test: str) -> Estimate:
    """Two-sided p-value of a difference with a known standard error, by the normal distribution."""
    p_value = None if stderr is None else float(difference == 0)
    if stderr:
        p_value = math.erfc(abs(difference) / stderr / math.sqrt(2))
    return {"value": difference, "stderr": stderr, "p_value": p_value, "test": test}


def _difference(
    result: ModelResult, baseline: ModelResult, task: str, metric: str
) -> Estimate | None:
    found: list[Any] = [_task_scores(one).get(task, {}).get(metric) for one in (result, baseline)]
    if result is baseline or None in found:
        return None
    samples = [(one.tasks or {})["samples"].get(task, {}) for one in (result, baseline)]
    columns = [one.get("metrics", {}).get(metric) for one in samples]
    if None not in columns and samples[0]["documents"] == samples[1]["documents"]:
        return paired(*columns)
    errors = [one["stderr"] for one in found]
    stderr = None if None in errors else math.hypot(*errors)
    return z_test(found[0]["value"] - found[1]["value"], stderr, "unpaired z")


def _average(cells: Sequence[Estimate]) -> Estimate:
    """The mean of tasks; tasks are independent, so variances add."""

    def mean(parts: Sequence[Estimate]) -> tuple[float, float | None]:
        errors = [part["stderr"] for part in parts]
        stderr = None if None in errors else math.hypot(*errors) / len(parts)
        return math.fsum(part["value"] for part in parts) / len(parts), stderr

    differences, difference = [cell["difference"] for cell in cells], None
    if None not in differences:
        is_paired = all(one["test"] != "unpaired z" for one in differences)
        difference = z_test(*mean(differences), "paired z" if is_paired else "unpaired z")
    value, stderr = mean(cells)
    return {"value": value, "stderr": stderr, "difference": difference}


def _shown(cell: Estimate, metric: str) -> str:
    """ "12.3 ± 1.0 (-4.5**)", fractions in percent."""
    factor, digits = (100.0, 1) if metric in PERCENT else (1.0, 4)
    text = f"{factor * cell['value']:.{digits}f}"
    if cell["stderr"] is not None:
        text += f" ± {factor * cell['stderr']:.{digits}f}"
    if difference := cell.get("difference"):
        p_value = difference["p_value"]
        stars = "?" if p_value is None else "*" * sum(p_value < level for level in _LEVELS)
        text += f" ({factor * difference['value']:+.{digits}f}{stars})"
    return text
