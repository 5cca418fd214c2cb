r"""Tables (Markdown, on screen) and a picture of what `small.py` has measured so far.

python benchmarks/replication/report.py --small runs/replication/small
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from common import HARD, METHODS

# method -> (learning rate, steps) -> seed -> hard validation loss
Losses = dict[str, dict[tuple[float, int], dict[int, float]]]


def read(folder: Path) -> tuple[Losses, list[dict]]:
    """All records of a study."""
    losses: Losses = defaultdict(lambda: defaultdict(dict))
    records = [json.loads(p.read_text()) for p in sorted(folder.glob("*/*/record.json"))]
    for record in records:
        settings = record["settings"]
        key = (settings["optimizer"]["lr"], record["steps"])
        losses[record["method"]][key][settings["seed"]] = record["validation_loss"][HARD]
    return losses, records


def spread(values: list[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{deviation}"


def chosen(losses: Losses, steps: int, first: int) -> dict[str, tuple[float, dict[int, float]]]:
    """Per method its learning rate and its losses by seed, without the first seed's."""
    found = {}
    for method, runs in losses.items():
        candidates = {}
        for (lr, count), by_seed in runs.items():
            rest = {seed: loss for seed, loss in by_seed.items() if seed != first}
            if count == steps and rest:
                candidates[lr] = rest
        if candidates:
            most = max(map(len, candidates.values()))
            full = {lr: rest for lr, rest in candidates.items() if len(rest) == most}
            lr = min(full, key=lambda lr: statistics.mean(full[lr].values()))
            found[method] = (lr, full[lr])
    return found


def differences(mine: dict[int, float], other: dict[int, float]) -> str:
    """Mean and standard deviation of the paired differences by seed."""
    shared = sorted(mine.keys() & other.keys())
    return spread([mine[seed] - other[seed] for seed in shared]) if shared else "-"


def comparison(
    losses: Losses, found: dict[str, tuple[float, dict[int, float]]], names: list[str]
) -> Iterator[str]:
    """Mean losses, and differences paired by seed, at every method's learning rate.

    "Hestia, rho 0" is a variation of "Hestia".
    """
    references = ("straight-through", "Hestia", "Fairy2i")
    tried = sorted({lr for runs in losses.values() for lr, _ in runs})
    ends = {tried[0]: " (the lowest)", tried[-1]: " (the highest)"} if len(tried) > 1 else {}
    titles = [f"minus {name}" for name in references if name in found] + ["minus the unvaried"]
    yield f"| method | lr | seeds | hard val loss | {' | '.join(titles)} |"
    yield f"|---|---:|---:|---:|{'---:|' * len(titles)}"
    for name in names:
        if name not in found:
            continue
        lr, by_seed = found[name]
        cells = [name, f"{lr:g}{ends.get(lr, '')}", str(len(by_seed)), spread([*by_seed.values()])]
        for reference in references:
            if reference in found:
                other = found[reference][1]
                cells.append("" if reference == name else differences(by_seed, other))
        unvaried = name.partition(",")[0]
        is_variation = unvaried != name and unvaried in found
        cells.append(differences(by_seed, found[unvaried][1]) if is_variation else "")
        yield f"| {' | '.join(cells)} |"


def search(losses: Losses, steps: int, first: int) -> Iterator[str]:
    """The first seed's loss at every learning rate."""
    lrs = sorted({lr for runs in losses.values() for lr, count in runs if count == steps})
    yield f"| method | {' | '.join(f'{lr:g}' for lr in lrs)} |"
    yield f"|---|{'---:|' * len(lrs)}"
    for method in METHODS:
        cells = [losses[method.name].get((lr, steps), {}).get(first) for lr in lrs]
        yield f"| {method.name} | {' | '.join('' if c is None else f'{c:.4f}' for c in cells)} |"


def draw(found: dict[str, tuple[float, dict[int, float]]], path: Path) -> None:
    """Every seed's hard validation loss, by method; bars are means."""
    from matplotlib.figure import Figure

    names = sorted(found, key=lambda name: -statistics.mean(found[name][1].values()))
    figure = Figure(figsize=(8, 0.35 * len(names) + 1.2), layout="constrained")
    axis = figure.subplots()
    for row, name in enumerate(names):
        values = list(found[name][1].values())
        axis.plot(values, [row] * len(values), "o", alpha=0.6, color="tab:blue")
        axis.plot([statistics.mean(values)], [row], "|", markersize=16, color="black")
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel("hard validation loss, nats per token")
    axis.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", default="runs/replication/small")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument(
        "--first-seed", type=int, default=0, help="of the search, left out after it"
    )
    options = parser.parse_args()
    losses, records = read(Path(options.small))
    if not records:
        parser.error(f"--small {options.small}: no METHOD/RUN/record.json there; first small.py")
    known = [method.name for method in METHODS]
    others = sorted(set(losses) - set(known))
    print(f"versions: {records[0]['versions']}\n")
    before = {
        (label, loss, "" if label == "pretrained" else f" ({record['method']})")
        for record in records
        for label, loss in record["validation_loss"].items()
        if label != HARD and record["method"] in known
    }
    for label, loss, method in sorted(before):
        print(f"{label}{method}: {loss:.4f}")
    print("\nFirst seed, by learning rate:\n")
    print("\n".join(search(losses, options.steps, options.first_seed)))
    for steps in sorted({count for runs in losses.values() for _, count in runs}):
        found = chosen(losses, steps, options.first_seed)
        print(f"\n{steps} steps:\n")
        print("\n".join(comparison(losses, found, [*known, *others])))
        if steps == options.steps:
            draw(found, Path(options.small) / "small.png")


if __name__ == "__main__":
    main()
