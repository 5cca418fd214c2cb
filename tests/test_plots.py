"""Pictures: PNG files that appear whole, whatever the numbers."""

import pytest
from matplotlib.figure import Figure

from hestia_tune import AnnealingSchedule, plots
from hestia_tune.plots import plot_sensitivity, plot_temperatures


@pytest.mark.parametrize(
    "traces",
    [
        {f"layers.{k}.attn.{p}": 10.0**k for k in range(12) for p in ("q_proj", "k_proj")},
        {"layers.0.attn.q_proj": 2.0, "layers.0.mlp.w1": -1.0, "layers.1.mlp.w1": 0.0},
        {"layers.0.mlp.w1": -1.0, "output": -2.0},  # none of which has a logarithm
        {"output": 3.0},
    ],
)
def test_a_heatmap_of_any_traces(tmp_path, traces):
    path = tmp_path / "sensitivity.png"
    path.write_bytes(b"an older one")
    plot_sensitivity(traces, path, "hessian")
    assert path.read_bytes().startswith(b"\x89PNG") and list(tmp_path.iterdir()) == [path]


def test_the_fan_of_temperatures(tmp_path):
    plot_temperatures(AnnealingSchedule(100), {"a": 0.1, "b": 0.9}, tmp_path / "fan.png")
    assert (tmp_path / "fan.png").read_bytes().startswith(b"\x89PNG")


def test_a_single_logged_point_is_visible(tmp_path, monkeypatch):
    """A line of one point has no length, so the point needs a marker."""
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda f, *a, **k: (figures.append(f), save(f, *a, **k)))
    rows = [{"step": 7, "loss": 2.5, "pressure": 1.0}]
    plots.plot_training_curves(rows, {"a": [0.3, 0.0]}, {}, tmp_path / "curves.png")
    drawn = [line for axis in figures[0].axes[:2] for line in axis.get_lines()]
    assert [line.get_marker() for line in drawn] == ["o", "o"]


def test_every_kind_of_layer_is_in_the_legend():
    figure = Figure()
    names = ("0.gate", "0.shared_gate", "1.gate", "1.shared_gate")
    plots._draw_fan(figure.subplots(), "step", {name: [0.3, 0.2] for name in names})
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert sorted(texts) == ["gate", "shared_gate"]
