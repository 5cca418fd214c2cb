"""Pictures of a run."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hestia_tune.files import staged
from hestia_tune.schedule import AnnealingSchedule


def plot_training_curves(
    history: Sequence[Mapping[str, Any]],
    temperatures: Mapping[str, Sequence[float]],
    baselines: Mapping[str, float],
    path: str | Path,
) -> None:
    """Loss, pressure and the fan of per-layer temperatures over steps, as a PNG.

    Args:
        history: logged rows with ``step`` and any of ``loss``, ``pressure``, ``val_loss_relaxed``,
            ``val_loss_hard``.
        temperatures: layer name -> its temperature at steps 0, 1, ..., T.
        baselines: label -> validation loss, drawn as horizontal lines.
        path: where the PNG goes.
    """
    figure = _figure(8, 9)
    loss_axis, pressure_axis, tau_axis = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1, 2])
    for key, label, style in (
        ("loss", "training (relaxed)", {"linewidth": 1}),
        ("val_loss_relaxed", "validation, relaxed", {"marker": "o", "markersize": 3}),
        ("val_loss_hard", "validation, hard", {"marker": "s", "markersize": 3}),
    ):
        _draw_logged(loss_axis, history, key, label=label, **style)
    for index, (label, value) in enumerate(baselines.items()):
        loss_axis.axhline(value, linestyle=("--", ":", "-.")[index % 3], color="grey", label=label)
    loss_axis.set_ylabel("loss (nats per token)")
    if loss_axis.get_legend_handles_labels()[0]:
        loss_axis.legend()

    _draw_logged(pressure_axis, history, "pressure")
    pressure_axis.set_ylabel("pressure")
    pressure_axis.set_ylim(-0.05, 1.05)

    _draw_fan(tau_axis, range(len(next(iter(temperatures.values())))), temperatures)
    tau_axis.set_xlabel("step")
    _save(figure, path)


def plot_temperatures(
    schedule: AnnealingSchedule, scores: Mapping[str, float], path: str | Path
) -> None:
    """The fan of per-layer temperatures over the share of training done, as a PNG.

    Args:
        schedule: of any number of steps.
        scores: layer name -> sensitivity score.
        path: where the PNG goes.
    """
    figure = _figure(7, 4)
    axis = figure.subplots()
    steps = range(schedule.total_steps + 1)
    curves = {name: [schedule.temperature(t, s) for t in steps] for name, s in scores.items()}
    _draw_fan(axis, [t / schedule.total_steps for t in steps], curves)
    axis.set_xlabel("share of the training steps")
    _save(figure, path)


def plot_sensitivity(traces: Mapping[str, float], path: str | Path, curvature: str) -> None:
    """A heatmap of traces, blocks by projections, on a logarithmic scale, as a PNG.

    Args:
        traces: fully qualified name, like layers.3.attn.q_proj -> trace; those that are not
            positive stay white.
        path: where the PNG goes.
        curvature: what the traces are of, for the label.
    """
    cells: dict[tuple[str, str], float] = {}  # (block, projection) -> trace
    for name, trace in traces.items():
        _, block, projection = re.fullmatch(r"(.*?\b(\d+)\.)?(.*)", name).groups()
        cells[block or "-", projection] = trace
    rows, columns = (list(dict.fromkeys(key[axis] for key in cells)) for axis in (0, 1))
    figure = _figure(2 + 0.9 * len(columns), 2 + 0.25 * len(rows))
    axis = figure.subplots()
    image = axis.imshow(
        [[cells.get((r, c), float("nan")) for c in columns] for r in rows],
        norm="log" if any(trace > 0 for trace in traces.values()) else None,
        aspect="auto",
        cmap="viridis",
    )
    axis.set_xticks(range(len(columns)), columns, rotation=40, ha="right")
    axis.set_yticks(range(len(rows)), rows)
    axis.set_ylabel("block")
    figure.colorbar(image, label=f"trace of the {curvature} block")
    _save(figure, path)


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # slow to import, and needed once

    return Figure(figsize=(width, height), layout="constrained")


def _draw_logged(axis: Any, history: Sequence[Mapping[str, Any]], key: str, **style: Any) -> None:
    points = [(row["step"], row[key]) for row in history if row.get(key) is not None]
    if points:
        axis.plot(*zip(*points, strict=True), **style)


def _draw_fan(axis: Any, x: Sequence[float], temperatures: Mapping[str, Sequence[float]]) -> None:
    for curve in temperatures.values():
        axis.plot(x, curve, linewidth=0.6, alpha=0.7, color="tab:red")
    axis.set_ylabel(f"temperature of {len(temperatures)} layers")


def _save(figure: Any, path: str | Path) -> None:
    with staged(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)
