"""Loss against bits per weight, for the four ways to spend a budget of bits.

    OMP_NUM_THREADS=2 python benchmarks/bits.py --out runs/bits
    python benchmarks/bits.py --out runs/bits_short --steps 6 --seeds 0 --averages 2.2
    python benchmarks/bits.py --out runs/ternary --averages 1.725 --ways uniform  # all ternary

Each run is `tune run hestia_qat` with overrides. One table has the hard validation losses, as the
mean and the standard deviation over the seeds. One picture, losses.png, has the same numbers. Each
result goes into results.json as soon as it is known, so a stopped benchmark continues where it was.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hestia_tune.config.files import load_config
from hestia_tune.files import read_json, write_json

DEMO = str(Path(__file__).resolve().with_name("demo.yaml"))  # the settings of the study
WAYS = ("sensitivity", "error", "uniform", "position")
HARD = "trained, hard"


def measure(out: Path, config: str, overrides: list[str], seed: int) -> dict[str, Any]:
    """Train one model and return its losses and its bits."""
    folder = out / "run"
    shutil.rmtree(folder, ignore_errors=True)
    tune = str(Path(sys.executable).with_name("tune"))
    command = [tune, "run", "hestia_qat", "--config", config, f"output_dir={folder}", *overrides]
    # The traces depend on the seed only, so they are measured once per seed.
    command.append(f"sensitivity_estimation.output={out / f'sensitivity_{seed}.json'}")
    subprocess.run(command, check=True)
    losses = read_json(folder / "results.json")["validation_loss"]
    bits = read_json(folder / "bits.json")
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
    axis.legend(title="bits.by")
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
                    own = [f"seed={seed}", f"bits.average={average}", f"bits.by={way}"]
                    record = measure(options.out, options.config, [*common, *own], seed)
                    saved["results"][key] = record
                    write_json(file, saved)
                print(f"{key}: {json.dumps(saved['results'][key])}", flush=True)
    shown = saved["results"], options.ways, options.averages, options.seeds
    print(f"\n{table(*shown)}", flush=True)
    plot(*shown, options.out / "losses.png")


if __name__ == "__main__":
    main()
