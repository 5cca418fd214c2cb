"""Pictures of a run, as PNG files."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hestia_tune.files import staged
from hestia_tune.qat.schedule import AnnealingSchedule


def plot_training_curves(
    history: Sequence[Mapping[str, Any]],
    temperatures: Mapping[str, Sequence[float]],
    baselines: Mapping[str, float],
    path: str | Path,
) -> None:
    """Loss, pressure and the fan of per-layer temperatures over steps.

    Args:
        history: logged rows with ``step`` and any of ``loss``, ``pressure``, ``val_loss_relaxed``,
            ``val_loss_hard``.
        temperatures: layer name -> its temperature at steps 0, 1, ..., T.
        baselines: label -> validation loss, drawn as horizontal lines.
    """
    with _picture(path, 8, 9) as figure:
        axes = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1, 2])
        for axis, key, label, style in (
            (axes[0], "loss", "training (relaxed)", {"linewidth": 1}),
            (axes[0], "val_loss_relaxed", "validation, relaxed", {"marker": "o", "markersize": 3}),
            (axes[0], "val_loss_hard", "validation, hard", {"marker": "s", "markersize": 3}),
            (axes[1], "pressure", "pressure", {}),
        ):
            points = [(row["step"], row[key]) for row in history if row.get(key) is not None]
            if len(points) == 1:  # a line of one point would be invisible
                style = {"marker": "o", "markersize": 5}
            if points:
                axis.plot(*zip(*points, strict=True), label=label, **style)
        for index, (label, value) in enumerate(baselines.items()):
            axes[0].axhline(value, ls=("--", ":", "-.")[index % 3], color="grey", label=label)
        axes[0].set_ylabel("loss (nats per token)")
        if axes[0].get_legend_handles_labels()[0]:
            axes[0].legend()
        axes[1].set(ylabel="pressure", ylim=(-0.05, 1.05))
        _draw_fan(axes[2], "step", temperatures)


def plot_temperatures(
    schedule: AnnealingSchedule, scores: Mapping[str, float], path: str | Path
) -> None:
    """The fan of temperatures that a schedule of 100 steps gives layers with these scores."""
    curves = {n: [schedule.temperature(t, s) for t in range(101)] for n, s in scores.items()}
    with _picture(path, 7, 4) as figure:
        _draw_fan(figure.subplots(), "percent of the training steps", curves)


def plot_sensitivity(traces: Mapping[str, float], path: str | Path, curvature: str) -> None:
    """A heatmap of traces, blocks by projections, on a logarithmic scale.

    Args:
        traces: fully qualified name, like layers.3.attn.q_proj -> trace; those that are not
            positive stay white.
        curvature: what the traces are of, for the label.
    """
    cells: dict[tuple[str, str], float] = {}  # (block, projection) -> trace
    for name, trace in traces.items():
        _, block, projection = re.fullmatch(r"(.*?\b(\d+)\.)?(.*)", name).groups()
        cells[block or "-", projection] = trace
    rows, columns = (list(dict.fromkeys(key[axis] for key in cells)) for axis in (0, 1))
    table = [[cells.get((row, column), float("nan")) for column in columns] for row in rows]
    norm = "log" if any(trace > 0 for trace in traces.values()) else None
    with _picture(path, 2 + 0.9 * len(columns), 2 + 0.25 * len(rows)) as figure:
        axis = figure.subplots()
        image = axis.imshow(table, norm=norm, aspect="auto", cmap="viridis")
        axis.set_xticks(range(len(columns)), columns, rotation=40, ha="right")
        axis.set_yticks(range(len(rows)), rows)
        axis.set_ylabel("block")
        figure.colorbar(image, label=f"trace of the {curvature} block")


def plot_errors(windows: Sequence[Any], path: str | Path) -> None:
    """The relative error at the end of each window, before and after its training, over blocks.

    Args:
        windows: with ``end``, ``naive_error`` and ``error``.
    """
    blocks = [window.end - 1 for window in windows]
    with _picture(path, 7, 4) as figure:
        axis = figure.subplots()
        axis.plot(blocks, [w.naive_error for w in windows], "x--", color="grey", label="naive")
        axis.plot(blocks, [w.error for w in windows], "o-", label="reconstructed")
        axis.set(xlabel="last block of the window", ylabel="relative squared error", yscale="log")
        axis.legend()


@contextmanager
def _picture(path: str | Path, width: float, height: float) -> Iterator[Any]:
    from matplotlib.figure import Figure  # slow to import, and needed once

    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    with staged(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)


def _draw_fan(axis: Any, label: str, temperatures: Mapping[str, Sequence[float]]) -> None:
    last = {name.rpartition(".")[2]: name for name in temperatures}  # of each kind
    for name, curve in temperatures.items():
        kind = name.rpartition(".")[2]
        color, label_ = f"C{[*last].index(kind)}", kind if name == last[kind] else None
        axis.plot(curve, linewidth=0.6, color=color, label=label_)
    axis.set(xlabel=label, ylabel="temperature", title=f"{len(temperatures)} layers by kind")
    axis.legend(fontsize="small", ncols=2)
