"""Pictures of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


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
    from matplotlib.figure import Figure  # slow to import, and needed once

    figure = Figure(figsize=(8, 9), layout="constrained")
    loss_axis, pressure_axis, tau_axis = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1, 2])
    for key, label, style in (
        ("loss", "training (relaxed)", {"linewidth": 1}),
        ("val_loss_relaxed", "validation, relaxed", {"marker": "o", "markersize": 3}),
        ("val_loss_hard", "validation, hard", {"marker": "s", "markersize": 3}),
    ):
        points = [(row["step"], row[key]) for row in history if row.get(key) is not None]
        if points:
            loss_axis.plot(*zip(*points, strict=True), label=label, **style)
    for index, (label, value) in enumerate(baselines.items()):
        loss_axis.axhline(value, linestyle=("--", ":", "-.")[index % 3], color="grey", label=label)
    loss_axis.set_ylabel("loss (nats per token)")
    loss_axis.legend()

    points = [(row["step"], row["pressure"]) for row in history if row.get("pressure") is not None]
    if points:
        pressure_axis.plot(*zip(*points, strict=True))
    pressure_axis.set_ylabel("pressure")
    pressure_axis.set_ylim(-0.05, 1.05)

    _draw_fan(tau_axis, range(len(next(iter(temperatures.values())))), temperatures)
    tau_axis.set_xlabel("step")
    _save(figure, path)


def plot_temperatures(
    progress: Sequence[float], temperatures: Mapping[str, Sequence[float]], path: str | Path
) -> None:
    """The fan of per-layer temperatures over the share of training done, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    _draw_fan(axis, progress, temperatures)
    axis.set_xlabel("share of the training steps")
    _save(figure, path)


def plot_sensitivity(traces: Mapping[str, float], path: str | Path, curvature: str) -> None:
    """A heatmap of traces, blocks by projections, on a logarithmic scale, as a PNG.

    Args:
        traces: fully qualified name -> trace; those that are not positive stay white.
        path: where the PNG goes.
        curvature: what the traces are of, for the label.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    rows, columns, cells = heatmap_cells(traces)
    figure = Figure(figsize=(2 + 0.9 * len(columns), 2 + 0.25 * len(rows)), layout="constrained")
    axis = figure.subplots()
    shown = [v for v in traces.values() if v > 0]
    image = axis.imshow(
        [[cells.get((r, c), float("nan")) for c in columns] for r in rows],
        norm=LogNorm(min(shown), max(shown)) if shown else None,
        aspect="auto",
        cmap="viridis",
    )
    axis.set_xticks(range(len(columns)), columns, rotation=40, ha="right")
    step = max(1, len(rows) // 16)
    axis.set_yticks(range(0, len(rows), step), rows[::step])
    axis.set_ylabel("block")
    figure.colorbar(image, label=f"trace of the {curvature} block")
    _save(figure, path)


# The order in which the field draws them; other names follow as they come.
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "output_proj", "o_proj", "w1", "gate_proj")
_PROJECTIONS += ("w3", "up_proj", "w2", "down_proj")
_LABELS = {"output_proj": "o", "w1": "gate", "w3": "up", "w2": "down"}


def heatmap_cells(
    traces: Mapping[str, float],
) -> tuple[list[str], list[str], dict[tuple[str, str], float]]:
    """(row labels, column labels, (row, column) -> trace) of names like layers.3.attn.q_proj."""
    places = {}
    for name in traces:
        parts = name.split(".")
        numbers = [k for k, part in enumerate(parts) if part.isdigit()]
        block = parts[numbers[0]] if numbers else "-"
        places[name] = (block, ".".join(parts[numbers[0] + 1 :]) if numbers else name)

    def position(projection: str) -> int:
        last = projection.rsplit(".", 1)[-1]
        return _PROJECTIONS.index(last) if last in _PROJECTIONS else len(_PROJECTIONS)

    def label(projection: str) -> str:
        last = projection.rsplit(".", 1)[-1]
        short = _LABELS.get(last, last.removesuffix("_proj"))
        alike = {p for _, p in places.values() if p.rsplit(".", 1)[-1] == last}
        return short if len(alike) == 1 else projection

    rows = sorted({r for r, _ in places.values()}, key=lambda r: int(r) if r.isdigit() else -1)
    projections = sorted(dict.fromkeys(p for _, p in places.values()), key=position)
    cells = {(r, label(p)): traces[name] for name, (r, p) in places.items()}
    return rows, [label(p) for p in projections], cells


def _draw_fan(axis: Any, x: Sequence[float], temperatures: Mapping[str, Sequence[float]]) -> None:
    for curve in temperatures.values():
        axis.plot(x, curve, linewidth=0.6, alpha=0.7, color="tab:red")
    axis.set_ylabel(f"temperature of {len(temperatures)} layers")


def _save(figure: Any, path: str | Path) -> None:
    temporary = Path(path).with_suffix(".tmp")
    figure.savefig(temporary, format="png", dpi=130)
    temporary.replace(path)
