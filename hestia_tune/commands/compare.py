"""``python -m hestia_tune compare RUN RUN ...``: one table of what finished runs reached.

Of two runs that differ in one setting (with the schedule rho=0 tau_init=0 alpha=0, the method is
plain straight-through training) it shows what that setting is worth.
"""

from collections.abc import Sequence
from pathlib import Path

from hestia_tune.errors import InputError
from hestia_tune.files import read_json
from hestia_tune.training.outputs import HARD, results_table


def compare_runs(runs: Sequence[str]) -> str:
    """The validation losses of several runs as Markdown.

    What is the same model in all runs (pretrained, naive) has one row; where the runs measured it
    differently, which makes them not comparable, each run has its own.

    Args:
        runs: output folders of ``hestia_qat``, or their results.json.

    Raises:
        InputError: if a run has no results; or if it has no validation losses, or is no run.
    """
    found: dict[str, dict[str, float]] = {}
    for run in runs:
        path = Path(run)
        path = path / "results.json" if path.is_dir() else path
        if not path.is_file():
            raise InputError(f"{run} has no results.json; let the run finish first")
        try:
            losses = read_json(path)["validation_loss"]
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{path} is no results.json of a training run") from None
        if not losses:
            raise InputError(f"{path} has no validation losses; train with a dataset_val")
        found[run] = losses
    labels = dict.fromkeys(label for losses in found.values() for label in losses)
    labels.pop(HARD, None)
    rows: dict[str, float] = {}
    for label in labels:
        measured = {run: losses[label] for run, losses in found.items() if label in losses}
        same = len(set(measured.values())) == 1
        rows |= {label if same else f"{label} ({run})": x for run, x in measured.items()}
    return results_table(rows | {run: one[HARD] for run, one in found.items() if HARD in one})
