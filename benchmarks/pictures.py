"""Draws the pictures of docs/how_it_works.md by the package's own functions, as SVG files.

tune run hestia_sensitivity --config demo       # once: writes runs/demo/sensitivity.json
python benchmarks/pictures.py --sensitivity runs/demo/sensitivity.json
"""

import argparse
from pathlib import Path

import torch
from matplotlib import rcParams
from matplotlib.figure import Figure

from hestia_tune import AnnealingSchedule, SensitivityArtifact
from hestia_tune.functional import hard_ternary, relaxed_ternary

IMAGES = Path(__file__).parents[1] / "docs" / "img"
TEMPERATURES = (1.0, 0.3, 0.1, 0.03)
SCORES = (0.1, 0.5, 0.9)
STEPS = 1000
# The same file for the same numbers; text stays text, so that a reader can search for it.
rcParams.update({"svg.hashsalt": "hestia_tune", "svg.fonttype": "none", "font.size": 11})


def relaxation() -> Figure:
    """H(w; tau) (Eq. 8) and its slope (Lemma 4.1) over w/gamma, in one group of weights."""
    z = torch.linspace(-2, 2, 801, dtype=torch.float64)
    weight = z / z.abs().mean()  # one row, one group, whose scale gamma (Eq. 1) is 1
    weight = weight[None].requires_grad_()
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    value, slope = figure.subplots(1, 2)
    x = weight.detach()[0]
    for tau in TEMPERATURES:
        relaxed = relaxed_ternary(weight, tau, group_size="channel")
        (gradient,) = torch.autograd.grad(relaxed.sum(), weight)
        value.plot(x, relaxed.detach()[0], label=f"τ = {tau:g}")
        slope.plot(x, gradient[0], label=f"τ = {tau:g}")
    hard = hard_ternary(weight.detach(), group_size="channel")[0]
    value.plot(x, hard, color="black", linewidth=1, linestyle="--", label="hard")
    value.set(xlabel="w / γ", ylabel="H(w; τ) / γ", title="relaxed weight", xlim=(-2, 2))
    slope.set(xlabel="w / γ", ylabel="dH / dw", title="its slope", xlim=(-2, 2))
    value.legend()
    slope.legend()
    return figure


def schedule() -> Figure:
    """The pressure (Eq. 10) and the temperatures of three scores (Eqs. 14, 15) over the steps."""
    annealing = AnnealingSchedule(STEPS)  # the paper's rho, tau_init and alpha
    steps = range(STEPS + 1)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    pressure, temperature = figure.subplots(1, 2)
    pressure.plot(steps, [annealing.pressure(step) for step in steps], color="C3")
    pressure.set(xlabel="step", ylabel="p", title="pressure")
    for score in SCORES:
        curve = [annealing.temperature(step, score) for step in steps]
        temperature.plot(steps, curve, label=f"score {score:g}")
    curve = [annealing.temperature(step) for step in steps]
    temperature.plot(steps, curve, "k--", linewidth=1, label="without sensitivity")
    temperature.set(xlabel="step", ylabel="τ", title="temperature", ylim=(0, None))
    temperature.legend()
    return figure


def sensitivity(artifact: SensitivityArtifact) -> Figure:
    """The scores (Eq. 13) of a model's layers: one row of dots for each projection."""
    kinds = dict.fromkeys(name.rpartition(".")[2] for name in artifact.scores)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axis = figure.subplots()
    blocks: dict[str, int] = {}
    for name, score in artifact.scores.items():
        block = next(part for part in name.split(".") if part.isdigit())
        index = blocks.setdefault(block, len(blocks))
        row = list(kinds).index(name.rpartition(".")[2])
        label = f"block {block}" if row == 0 else None
        axis.scatter(
            score, row, color=f"C{index}", marker="osD^"[index % 4], label=label, alpha=0.8
        )
    axis.set_yticks(range(len(kinds)), kinds)
    axis.invert_yaxis()
    axis.set(xlabel="sensitivity score s", xlim=(0, 1))
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right center")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of docs/how_it_works.md.")
    parser.add_argument(
        "--sensitivity", type=Path, required=True, help="a sensitivity.json of the demo"
    )
    arguments = parser.parse_args()
    IMAGES.mkdir(parents=True, exist_ok=True)
    artifact = SensitivityArtifact.load(arguments.sensitivity)
    pictures = {
        "relaxation": relaxation(),
        "schedule": schedule(),
        "sensitivity": sensitivity(artifact),
    }
    for name, figure in pictures.items():
        path = IMAGES / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        # matplotlib ends some lines with a space.
        lines = path.read_text("utf-8").splitlines()
        path.write_text("".join(f"{line.rstrip()}\n" for line in lines), "utf-8")
        print(path)


if __name__ == "__main__":
    main()
