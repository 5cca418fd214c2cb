"""A comparison as Markdown tables for the screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hestia_tune.evaluation.comparison import Cell, Comparison, ModelResult

_STARS = ((0.001, "***"), (0.01, "**"), (0.05, "*"))


def render_markdown(comparison: Comparison) -> str:
    """A table per metric, one of perplexities, and what the signs mean."""
    parts = []
    for metric, rows in comparison.tables.items():
        factor = 100.0 if metric in comparison.percent else 1.0
        unit = "percent " if factor == 100.0 else ""
        parts.append(f"**{metric}** ({unit}± standard error)\n\n{_metric_table(rows, factor)}")
    if len(comparison.results) > 1 and comparison.tables:
        first = next(result.name for result in comparison.results if result.tasks is not None)
        parts.append(
            f"In parentheses the difference from {first}: * p < 0.05, ** p < 0.01, *** p < 0.001, "
            "? unknown."
        )
    if any(result.perplexity for result in comparison.results):
        parts.append(_perplexity_table(comparison.results))
    parts += [f"Note: {note}." for note in comparison.notes]
    return "\n\n".join(parts)


def _metric_table(rows: Mapping[str, Mapping[str, Cell]], factor: float) -> str:
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    columns.sort(key=lambda column: column == "average")  # a row may lack a task, so its average
    return _table(
        ["model", *columns],
        [
            [name, *(_cell(row[c], factor) if c in row else "" for c in columns)]
            for name, row in rows.items()
        ],
    )


def _cell(cell: Cell, factor: float) -> str:
    digits = 1 if factor == 100.0 else 4
    text = f"{factor * cell.value:.{digits}f}"
    if cell.stderr is not None:
        text += f" ± {factor * cell.stderr:.{digits}f}"
    if cell.difference is not None:
        p_value = cell.difference.p_value
        stars = "?" if p_value is None else next((s for p, s in _STARS if p_value < p), "")
        text += f" ({factor * cell.difference.value:+.{digits}f}{stars})"
    return text


def _perplexity_table(results: Sequence[ModelResult]) -> str:
    rows = [
        [
            result.name,
            text,
            f"{found.token_perplexity:.3f}",
            f"{found.word_perplexity:.3f}",
            f"{found.byte_perplexity:.4f}",
            f"{found.bits_per_byte:.4f}",
            str(found.tokens),
            f"{found.window}/{found.stride}",
        ]
        for result in results
        for text, found in result.perplexity.items()
    ]
    header = ["model", "text", "per token", "per word", "per byte", "bits per byte", "tokens"]
    return "**perplexity**\n\n" + _table([*header, "window/stride"], rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    # Bars would end a cell, stars set it in bold.
    cells = [[c.replace("|", "\\|").replace("*", "\\*") for c in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
