"""Draw the pictures of the README and of docs/how_it_works.md, as SVG files.

Those of how_it_works.md come from the package's own functions, and the README's from the table of
docs/results/bits.md.

hestia sensitivity demo     # writes runs/demo/sensitivity.json
python benchmarks/pictures.py --sensitivity runs/demo/sensitivity.json
"""

import argparse
import re
from pathlib import Path

import torch
from matplotlib import rcParams
from matplotlib.figure import Figure

from hestia_tune import AnnealingSchedule, SensitivityArtifact
from hestia_tune.functional import hard_ternary, relaxed_ternary

DOCS = Path(__file__).parents[1] / "docs"
IMAGES = DOCS / "img"
TEMPERATURES = (1.0, 0.3, 0.1, 0.03)
SCORES = (0.1, 0.5, 0.9)
MLP = {"w1": "w1 (gate)", "w2": "w2 (down)", "w3": "w3 (up)"}
STEPS = 1000
# The same numbers give the same file. Text stays text, so that a reader can search for it.
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
    value.plot(x, hard, color="black", linewidth=1, linestyle="--", label="Q(w) / γ")
    axes = {"xlabel": "normalized weight w / γ", "xlim": (-2, 2)}
    value.set(**axes, ylabel="H(w; τ) / γ", title="Relaxed weight")
    slope.set(**axes, ylabel="dH / dw", title="Slope")
    value.legend()
    return figure


def schedule() -> Figure:
    """The pressure (Eq. 10) and the temperatures of three scores (Eqs. 14, 15) over the steps."""
    annealing = AnnealingSchedule(STEPS)  # the paper's rho, tau_init and alpha
    steps = range(STEPS + 1)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    pressure, temperature = figure.subplots(1, 2)
    pressure.plot(steps, [annealing.pressure(step) for step in steps], color="C3")
    pressure.set(xlabel="step", ylabel="pressure p", title="Pressure")
    for score in SCORES:
        curve = [annealing.temperature(step, score) for step in steps]
        temperature.plot(steps, curve, label=f"layer with s = {score:g}")
    curve = [annealing.temperature(step) for step in steps]
    temperature.plot(steps, curve, "k--", linewidth=1, label="base temperature")
    temperature.set(xlabel="step", ylabel="temperature τ", title="Temperature", ylim=(0, None))
    temperature.legend()
    return figure


def sensitivity(artifact: SensitivityArtifact) -> Figure:
    """The scores (Eq. 13) of a model's layers: one row per projection, one marker per block."""
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
    axis.set_yticks(range(len(kinds)), [MLP.get(kind, kind) for kind in kinds])
    axis.invert_yaxis()
    axis.set(xlabel="sensitivity score s", xlim=(0, 1))
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right center")
    return figure


def sizes(page: str) -> Figure:
    """Size of a GGUF file against the loss on WikiText-2, from the table "Equal bytes" of a page.

    A curve joins the files of one maker that no smaller file of the same maker beats.
    """
    table = page.partition("## Equal bytes")[2].partition("\n##")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    header, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    files: dict[bool, list[tuple[float, float, str]]] = {False: [], True: []}
    for row in rows:
        name, size, loss = (row[header.index(key)] for key in ("file", "MB", "WikiText-2"))
        is_theirs = name.startswith("llama.cpp")
        label = re.sub(r"llama.cpp |`|, (second|longer) run", "", name)
        files[is_theirs].append((float(size), float(loss.strip(" *")), label))
    (_, pretrained, _), *ours = files[False]
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axis = figure.subplots()
    axis.axhline(pretrained, color="black", linewidth=1, linestyle="--")
    axis.annotate("pretrained, 269 MB", (51, pretrained), (0, -12), textcoords="offset points")
    for color, maker, found in (("C1", "llama.cpp", files[True]), ("C0", "hestia_tune", ours)):
        best = [x for x in found if all(x[1] <= y[1] for y in found if y[0] <= x[0])]
        best = list({size: (size, loss) for size, loss, _ in best}.values())
        axis.plot(*zip(*best, strict=True), color=color, marker="o", markersize=4)
        for size, loss, label in found:
            axis.plot(size, loss, "o", color=color, markersize=4)
            if (maker == "llama.cpp" or loss > 3.5) and "chats" not in label:
                at = {"xytext": (6, 3), "textcoords": "offset points", "color": color}
                axis.annotate(label, (size, loss), **at)
    axis.text(73, 3.9, "hestia_tune", color="C0", weight="bold")
    axis.text(
        66, 12.5, "llama.cpp's own files,\nwith an importance matrix", color="C1", weight="bold"
    )
    axis.set(xlabel="size of the GGUF file in MB", yscale="log", xlim=(48, 97), ylim=(2.7, 17))
    axis.set_ylabel("loss on WikiText-2 (nats per token)")
    axis.set_yticks([3, 4, 6, 10, 15], ["3", "4", "6", "10", "15"])
    axis.minorticks_off()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of the documentation.")
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
        "sizes": sizes((DOCS / "results" / "bits.md").read_text("utf-8")),
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
