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

    for curve in temperatures.values():
        tau_axis.plot(range(len(curve)), curve, linewidth=0.6, alpha=0.7, color="tab:red")
    tau_axis.set_ylabel(f"temperature of {len(temperatures)} layers")
    tau_axis.set_xlabel("step")
    temporary = Path(path).with_suffix(".tmp")
    figure.savefig(temporary, format="png", dpi=130)
    temporary.replace(path)
