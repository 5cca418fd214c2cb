"""Pictures of a run, written as PNG files."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hestia_tune.annealing import AnnealingSchedule
from hestia_tune.files import staged


def plot_training_curves(
    history: Sequence[Mapping[str, Any]],
    temperatures: Mapping[str, Sequence[float]],
    baselines: Mapping[str, float],
    path: str | Path,
) -> None:
    """Draw the losses, the pressure and the temperature of each layer over the training steps.

    Args:
        history: Logged rows. Each row has ``step`` and any of ``loss``, ``pressure``,
            ``val_loss_relaxed`` and ``val_loss_hard``. Losses are in nats per token.
        temperatures: Layer name -> temperature of the layer at steps 0, 1, ..., T.
        baselines: Label -> validation loss. Each baseline is drawn as a horizontal line.
        path: The PNG file to write.
    """
    with _picture(path, 8, 10) as figure:
        figure.suptitle("Quantization-aware training: loss, pressure and temperature")
        losses, pressures, fan = figure.subplots(3, 1, sharex=True, height_ratios=[4, 3, 5])
        for axis, key, label, style in (
            (losses, "loss", "training, relaxed weights", {"linewidth": 1}),
            (losses, "val_loss_relaxed", "validation, relaxed weights", {"marker": "o"}),
            (losses, "val_loss_hard", "validation, hard weights", {"marker": "s"}),
            (pressures, "pressure", None, {}),
        ):
            points = [(row["step"], row[key]) for row in history if row.get(key) is not None]
            if len(points) == 1:  # A line through one point is invisible without a marker.
                style = {"marker": "o"}
            if points:
                axis.plot(*zip(*points, strict=True), label=label, markersize=4, **style)
        for index, (label, value) in enumerate(baselines.items()):
            dashes = ("--", ":", "-.")[index % 3]
            losses.axhline(value, ls=dashes, color="grey", label=f"validation, {label}")
        losses.set_ylabel("training and validation loss (nats per token)")
        if losses.get_legend_handles_labels()[0]:
            losses.legend()
        pressures.set(ylabel="pressure\n(share of the relaxed weight)", ylim=(-0.05, 1.05))
        _draw_fan(fan, "training step", temperatures)


def plot_runs(histories: Mapping[str, Sequence[Mapping[str, Any]]], path: str | Path) -> None:
    """Draw the losses and the mean temperature of several runs on shared axes.

    Args:
        histories: Name of a run -> its logged rows; see `plot_training_curves`. ``tau_mean`` is
            the mean temperature of the layers.
        path: The PNG file to write.
    """
    labels = {
        "val_loss_hard": "validation loss\n(hard weights, nats)",
        "loss": "training loss (nats)",
        "tau_mean": "mean temperature",
    }
    with _picture(path, 8, 9) as figure:
        axes = figure.subplots(3, 1, sharex=True)
        for axis, key in zip(axes, labels, strict=True):
            for name, rows in histories.items():
                points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
                style = "s-" if key == "val_loss_hard" else "-"
                # A run without points keeps its color in the other axes.
                axis.plot([x for x, _ in points], [y for _, y in points], style, label=name)
            axis.set_ylabel(labels[key])
        axes[0].legend()
        axes[-1].set_xlabel("training step")


def plot_temperatures(
    schedule: AnnealingSchedule, scores: Mapping[str, float], path: str | Path
) -> None:
    """Draw the temperature of each layer over a schedule of 100 steps.

    Args:
        schedule: A schedule of 100 steps.
        scores: Layer name -> sensitivity score of the layer.
        path: The PNG file to write.
    """
    curves = {n: [schedule.temperature(t, s) for t in range(101)] for n, s in scores.items()}
    with _picture(path, 7, 4) as figure:
        _draw_fan(figure.subplots(), "training progress (percent of the steps)", curves)


def plot_sensitivity(traces: Mapping[str, float], path: str | Path, curvature: str) -> None:
    """Draw a heatmap of the traces of the layers.

    The colors follow a logarithmic scale.

    Args:
        traces: Fully qualified name, such as layers.3.attn.q_proj -> trace. Cells of traces that
            are not positive stay white.
        path: The PNG file to write.
        curvature: Name of the matrix that was measured ("hessian" or "fisher"), for the label.
    """
    norm = "log" if any(trace > 0 for trace in traces.values()) else None
    _draw_layers(traces, path, f"trace of the {curvature} block", norm=norm)


def plot_zeros(zeros: Mapping[str, float], path: str | Path) -> None:
    """Draw a heatmap of the share of zeros in every layer.

    Args:
        zeros: Fully qualified name of a layer -> share of its weights that are 0.
        path: The PNG file to write.
    """
    _draw_layers({name: 100 * share for name, share in zeros.items()}, path, "zeros (percent)")


def plot_bits(bits: Mapping[str, float], path: str | Path) -> None:
    """Draw a heatmap of the bits per weight of every layer.

    The colors follow a logarithmic scale. The scale shows the numbers that occur.

    Args:
        bits: Fully qualified name of a layer -> bits per weight.
        path: The PNG file to write.
    """
    ticks = sorted(set(bits.values()))
    _draw_layers(bits, path, "bits per weight, with scales", norm="log", ticks=ticks)


def _draw_layers(
    values: Mapping[str, float],
    path: str | Path,
    label: str,
    norm: str | None = None,
    ticks: Sequence[float] = (),
) -> None:
    """Draw a heatmap of one value per layer: one row per block, one column per projection."""
    cells: dict[tuple[str, str], float] = {}  # (block, projection) -> value
    for name, value in values.items():
        _, block, projection = re.fullmatch(r"(.*?\b(\d+)\.)?(.*)", name).groups()
        cells[block or "-", projection] = value
    rows, columns = (list(dict.fromkeys(key[axis] for key in cells)) for axis in (0, 1))
    table = [[cells.get((row, column), float("nan")) for column in columns] for row in rows]
    with _picture(path, 2 + 0.9 * len(columns), 2 + 0.25 * len(rows)) as figure:
        axis = figure.subplots()
        image = axis.imshow(table, norm=norm, aspect="auto", cmap="viridis")
        axis.set_xticks(range(len(columns)), columns, rotation=40, ha="right")
        axis.set_yticks(range(len(rows)), rows)
        axis.set_ylabel("block")
        bar = figure.colorbar(image, label=label)
        if ticks:
            bar.minorticks_off()
            bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])


def plot_errors(windows: Sequence[Any], path: str | Path) -> None:
    """Draw the relative error at the end of each window, before and after its training.

    Args:
        windows: Results of the windows, with ``end``, ``naive_error`` and ``error``.
        path: The PNG file to write.
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
    """Yield a figure of a size in inches, and write it to ``path`` at the end."""
    from matplotlib.figure import Figure  # Slow to import, and most commands do not need it.

    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    with staged(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)


def _draw_fan(axis: Any, xlabel: str, temperatures: Mapping[str, Sequence[float]]) -> None:
    """Draw one line per layer; layers of one kind (the last part of the name) share a color."""
    width = 1.2 if len(temperatures) <= 100 else 0.6
    kinds = [name.rpartition(".")[2] for name in temperatures]
    for number, kind in enumerate(dict.fromkeys(kinds)):
        own = [curve for k, curve in zip(kinds, temperatures.values(), strict=True) if k == kind]
        style = ("-", "--", "-.")[number % 3]
        lines = axis.plot([*zip(*own, strict=True)], style, color=f"C{number}", linewidth=width)
        lines[0].set_label(kind)
    different = len(set(map(tuple, temperatures.values())))
    title = f"{len(temperatures)} layers with {different} different temperatures"
    axis.set(xlabel=xlabel, ylabel="temperature", title=title)
    axis.legend(title="kind of layer", fontsize="small", ncols=2, loc="upper right")
