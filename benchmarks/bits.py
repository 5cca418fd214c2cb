"""Loss against bits per weight, for the four ways to spend a budget of bits.

    OMP_NUM_THREADS=2 python benchmarks/bits.py --out runs/bits
    python benchmarks/bits.py --out runs/bits_short --steps 6 --seeds 0 --averages 2.2
    python benchmarks/bits.py --out runs/ternary --averages 1.725 --ways uniform  # all ternary

Two ways are options of a run, ``bits.by``. The other two are controls, which this script computes
and gives to the run as ``quantizer.layers``:

    uniform     All linears get the same choice, as large as the budget allows. What is left lifts
                linears by one choice, in a random order that never changes.
    position    The last linears get the most bits.

Each run is `tune run hestia_qat` with overrides. One table has the hard validation losses, as the
mean and the standard deviation over the seeds. One picture, losses.png, has the same numbers. Each
result goes into results.json as soon as it is known, so a stopped benchmark continues where it was.
"""

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from hestia_tune.bits import BITS_FILE, bits_per_weight, component_of
from hestia_tune.config.run_config import RunConfig, load_config, overridden
from hestia_tune.config.sections import CHOICES
from hestia_tune.files import read_json, write_json
from hestia_tune.run import Run
from hestia_tune.stages import choose_bits

DEMO = str(Path(__file__).resolve().with_name("demo.yaml"))  # the settings of the study
CONTROLS = ("uniform", "position")
WAYS = ("sensitivity", "error", *CONTROLS)
HARD = "trained, hard"


def fill(costs: np.ndarray, budget: int, order: Iterable[int], allowed: Sequence[int]) -> list[int]:
    """Return options that a budget is spent on greedily, without a look at losses.

    Every layer starts with the first allowed option. Then each layer, in a given order, takes the
    last allowed option that the rest of the budget can pay.

    Args:
        costs: The cost of every option of every layer (layers, options), in order of the cost.
        budget: The largest sum of costs. The first allowed options must fit into it.
        order: Indices of the layers.
        allowed: Indices of options, in order of their cost.
    """
    options = [allowed[0]] * len(costs)
    rest = budget - int(costs[:, allowed[0]].sum())
    for layer in order:
        extra = costs[layer] - costs[layer, allowed[0]]
        options[layer] = max(option for option in allowed if extra[option] <= rest)
        rest -= int(extra[options[layer]])
    return options


def control(way: str, costs: np.ndarray, budget: int) -> list[int]:
    """The option of every layer by a control; `fill` explains the arguments."""
    layers, options = (range(size) for size in costs.shape)
    if way == "position":
        return fill(costs, budget, reversed(layers), options)
    base = int((costs.sum(0) <= budget).nonzero()[0][-1])
    return fill(
        costs, budget, random.Random(0).sample(layers, len(layers)), options[base : base + 2]
    )


def controlled(
    way: str, config: RunConfig, sizes: dict[str, int]
) -> tuple[dict[str, dict[str, Any] | None], float]:
    """The component of every layer that differs from the quantizer, and the mean bits per weight.

    ``sizes`` has the number of weights of every layer. The config's groups are an int.
    """
    choices = [name for name in CHOICES if name in config.bits.choices]
    bits = [bits_per_weight(name, config.quantizer.get("group_size", 128)) for name in choices]
    total, unit = sum(sizes.values()), 5  # fifths of a bit, so that costs are integers
    costs = np.array([[int(unit * size * each) for each in bits] for size in sizes.values()])
    found = control(way, costs, int(unit * Fraction(str(config.bits.average)) * total))
    spent = costs[range(len(costs)), found].sum() / unit
    components = {
        name: component_of(choices[option], config.quantizer)
        for name, option in zip(sizes, found, strict=True)
    }
    others = {name: each for name, each in components.items() if each != config.quantizer}
    return others, float(spent / total)


def overrides_of(
    way: str, config: str, overrides: list[str], folder: Path
) -> tuple[list[str], Any]:
    """The overrides that a way adds to a run, and the entries of bits.json that they replace."""
    if way not in CONTROLS:
        return [f"bits.by={way}"], None
    other = [*overrides, "bits.by=error", "sensitivity=null", f"output_dir={folder}"]
    settings = RunConfig.parse(overridden(load_config(config), other))
    choose_bits(Run.of(settings))  # for the sizes of the layers
    layers = read_json(folder / BITS_FILE)["layers"]
    sizes = {name: entry["weights"] for name, entry in layers.items()}
    components, mean = controlled(way, settings, sizes)
    added = ["bits.average=null", f"quantizer.layers={json.dumps(components)}"]
    return added, {"mean_bits": mean, "predicted_increase": None}


def measure(out: Path, config: str, overrides: list[str], way: str, seed: int) -> dict[str, Any]:
    """Train one model and return its losses and its bits."""
    folder = out / "run"
    added, bits = overrides_of(way, config, overrides, out / "sizes")
    shutil.rmtree(out / "sizes", ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    tune = str(Path(sys.executable).with_name("tune"))
    command = [tune, "run", "hestia_qat", "--config", config, f"output_dir={folder}"]
    command += [*overrides, *added]
    # The traces depend on the seed only, so they are measured once per seed.
    command.append(f"sensitivity_estimation.output={out / f'sensitivity_{seed}.json'}")
    subprocess.run(command, check=True)
    losses = read_json(folder / "results.json")["validation_loss"]
    bits = bits or read_json(folder / BITS_FILE)
    record = {"losses": losses} | {key: bits[key] for key in ("mean_bits", "predicted_increase")}
    shutil.rmtree(folder)
    return record


def losses_of(results: dict[str, Any], way: str, average: float, seeds: list[int]) -> list[float]:
    """The hard losses of all seeds."""
    return [results[f"{way}, {average}, seed {seed}"]["losses"][HARD] for seed in seeds]


def table(results: dict[str, Any], ways: list[str], averages: list[float], seeds: list[int]) -> str:
    """The losses as Markdown: one row per budget, one column per way."""
    lines = [f"| bits per weight, at most | {' | '.join(ways)} |", "|---:|" + "---:|" * len(ways)]
    for average in averages:
        cells = []
        for way in ways:
            losses = losses_of(results, way, average, seeds)
            spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
            cells.append(f"{statistics.mean(losses):.4f}{spread}")
        lines.append(f"| {average:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(
    results: dict[str, Any], ways: list[str], averages: list[float], seeds: list[int], path: Path
) -> None:
    """The losses as a picture, with the pretrained model's as a line."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for way in ways:
        rows = [losses_of(results, way, average, seeds) for average in averages]
        spread = [statistics.stdev(row) if len(row) > 1 else 0.0 for row in rows]
        means = [statistics.mean(row) for row in rows]
        axis.errorbar(averages, means, spread, marker="o", capsize=3, label=way)
    pretrained = next(iter(results.values()))["losses"]["pretrained"]
    axis.axhline(pretrained, ls="--", color="grey", label="pretrained")
    axis.set(xlabel="bits per weight, at most", ylabel="validation loss, hard weights (nats)")
    axis.legend(title="way")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", default=DEMO)
    parser.add_argument("--steps", type=int, help="default: the config's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--averages", type=float, nargs="+", default=[1.8, 2.0, 2.5, 3.0, 4.0, 6.0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--overrides", nargs="*", default=[], help="of the config")
    options = parser.parse_args()
    common = [*options.overrides, "run_val_every_n_steps=null", "log_level=warning"]
    if options.steps:
        common.append(f"max_steps={options.steps}")
    file, settings = options.out / "results.json", {"config": options.config, "common": common}
    load_config(options.config)  # a wrong name is an error before the first run
    saved = read_json(file) if file.is_file() else settings | {"results": {}}
    if {key: saved[key] for key in settings} != settings:
        parser.error(f"{file} has results with other options; take another --out")
    for seed in options.seeds:
        for average in options.averages:
            for way in options.ways:
                key = f"{way}, {average}, seed {seed}"
                if key not in saved["results"]:
                    own = [f"seed={seed}", f"bits.average={average}"]
                    record = measure(options.out, options.config, [*common, *own], way, seed)
                    saved["results"][key] = record
                    write_json(file, saved)
                print(f"{key}: {json.dumps(saved['results'][key])}", flush=True)
    shown = saved["results"], options.ways, options.averages, options.seeds
    print(f"\n{table(*shown)}", flush=True)
    plot(*shown, options.out / "losses.png")


if __name__ == "__main__":
    main()
