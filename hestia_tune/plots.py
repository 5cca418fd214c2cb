"""Pictures of a run, written as PNG files."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from hestia_tune.annealing import AnnealingSchedule
from hestia_tune.files import staged

# Names of projections -> those of transformers' Llama, in the order of a block. Pictures of one
# model have the same names, whether they are drawn from torchtune's model or from the folder.
_PROJECTIONS = {
    "q_proj": "q_proj",
    "k_proj": "k_proj",
    "v_proj": "v_proj",
    "output_proj": "o_proj",
    "o_proj": "o_proj",
    "w1": "gate_proj",
    "gate_proj": "gate_proj",
    "w3": "up_proj",
    "up_proj": "up_proj",
    "w2": "down_proj",
    "down_proj": "down_proj",
}


def plot_training_curves(
    history: Sequence[Mapping[str, Any]],
    temperatures: Mapping[str, Sequence[float]],
    baselines: Mapping[str, float],
    path: str | Path,
    *,
    before: Mapping[str, float] | None = None,
    has_teacher: bool = False,
) -> None:
    """Draw the losses of a run from its start, and the pressure and temperatures if they change.

    Args:
        history: Logged rows. Each row has ``step`` and any of ``loss``, ``pressure``, ``seconds``,
            ``val_loss_relaxed`` and ``val_loss_hard``. Losses are in nats per token.
        temperatures: Layer name -> temperature of the layer at steps 0, 1, ..., T.
        baselines: Label -> validation loss: "pretrained", "naive METHOD", and "reconstructed, hard"
            if the training starts from a reconstruction.
        path: The PNG file to write.
        before: Name of a stage before the training -> its seconds. If given, all stages share an
            axis of minutes. Otherwise the axis has training steps.
        has_teacher: Whether the training loss is that of a teacher's predictions.
    """
    stages = before or {}
    offset = sum(stages.values()) / 60
    clock = [(row["step"], row["seconds"] / 60) for row in history if "seconds" in row]
    in_minutes = bool(stages) and bool(clock)

    def at(step: float) -> float:
        """Return the place of a step on the axis."""
        if not in_minutes:
            return step
        return offset + float(np.interp(step, *zip((0, 0.0), *clock, strict=True)))

    def points(key: str) -> list[tuple[float, float]]:
        return [(at(row["step"]), row[key]) for row in history if row.get(key) is not None]

    curves = {name: values for name, values in temperatures.items() if len({*values}) > 1}
    pressure = points("pressure")
    changes = len({value for _, value in pressure}) > 1
    panels = {
        "validation": 5,
        "training": 3,
        "pressure": 2 * changes,
        "temperature": 4 * bool(curves),
    }
    panels = {name: height for name, height in panels.items() if height}
    with _picture(path, 8, 1 + 0.75 * sum(panels.values())) as figure:
        axes = figure.subplots(
            len(panels), 1, sharex=True, height_ratios=[*panels.values()], squeeze=False
        )
        axis = dict(zip(panels, axes[:, 0], strict=True))
        _draw_validation(axis["validation"], points, baselines, offset if in_minutes else 0.0)
        target = "training loss\nagainst the teacher" if has_teacher else "training loss"
        _draw_points(axis["training"], points("loss"), color="C0", linewidth=1)
        axis["training"].set_ylabel(f"{target}\n(nats per token)")
        if changes:
            _draw_points(axis["pressure"], pressure, color="C0")
            axis["pressure"].set(ylabel="pressure", ylim=(-0.05, 1.05))
        if curves:
            places = [at(step) for step in range(len(next(iter(curves.values()))))]
            _draw_fan(axis["temperature"], curves, places)
        axes[-1, 0].set_xlabel("minutes" if in_minutes else "training step")
        if in_minutes:
            _mark_stages(axes[:, 0], {name: seconds / 60 for name, seconds in stages.items()})


def _draw_validation(
    axis: Any,
    points: Callable[[str], list[tuple[float, float]]],
    baselines: Mapping[str, float],
    start: float,
) -> None:
    """Draw the validation losses of hard and relaxed weights, and the pretrained loss.

    Args:
        axis: The axis.
        points: Function from a key of the rows to the points of its curve.
        baselines: See `plot_training_curves`.
        start: Place on the axis where the training starts. The stages before it start at 0.
    """
    naive = [item for item in baselines.items() if item[0].startswith("naive ")]
    later = [loss for label, loss in baselines.items() if label.startswith("reconstructed")]
    begin = [(0.0, loss, label) for label, loss in naive[:1] if start or not later]
    begin += [(start, loss, "start") for loss in later]
    hard = [(x, loss) for x, loss, _ in begin] + points("val_loss_hard")
    relaxed = points("val_loss_relaxed")
    _draw_points(axis, hard, marker="s", color="C2", markersize=4)
    _draw_points(axis, relaxed, marker="o", color="C1", markersize=4)
    if begin:
        _note(axis, *begin[0], "C2")
    middle = hard[len(begin) :][:1]
    if middle:
        _note(axis, *middle[0], "hard weights", "C2")
        _note(axis, *hard[-1], f"{hard[-1][1]:.3f}", "C2")
    if relaxed:
        _note(axis, *relaxed[0], "relaxed weights", "C1", above=False)
    if "pretrained" in baselines:
        loss = baselines["pretrained"]
        axis.axhline(loss, ls="--", color="grey")
        place = {"va": "bottom", "transform": axis.get_yaxis_transform()}
        axis.text(0.01, loss, f"pretrained, {loss:.3f}", color="grey", **place)
    losses = [loss for _, loss in (*hard, *relaxed)]
    if losses and max(losses) > 3 * min(losses):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
    axis.margins(x=0.08, y=0.1)  # room for the labels
    axis.set_ylabel("validation loss\n(nats per token)")


def _draw_points(axis: Any, points: Sequence[tuple[float, float]], **style: Any) -> None:
    """Draw a curve. A single point gets a marker, because a line through it has no length."""
    if len(points) == 1:
        style["marker"] = "o"
    if points:
        axis.plot(*zip(*points, strict=True), **style)


def _note(axis: Any, x: float, y: float, text: str, color: str, *, above: bool = True) -> None:
    """Write a label beside a point."""
    place = {"xytext": (4, 5 if above else -5), "textcoords": "offset points"}
    axis.annotate(text, (x, y), color=color, va="bottom" if above else "top", **place)


def _mark_stages(axes: Sequence[Any], stages: Mapping[str, float]) -> None:
    """Divide an axis of minutes into stages, and name them above the first panel."""
    begin, names = 0.0, [*stages, "stage 3"]
    ends = [*accumulate(stages.values()), axes[0].get_xlim()[1]]
    for name, end in zip(names, ends, strict=True):
        place = {"transform": axes[0].get_xaxis_transform(), "ha": "center", "va": "bottom"}
        axes[0].text((begin + end) / 2, 1.01, name, **place)
        for axis in axes:
            axis.axvline(begin, color="0.8", linewidth=1, zorder=0)
        begin = end


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
        axis = figure.subplots()
        _draw_fan(axis, curves, range(101))
        axis.set_xlabel("training progress (percent of the steps)")


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
        _, number, parts = re.fullmatch(r"(.*?\b(\d+)\.)?(.*)", name).groups()
        *outer, last = parts.split(".")
        last = _PROJECTIONS.get(last, last)
        is_known = last in _PROJECTIONS.values() and len(outer) < 2
        cells[number or "-", last if is_known else ".".join([*outer, last])] = value
    rows, columns = (list(dict.fromkeys(key[axis] for key in cells)) for axis in (0, 1))
    order = [*dict.fromkeys(_PROJECTIONS.values())]
    columns.sort(key=lambda name: order.index(name) if name in order else len(order))
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
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend()


@contextmanager
def _picture(path: str | Path, width: float, height: float) -> Iterator[Any]:
    """Yield a figure of a size in inches, and write it to ``path`` at the end."""
    from matplotlib.figure import Figure  # Slow to import, and most commands do not need it.

    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    with staged(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)


def _draw_fan(
    axis: Any, temperatures: Mapping[str, Sequence[float]], places: Sequence[float]
) -> None:
    """Draw the temperature of each layer; layers of one kind share a color.

    Args:
        axis: The axis.
        temperatures: Layer name -> temperatures. The kind is the last part of the name.
        places: The place of each temperature on the x axis.
    """
    axis.set_ylabel("temperature")
    different = {tuple(curve) for curve in temperatures.values()}
    if len(different) == 1:
        axis.plot(places, [*different.pop()], color="C0")
        return
    width = 1.2 if len(temperatures) <= 100 else 0.6
    kinds = [_PROJECTIONS.get(kind := name.rpartition(".")[2], kind) for name in temperatures]
    for number, kind in enumerate(dict.fromkeys(kinds)):
        own = [curve for k, curve in zip(kinds, temperatures.values(), strict=True) if k == kind]
        style = ("-", "--", "-.")[number % 3]
        look = {"color": f"C{number}", "linewidth": width}
        lines = axis.plot(places, [*zip(*own, strict=True)], style, **look)
        lines[0].set_label(kind)
    axis.legend(title="kind of layer", fontsize="small", ncols=2, loc="upper right")
