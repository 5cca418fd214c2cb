"""The run's own log: one JSON line per logged step, and the results table at the end."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hestia_tune.files import write_atomically


class History:
    """Rows in ``metrics.jsonl``, kept across resumes.

    Args:
        path: the file.
        resume_step: rows after this step are dropped, since they will be made again; 0 starts anew.
    """

    def __init__(self, path: Path, resume_step: int = 0):
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if resume_step and path.is_file():
            rows = [_parse(line) for line in path.read_text(encoding="utf-8").splitlines()]
            self.rows = [row for row in rows if row and row["step"] <= resume_step]
        write_atomically(path, "".join(f"{json.dumps(row)}\n" for row in self.rows))

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a row; it must have ``step``."""
        self.rows.append(dict(row))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(self.rows[-1])}\n")


def _parse(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:  # a line cut off by a kill
        return None


def results_table(rows: Iterable[tuple[str, float]], reference: str, worst: str) -> str:
    """A Markdown table of validation losses.

    Args:
        rows: (label, loss in nats per token).
        reference: label of the model to recover.
        worst: label of the model that has lost the most; the last column is the share of the gap
            between the two that a row has won back.
    """
    losses = dict(rows)
    gap = losses[worst] - losses[reference] if worst in losses and reference in losses else 0.0
    width = max(len(label) for label in losses)
    lines = [
        f"| {'model':<{width}} | val loss | perplexity | gap recovered |",
        f"|{'-' * (width + 2)}|---------:|-----------:|--------------:|",
    ]
    for label, loss in losses.items():
        perplexity = math.exp(loss) if loss < 700 else math.inf
        share = f"{(losses[worst] - loss) / gap:.1%}" if gap > 0 else "-"
        lines.append(f"| {label:<{width}} | {loss:8.4f} | {perplexity:10.2f} | {share:>13} |")
    return "\n".join(lines)
