"""Compares the results of several models and tests whether their differences are significant.

The rows of the table are the tasks and their average, the columns are the models. The first model
is the baseline. Every other model is compared with it by a test that depends on the scores:

- Same documents, scores right or wrong: McNemar's exact test. It asks whether the documents that
  only one of the two models gets right could be due to chance.
- Same documents, other scores: the paired t-test.
- Different documents, or a group of tasks: the z-test of two independent means.
- The average of K tasks: the z-test of the mean of the K differences. Tasks are independent, so the
  standard error of the mean is sqrt(sum of the squared standard errors) / K.

Two models give similar answers to the same documents. Paired tests therefore find differences that
the standard errors of the accuracies would hide. The p-values are not corrected for the number of
comparisons.
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
# Metrics that are fractions. Each has a table of the tasks that report it.
PERCENT = ("acc", "acc_norm")
_MEASURES = ("token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
_DISTANCES = ("kl_divergence", "top1_agreement")
_LEVELS = (0.05, 0.01, 0.001)  # a p-value gets one star for each level that it is below

# ``value`` and its standard error ``stderr`` (None if unknown). A cell of a table also has
# ``difference`` from the first model: an estimate with the name of the ``test`` and its two-sided
# ``p_value`` of no difference.
Estimate = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ModelResult:
    """Scores of one model, as plain values for JSON.

    Args:
        name: Name of the model's column. No two models of a table have the same name.
        tasks: What `evaluate_tasks` returned. None if no tasks were run.
        perplexity: Name of a text -> what `perplexity` returned.
        continuations: Prompt -> the model's greedy continuation.
        settings: What the model is (path, dtype, tau, pressure, ...), for the record.
    """

    name: str
    tasks: Mapping[str, Any] | None = None
    perplexity: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    continuations: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write the result as a JSON file, from whose content `ModelResult` makes it again."""
        _write(path, asdict(self))


@dataclass(frozen=True)
class Comparison:
    """Models side by side, as `compare` returns them.

    Attributes:
        models: Name -> result.
        tables: Metric -> model -> task or text -> cell (an estimate).
    """

    models: Mapping[str, ModelResult]
    tables: Mapping[str, Mapping[str, Mapping[str, Estimate]]]

    def markdown(self) -> str:
        """Return a table for the screen with one column per model, and a legend."""
        names = list(self.models)
        rows = [["task or text", "measure", *names]]
        for metric, table in self.tables.items():
            unit = f"{metric}, %" if metric in PERCENT else metric.replace("_", " ")
            unit += ", %" * (metric in _DISTANCES[1:])
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
            "** p < 0.01, *** p < 0.001, ? unknown." + distances_legend(self.tables, names[0])
        )

    def save(self, path: str | Path) -> None:
        """Write the tables and the results of the models as one JSON file."""
        _write(path, {"schema_version": 3} | asdict(self))


def distances_legend(tables: Mapping[str, Any], reference: str) -> str:
    """Return sentences about the measures that compare a model with a reference, if there are any.

    Args:
        tables: The tables of a comparison.
        reference: Name of the first model.
    """
    if _DISTANCES[0] not in tables:
        return ""
    return (
        f" KL divergence: the mean of KL({reference} || model) in nats per token. Top1 agreement: "
        f"the share of tokens for which the model and {reference} find the same next token most "
        f"likely. Perplexity ratio: the token perplexity of the model divided by {reference}'s."
    )


def _write(path: str | Path, values: Mapping[str, Any]) -> None:
    """Write JSON, whole or not at all. NaN and infinity become null."""
    plain = json.loads(json.dumps(values, default=str), parse_constant=lambda name: None)
    text = json.dumps(plain, indent=1)
    # Put each list of numbers on one line instead of one number per line.
    text = re.sub(r"\[[\s\d.,eE+\-]+\]", lambda match: "".join(match[0].split()), text)
    write_atomically(path, text + "\n")


def compare(
    results: Sequence[ModelResult],
    distances: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None,
) -> Comparison:
    """Return the results side by side, each compared with the first.

    A group of tasks that has a value of its own replaces its tasks. A task that reports neither
    accuracy is shown by its first metric, without an average.

    Args:
        results: The results of the models.
        distances: Name of a model -> name of a text -> what `DecoderLM.divergence` returned for
            the model and the first model. None: the predictions were not compared.
    """
    tables: dict[str, dict[str, dict[str, Estimate]]] = {}
    for result in results:
        scores, rows = _task_scores(result), {}
        for task, cells in scores.items():
            for metric in [m for m in PERCENT if m in cells] or list(cells)[:1]:
                difference = _difference(result, results[0], task, metric)
                rows.setdefault(metric, {})[task] = cells[metric] | {"difference": difference}
        for metric in PERCENT:
            if len(rows.get(metric, ())) > 1:
                rows[metric][AVERAGE] = _average(list(rows[metric].values()))
        for text, measured in result.perplexity.items():
            # JSON has null for infinity.
            values = {m: math.inf if measured[m] is None else measured[m] for m in _MEASURES}
            if found := (distances or {}).get(result.name, {}).get(text):
                losses = [m.perplexity[text]["nll"] for m in (result, results[0])]
                ratio = math.exp(min((losses[0] - losses[1]) / measured["tokens"], 700))
                values |= {m: found[m] for m in _DISTANCES} | {"perplexity_ratio": ratio}
            for measure, value in values.items():
                rows.setdefault(measure, {})[text] = {"value": value, "stderr": None}
        for metric, row in rows.items():
            tables.setdefault(metric, {})[result.name] = row
    return Comparison({result.name: result for result in results}, tables)


def _task_scores(result: ModelResult) -> dict[str, dict[str, Estimate]]:
    """Return task or group -> metric -> estimate, without the tasks of a group that has a value.

    lm-eval's keys are "acc,FILTER" and "acc_stderr,FILTER". The filter "none" is left out.
    """
    scores: dict[str, dict[str, Estimate]] = {}
    if result.tasks is None:
        return scores
    for task, row in result.tasks["results"].items():
        for key, value in row.items():
            metric, _, rule = key.partition(",")
            if rule and not metric.endswith("_stderr") and isinstance(value, int | float):
                error = row.get(f"{metric}_stderr,{rule}")
                stderr = float(error) if isinstance(error, int | float) else None
                cell = {"value": float(value), "stderr": stderr}
                scores.setdefault(task, {})[key.removesuffix(",none")] = cell
    groups = result.tasks["group_subtasks"]
    inside = {task for group in groups if group in scores for task in groups[group]}
    return {task: cells for task, cells in scores.items() if task not in inside}


def paired(scores: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Compare two models' scores of the same documents.

    The test is McNemar's exact test if all scores are 0 or 1, otherwise the paired t-test. The
    standard error belongs to the mean difference per document (n - 1 in the variance).

    Args:
        scores: One model's scores, one per document.
        baseline: The other model's scores of the same documents.
    """
    from scipy import stats

    differences = [a - b for a, b in zip(scores, baseline, strict=True)]
    mean = math.fsum(differences) / len(scores)
    stderr = float(stats.sem(differences)) if len(scores) > 1 else None
    if {*scores, *baseline} <= {0.0, 1.0}:
        wins, losses = differences.count(1.0), differences.count(-1.0)
        p_value = stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
        return z_test(mean, stderr, "mcnemar") | {"p_value": float(p_value)}
    estimate = z_test(mean, stderr, "paired t")
    if stderr:  # there are two documents or more, with different differences
        estimate["p_value"] = float(stats.ttest_rel(scores, baseline).pvalue)
    return estimate


def z_test(difference: float, stderr: float | None, test: str) -> Estimate:
    """Return a difference with its two-sided p-value under the normal distribution.

    Args:
        difference: The difference of two means.
        stderr: Its standard error. None: unknown.
        test: Name of the test.
    """
    p_value = None if stderr is None else float(difference == 0)
    if stderr:
        p_value = math.erfc(abs(difference) / stderr / math.sqrt(2))
    return {"value": difference, "stderr": stderr, "p_value": p_value, "test": test}


def _difference(
    result: ModelResult, baseline: ModelResult, task: str, metric: str
) -> Estimate | None:
    """Return a task's difference from the baseline, or None if one of the models has no score."""
    models = (result, baseline)
    cells: list[Any] = [_task_scores(model).get(task, {}).get(metric) for model in models]
    if result is baseline or None in cells:
        return None
    samples = [(model.tasks or {})["samples"].get(task, {}) for model in models]
    columns = [sample.get("metrics", {}).get(metric) for sample in samples]
    if None not in columns and samples[0]["documents"] == samples[1]["documents"]:
        return paired(*columns)
    errors = [cell["stderr"] for cell in cells]
    stderr = None if None in errors else math.hypot(*errors)
    return z_test(cells[0]["value"] - cells[1]["value"], stderr, "unpaired z")


def _average(cells: Sequence[Estimate]) -> Estimate:
    """Return the mean of several tasks. Tasks are independent, so their variances add."""

    def mean(parts: Sequence[Estimate]) -> tuple[float, float | None]:
        errors = [part["stderr"] for part in parts]
        stderr = None if None in errors else math.hypot(*errors) / len(parts)
        return math.fsum(part["value"] for part in parts) / len(parts), stderr

    differences, difference = [cell["difference"] for cell in cells], None
    if None not in differences:
        is_paired = all(estimate["test"] != "unpaired z" for estimate in differences)
        difference = z_test(*mean(differences), "paired z" if is_paired else "unpaired z")
    value, stderr = mean(cells)
    return {"value": value, "stderr": stderr, "difference": difference}


def _shown(cell: Estimate, metric: str) -> str:
    """Return a cell as text, such as "12.3 ± 1.0 (-4.5**)". Fractions become percent."""
    factor, digits = (100.0, 1) if metric in (*PERCENT, *_DISTANCES[1:]) else (1.0, 4)
    # JSON has null for infinity.
    value = math.inf if cell["value"] is None else cell["value"]
    text = f"{factor * value:.{digits}f}"
    if cell["stderr"] is not None:
        text += f" ± {factor * cell['stderr']:.{digits}f}"
    if difference := cell.get("difference"):
        p_value = difference["p_value"]
        stars = "?" if p_value is None else "*" * sum(p_value < level for level in _LEVELS)
        text += f" ({factor * difference['value']:+.{digits}f}{stars})"
    return text
