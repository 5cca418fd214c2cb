"""Pictures of a run: every PNG file is written whole and shows what its labels say."""

import pytest
from matplotlib.figure import Figure

from hestia_tune import AnnealingSchedule, plots
from hestia_tune.plots import plot_sensitivity, plot_temperatures


@pytest.fixture
def saved_figures(monkeypatch) -> list[Figure]:
    """Collect every figure that is saved."""
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda f, *a, **k: (figures.append(f), save(f, *a, **k)))
    return figures


@pytest.mark.parametrize(
    "traces",
    [
        {f"layers.{k}.attn.{p}": 10.0**k for k in range(12) for p in ("q_proj", "k_proj")},
        {"layers.0.attn.q_proj": 2.0, "layers.0.mlp.w1": -1.0, "layers.1.mlp.w1": 0.0},
        {"layers.0.mlp.w1": -1.0, "output": -2.0},  # No trace has a logarithm.
        {"output": 3.0},
    ],
)
def test_a_heatmap_can_be_drawn_of_any_traces(tmp_path, traces):
    path = tmp_path / "sensitivity.png"
    path.write_bytes(b"an older picture")
    plot_sensitivity(traces, path, "hessian")
    assert path.read_bytes().startswith(b"\x89PNG") and list(tmp_path.iterdir()) == [path]


def test_the_temperatures_of_a_schedule_are_drawn(tmp_path):
    plot_temperatures(AnnealingSchedule(100), {"a": 0.1, "b": 0.9}, tmp_path / "fan.png")
    assert (tmp_path / "fan.png").read_bytes().startswith(b"\x89PNG")


def test_a_single_logged_point_is_visible(tmp_path, saved_figures):
    """Draw a marker, because a line through one point has no length."""
    rows = [{"step": 7, "loss": 2.5, "pressure": 1.0}]
    plots.plot_training_curves(rows, {"a": [0.3, 0.0]}, {}, tmp_path / "curves.png")
    lines = [line for axis in saved_figures[0].axes[:2] for line in axis.get_lines()]
    assert [line.get_marker() for line in lines] == ["o", "o"]


def test_several_runs_share_their_axes(tmp_path, saved_figures):
    rows = [{"step": 5, "loss": 2.0, "tau_mean": 0.3}, {"step": 5, "val_loss_hard": 2.5}]
    plots.plot_runs({"one": rows, "other": [*rows, {"step": 9, "loss": 1.0}]}, tmp_path / "a.png")
    (figure,) = saved_figures
    lines = [[line.get_label() for line in axis.get_lines()] for axis in figure.axes]
    assert lines == [["one", "other"]] * 3 and [*figure.axes[1].get_lines()[1].get_xdata()] == [
        5,
        9,
    ]
    assert len({axis.get_xlim() for axis in figure.axes}) == 1


def test_zeros_are_drawn_in_percent_by_block_and_projection(tmp_path, saved_figures):
    zeros = {"model.layers.0.q_proj": 0.25, "model.layers.1.q_proj": 0.5, "model.layers.1.v": 0.1}
    plots.plot_zeros(zeros, tmp_path / "zeros.png")
    table = saved_figures[0].axes[0].images[0].get_array()
    assert table.filled(-1).tolist() == [[25.0, -1], [50.0, 10.0]]


def test_bits_are_drawn_with_the_numbers_that_occur(tmp_path, saved_figures):
    bits = {"layers.0.q_proj": 1.725, "layers.1.q_proj": 16.0, "layers.1.v": 1.725}
    plots.plot_bits(bits, tmp_path / "bits.png")
    table, bar = saved_figures[0].axes
    assert table.images[0].get_array().filled(-1).tolist() == [[1.725, -1], [16.0, 1.725]]
    assert [text.get_text() for text in bar.get_yticklabels()] == ["1.725", "16"]


def test_the_training_curves_have_a_title_and_labels_in_words(tmp_path, saved_figures):
    plots.plot_training_curves([], {"a": [0.3, 0.0]}, {}, tmp_path / "curves.png")
    (figure,) = saved_figures
    assert "loss, pressure and temperature" in figure.get_suptitle()
    assert [axis.get_ylabel().replace("\n", " ") for axis in figure.axes] == [
        "training and validation loss (nats per token)",
        "pressure (share of the relaxed weight)",
        "temperature",
    ]
    assert figure.axes[-1].get_xlabel() == "training step"


def test_the_fan_has_one_line_per_layer_and_one_color_per_kind():
    axis = Figure().subplots()
    names = ("0.gate", "0.shared_gate", "1.gate", "1.shared_gate")
    curves = {name: [0.3 + index, 0.2] for index, name in enumerate(names)}
    plots._draw_fan(axis, "step", curves)
    texts = [text.get_text() for text in axis.get_legend().get_texts()]
    assert texts == ["gate", "shared_gate"]
    lines = axis.get_lines()
    assert sorted(line.get_ydata()[0] for line in lines) == [0.3, 1.3, 2.3, 3.3]
    assert len({line.get_color() for line in lines}) == 2
    assert axis.get_title() == "4 layers with 4 different temperatures"
