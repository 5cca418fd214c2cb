r"""The systems of the paper's tables on the demo model, like for like, beside Hestia.

    OMP_NUM_THREADS=1 python benchmarks/replication/methods.py --out runs/replication/methods

Every row trains on the same data, steps and schedule of the learning rate. It tries ``--lrs`` at
the first of ``--seeds``, from the middle one downwards, or upwards, for as long as that is better,
and takes the best to the others; seeds vary the order of the data. Methods whose scale is learned,
or begins as absmax, stand there twice: from the published start, and from least squares, so that a
margin over them can be told apart from their start.

The table has mean and deviation of the hard validation loss over all seeds, and the differences to
AbsMean and to Hestia, paired by seed. Then come the ``--best`` rows at ``--longer`` times the steps
and the same learning rates, and the pictures, ``methods.png`` and ``methods_longer.png``.

What is done is kept: a study that was stopped goes on, and ``--rows`` takes only those of these
names, or whose names hold one of these words. A row whose component this version lacks is left out,
and said so.
"""

import argparse
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import DEMO, HARD, HESTIA, STRAIGHT_THROUGH, Method, Study, many_runs, settings_of
from report import differences, draw, spread
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path

LRS = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
REFERENCES = ("AbsMean", "Hestia")
STARTS = {"absmax": "absmax", "least squares": "least_squares"}
# The sequences of a run; batch_size of the demo is 16.
GENERATED = {
    "_component_": "hestia_tune.data.self_generated_dataset",
    "seq_len": 128,
    "epochs": None,
}


@dataclass(frozen=True)
class Row:
    """A line of the table: a method, and what else of the config differs from the others'."""

    method: Method
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.method.name


def row(name: str, component: str, changes: Mapping[str, Any] | None = None, **options: Any) -> Row:
    """A straight-through row; ``options`` are the component's."""
    quantizer = {"_component_": f"hestia_tune.{component}"} | {"group_size": 128} | options
    return Row(Method(name, quantizer, STRAIGHT_THROUGH), changes or {})


def from_both(name: str, component: str, **options: Any) -> list[Row]:
    """The row from each of its starts."""
    return [
        row(f"{name}, {told}", component, start=start, **options) for told, start in STARTS.items()
    ]


def rows_of(out: Path, steps: int) -> list[Row]:
    """All rows; ``out`` is where text is generated, for ``steps`` steps."""
    generated = {"cache_dir": str(out / "self_generated"), "num_sequences": 16 * steps}
    llm_qat = {
        "dataset": GENERATED | generated,
        "distillation__weight": 1.0,
        "epochs": 1,  # the set has its own
    }
    hestia = dict(HESTIA.quantizer)
    uniform = HESTIA.schedule | {"alpha": 0.0}
    return [
        row("AbsMean", "AbsMean"),
        row("Hestia, tau_init 0", "HestiaQATQuantizer"),
        row("AbsMean, per row", "AbsMean", group_size="channel"),
        row("AbsMean, per tensor", "AbsMean", group_size="tensor"),
        row(
            "Spectra (AbsMean, per tensor, from scratch)",
            "AbsMean",
            {"init": "random"},
            group_size="tensor",
        ),
        row("TWN, 0.75", "TWN"),
        row("TWN, 0.7", "TWN", delta=0.7),
        *from_both("INT2", "INT2"),
        *from_both("LSQ", "LSQ"),
        *from_both("SEQ, ternary", "SEQ"),
        *from_both("SEQ, 2 bits", "SEQ", bits=2),
        *from_both("DLT", "DLT"),
        row("Tequila", "Tequila"),
        row("LLM-QAT (AbsMean, per row)", "AbsMean", llm_qat, group_size="channel"),
        Row(HESTIA),
        Row(Method("Hestia, uniform", hestia, uniform)),
        Row(Method("Hestia, 1 bit", hestia | {"codebook": "binary"}, uniform)),
        Row(Method("Hestia, 2 bits", hestia | {"codebook": "int2"}, uniform)),
    ]


def chosen(rows: list[Row], words: list[str]) -> list[Row]:
    """The rows of these names, and those whose names hold one of the other words."""
    names = {row.name for row in rows}
    parts = [word.lower() for word in words if word not in names]
    return [
        row for row in rows if row.name in words or any(part in row.name.lower() for part in parts)
    ]


def is_there(row: Row) -> bool:
    """Whether this version has the component, and it takes the row's options."""
    options = dict(row.method.quantizer)
    try:
        _get_component_from_path(options.pop("_component_"))(**options)
    except (InstantiationError, TypeError, ValueError):
        return False
    return True


def changes_of(row: Row, lr: float, seed: int, steps: int) -> dict[str, Any]:
    """What a run of the row changes in the config, as `Study.run` takes it."""
    common = {"optimizer__lr": lr, "seed": seed, "max_steps": steps, "epochs": steps}
    changes = common | {"max_steps_per_epoch": None} | row.changes
    if dataset := row.changes.get("dataset"):  # which has a seed of its own, of text and order
        folder = f"{dataset['cache_dir']}_{seed}"
        changes["dataset"] = dataset | {"seed": seed, "cache_dir": folder}
    return changes


@dataclass
class Comparison:
    """The runs of a study, each kept as soon as it is done."""

    study: Study
    lrs: list[float]
    seeds: list[int]

    def loss(self, row: Row, lr: float, seed: int, steps: int) -> float:
        """The hard validation loss of one run."""
        label = f"lr{lr:g}_steps{steps}_seed{seed}"
        record = self.study.run(row.method, label, **changes_of(row, lr, seed, steps))
        return record["validation_loss"][HARD]

    def search(self, row: Row, steps: int) -> dict[float, float]:
        """Learning rate -> loss at the first seed, of those that were tried; see the module."""
        lrs, seed = sorted(self.lrs), self.seeds[0]
        middle = len(lrs) // 2
        found = {lrs[middle]: self.loss(row, lrs[middle], seed, steps)}
        for others in (reversed(lrs[:middle]), lrs[middle + 1 :]):
            for lr in others:
                least = min(found.values())
                found[lr] = self.loss(row, lr, seed, steps)
                if not found[lr] < least:
                    break
            if min(found, key=found.__getitem__) < lrs[middle]:
                break
        return found

    def over_seeds(self, row: Row, lr: float, steps: int) -> dict[int, float]:
        return {seed: self.loss(row, lr, seed, steps) for seed in self.seeds}


def table(found: Mapping[str, tuple[float, dict[int, float]]], lrs: list[float]) -> Iterator[str]:
    """Rows from the best to the worst.

    Args:
        found: row -> its learning rate and its losses by seed.
        lrs: that were tried, for a mark at those where the search ended.
    """
    references = [name for name in REFERENCES if name in found]
    titles = ["method", "lr", "seeds", "hard val loss", *(f"minus {name}" for name in references)]
    yield f"| {' | '.join(titles)} |"
    yield f"|---|{'---:|' * (len(titles) - 1)}"
    for name, (lr, losses) in sorted(found.items(), key=lambda item: mean(item[1][1])):
        edge = " (at the edge)" if len(lrs) > 1 and lr in (min(lrs), max(lrs)) else ""
        cells = [name, f"{lr:g}{edge}", str(len(losses)), spread([*losses.values()])]
        for other in references:
            cells.append("" if other == name else differences(losses, found[other][1]))
        yield f"| {' | '.join(cells)} |"


def mean(losses: Mapping[int, float]) -> float:
    return statistics.mean(losses.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=DEMO)
    parser.add_argument("--out", type=Path, default=Path("runs/replication/methods"))
    parser.add_argument("--lrs", nargs="+", type=float, default=LRS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--longer", type=int, default=2, help="times --steps, for the best")
    parser.add_argument("--best", type=int, default=4, help="rows that go on to it; 0 for none")
    parser.add_argument("--rows", nargs="+", default=[""], help="only those with such a word")
    parser.add_argument("--list", action="store_true", help="the names of the rows, and no run")
    parser.add_argument("--overrides", nargs="*", default=[], help="of the config")
    options = parser.parse_args()
    rows = chosen(rows_of(options.out, options.longer * options.steps), options.rows)
    if not rows:
        parser.error(f"--rows {options.rows}: no row has such a name; --list shows them")
    if options.list:
        print("\n".join(row.name + ("" if is_there(row) else " (missing)") for row in rows))
        return
    if missing := [row.name for row in rows if not is_there(row)]:
        print(f"left out, for want of their component: {', '.join(missing)}\n", flush=True)
        rows = [row for row in rows if row.name not in missing]
    quiet = ["run_val_every_n_steps=null", "log_every_n_steps=25"]
    base = settings_of(options.config, [*quiet, *options.overrides])
    comparison = Comparison(Study(base, options.out), options.lrs, options.seeds)
    with many_runs():
        found, searched = {}, {}
        for row in rows:
            searched[row.name] = comparison.search(row, options.steps)
            lr = min(searched[row.name], key=searched[row.name].__getitem__)
            found[row.name] = lr, comparison.over_seeds(row, lr, options.steps)
            print(f"{row.name}: {spread([*found[row.name][1].values()])} at {lr:g}", flush=True)
        print(f"\nThe first seed, by learning rate, {options.steps} steps:\n")
        print(f"| method | {' | '.join(f'{lr:g}' for lr in options.lrs)} |")
        print(f"|---|{'---:|' * len(options.lrs)}")
        for name, losses in searched.items():
            cells = (f"{losses[lr]:.4f}" if lr in losses else "" for lr in options.lrs)
            print(f"| {name} | {' | '.join(cells)} |")
        print(f"\n{options.steps} steps:\n")
        print("\n".join(table(found, options.lrs)), flush=True)
        draw(found, options.out / "methods.png")
        best = sorted(rows, key=lambda row: mean(found[row.name][1]))[: options.best]
        if best:
            steps = options.longer * options.steps
            longer = {
                row.name: (lr, comparison.over_seeds(row, lr, steps))
                for row, lr in ((row, found[row.name][0]) for row in best)
            }
            print(f"\n{steps} steps, the best {len(best)}, at the same learning rates:\n")
            print("\n".join(table(longer, [])), flush=True)
            draw(longer, options.out / "methods_longer.png")


if __name__ == "__main__":
    main()
