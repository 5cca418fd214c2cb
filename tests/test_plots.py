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
    (line,) = saved_figures[0].axes[1].get_lines()
    assert line.get_marker() == "o"


ROWS = [
    {"step": 2, "seconds": 60.0, "loss": 3.0, "pressure": 0.5},
    {"step": 4, "seconds": 180.0, "loss": 2.5, "pressure": 1.0, "val_loss_hard": 3.5},
]
LOSSES = {"pretrained": 3.0, "naive ternary": 15.0}


def panels(figure):
    return [axis.get_ylabel().replace("\n", " ") for axis in figure.axes]


def drawn(axis, color):
    lines = [line for line in axis.get_lines() if line.get_color() == color]
    return [(float(x), float(y)) for line in lines for x, y in line.get_xydata()]


def test_the_curves_begin_with_the_naive_loss_at_step_0(tmp_path, saved_figures):
    temperatures = {"a": [0.3, 0.3, 0.2, 0.1, 0.0], "b": [0.4, 0.4, 0.3, 0.2, 0.0]}
    plots.plot_training_curves(ROWS, temperatures, LOSSES, tmp_path / "curves.png")
    (figure,) = saved_figures
    loss = "(nats per token)"
    assert panels(figure) == [
        f"validation loss {loss}",
        f"training loss {loss}",
        "pressure",
        "temperature",
    ]
    assert drawn(figure.axes[0], "C2") == [(0.0, 15.0), (4.0, 3.5)]
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ["naive ternary", "hard weights", "3.500", "pretrained, 3.000"]
    assert figure.axes[0].get_yscale() == "log"  # 15 is more than three times 3.5
    assert figure.axes[-1].get_xlabel() == "training step"


def test_panels_of_what_does_not_change_are_left_out(tmp_path, saved_figures):
    rows = [row | {"pressure": 1.0} for row in ROWS]
    plots.plot_training_curves(
        rows, {"a": [0.0] * 5}, {}, tmp_path / "curves.png", has_teacher=True
    )
    (figure,) = saved_figures
    assert panels(figure) == [
        "validation loss (nats per token)",
        "training loss against the teacher (nats per token)",
    ]


def test_layers_of_one_temperature_are_one_line(tmp_path, saved_figures):
    temperatures = {"a": [0.3, 0.3, 0.2, 0.1, 0.0], "b": [0.3, 0.3, 0.2, 0.1, 0.0]}
    plots.plot_training_curves(ROWS, temperatures, {}, tmp_path / "curves.png")
    axis = saved_figures[0].axes[-1]
    assert len(axis.get_lines()) == 1 and axis.get_legend() is None


def test_all_stages_share_an_axis_of_minutes(tmp_path, saved_figures):
    losses = LOSSES | {"reconstructed, hard": 4.0}
    temperatures = {"a": [0.2, 0.2, 0.1, 0.1, 0.0]}
    plots.plot_training_curves(
        ROWS,
        temperatures,
        losses,
        tmp_path / "curves.png",
        before={"stage 1": 600.0, "stage 2": 300.0},
    )
    (figure,) = saved_figures
    assert drawn(figure.axes[0], "C2") == [(0.0, 15.0), (15.0, 4.0), (18.0, 3.5)]
    assert [x for x, _ in drawn(figure.axes[1], "C0")] == [16.0, 18.0]
    # Steps 1 and 3 are halfway between what is known of steps 0, 2 and 4.
    assert [x for x, _ in drawn(figure.axes[-1], "C0")] == [15.0, 15.5, 16.0, 17.0, 18.0]
    names = [text.get_text() for text in figure.axes[0].texts]
    assert names[-3:] == ["stage 1", "stage 2", "stage 3"]
    assert figure.axes[-1].get_xlabel() == "minutes"


def test_a_reconstruction_without_times_keeps_steps(tmp_path, saved_figures):
    rows = [{"step": 4, "loss": 2.5, "val_loss_hard": 3.5}]
    losses = LOSSES | {"reconstructed, hard": 4.0}
    before = {"stage 1": 600.0}
    plots.plot_training_curves(rows, {}, losses, tmp_path / "curves.png", before=before)
    assert drawn(saved_figures[0].axes[0], "C2") == [(0.0, 4.0), (4.0, 3.5)]


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


def test_the_fan_has_one_line_per_layer_and_one_color_per_kind():
    axis = Figure().subplots()
    names = ("0.gate", "0.shared_gate", "1.gate", "1.shared_gate")
    curves = {name: [0.3 + index, 0.2] for index, name in enumerate(names)}
    plots._draw_fan(axis, curves, [0, 1])
    texts = [text.get_text() for text in axis.get_legend().get_texts()]
    assert texts == ["gate", "shared_gate"]
    lines = axis.get_lines()
    assert sorted(line.get_ydata()[0] for line in lines) == [0.3, 1.3, 2.3, 3.3]
    assert len({line.get_color() for line in lines}) == 2


def test_heat_maps_of_one_model_have_the_same_names_and_order(tmp_path, saved_figures):
    torchtunes = ["attn.q_proj", "attn.output_proj", "mlp.w1", "mlp.w2", "mlp.w3"]
    folders = [
        "mlp.down_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "self_attn.q_proj",
        "mlp.up_proj",
        "mixer.in_proj",
    ]
    plot_sensitivity(
        {f"layers.{n}.{x}": 1.0 for n in (0, 1) for x in torchtunes}, tmp_path / "a.png", "fisher"
    )
    plots.plot_zeros(
        {f"model.layers.{n}.{x}": 0.5 for n in (0, 1) for x in folders}, tmp_path / "b.png"
    )
    names = [[text.get_text() for text in f.axes[0].get_xticklabels()] for f in saved_figures]
    assert names[0] == ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert names[1] == [*names[0], "mixer.in_proj"]
    assert [t.get_text() for t in saved_figures[0].axes[0].get_yticklabels()] == ["0", "1"]
