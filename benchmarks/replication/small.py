"""Every method on the demo model: the same data and steps, a learning rate of its own, seeds.

    OMP_NUM_THREADS=1 python benchmarks/replication/small.py --out runs/replication/small \\
        --overrides compile=True
    python benchmarks/replication/report.py --small runs/replication/small

Each method tries every one of ``--lrs`` at the first seed, the two best at the other seeds, and is
reported at the one with the lower mean there (hard validation loss; the first seed is left out).
Seeds vary the order of the data. What is done is kept: a stopped study goes on. Stages: ``search``;
``ablations`` and ``temperatures``, at the learning rate of the method that is varied; ``budget``,
the same two learning rates at fewer steps, and at multiples of ``--steps``, an epoch of that many
each.
"""

import argparse
import statistics
from pathlib import Path

from common import DEMO, FAIRY2I_H, HARD, HESTIA, METHODS, Method, Study, many_runs, settings_of

STAGES = ("search", "ablations", "temperatures", "budget")
LRS = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
# Beside the values of `METHODS`, which has alpha 0 too.
RHOS = (0.0, 0.1, 0.3)
ALPHAS = (-0.4, 0.2, 0.6)
TAU_INITS = (0.03, 0.1, 0.6)


def label_of(lr: float, steps: int, seed: int) -> str:
    return f"lr{lr:g}_steps{steps}_seed{seed}"


def ablations() -> list[Method]:
    """Fisher traces, other rho, other alpha; Fairy2i-H with one temperature, without pressure."""
    found = [Method("Hestia, fisher", HESTIA.quantizer, HESTIA.schedule, "fisher")]
    found += [HESTIA.varied(f"Hestia, rho {r:g}", rho=r) for r in RHOS]
    found += [HESTIA.varied(f"Hestia, alpha {a:g}", alpha=a) for a in ALPHAS]
    found += [FAIRY2I_H.varied("Fairy2i-H, uniform", alpha=0.0)]
    return found + [FAIRY2I_H.varied("Fairy2i-H, rho 0", rho=0.0)]


def temperatures() -> list[Method]:
    """Hestia and Fairy2i-H (there in squared radians) from other temperatures."""
    methods = (HESTIA, FAIRY2I_H)
    return [m.varied(f"{m.name}, tau_init {t:g}", tau_init=t) for m in methods for t in TAU_INITS]


class Small:
    """The study; a method's two best of ``lrs`` at the first of ``seeds`` go on to the others."""

    def __init__(self, study: Study, lrs: list[float], seeds: list[int], steps: int):
        self.study, self.lrs, self.steps = study, lrs, steps
        self.first, *self.seeds = seeds

    def run(self, method: Method, lr: float, seed: int, steps: int | None = None) -> float:
        steps = steps or self.steps
        changes = {"optimizer__lr": lr, "seed": seed}
        changes |= {
            "epochs": steps // self.steps or 1,
            "max_steps_per_epoch": min(steps, self.steps),
        }
        record = self.study.run(method, label_of(lr, steps, seed), **changes)
        return record["validation_loss"][HARD]

    def mean(self, method: Method, lr: float, steps: int | None = None) -> float:
        return statistics.mean(self.run(method, lr, seed, steps) for seed in self.seeds)

    def best_lr(self, method: Method, steps: int | None = None) -> float:
        """Of the two that are best at the first seed, the one with the lower mean at the others."""
        finalists = sorted(self.lrs, key=lambda lr: self.run(method, lr, self.first))[:2]
        return min(finalists, key=lambda lr: self.mean(method, lr, steps))

    def search(self) -> None:
        for method in METHODS:
            lr = self.best_lr(method)
            print(f"{method.name}: {self.mean(method, lr):.4f} at {lr:g}", flush=True)

    def vary(self, methods: list[Method]) -> None:
        """At the learning rate of the method that is varied."""
        of_complex = self.best_lr(FAIRY2I_H)
        of_ternary = self.best_lr(HESTIA)
        for seed in self.seeds:
            for method in methods:
                lr = of_complex if method.quantizer is FAIRY2I_H.quantizer else of_ternary
                self.run(method, lr, seed)

    def budget(self, budgets: list[int]) -> None:
        """The same two learning rates, with other numbers of steps."""
        for steps in budgets:
            for method in METHODS[:3]:
                self.best_lr(method, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=DEMO)
    parser.add_argument("--out", default="runs/replication/small")
    parser.add_argument("--lrs", nargs="+", type=float, default=LRS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--budgets", nargs="+", type=int, help="half and twice --steps unless told")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--overrides", nargs="*", default=[], help="of the config")
    options = parser.parse_args()
    budgets = options.budgets or [options.steps // 2, 2 * options.steps]
    if wrong := [n for n in budgets if n > options.steps and n % options.steps]:
        parser.error(
            f"--budgets above --steps ({options.steps}) must be its multiples, not {wrong}"
        )
    if len(options.seeds) < 2:
        parser.error("--seeds: one for the search and at least one more")
    base = settings_of(
        options.config,
        ["run_val_every_n_steps=null", "log_every_n_steps=25", *options.overrides],
    )
    small = Small(Study(base, Path(options.out)), options.lrs, options.seeds, options.steps)
    with many_runs():
        if "search" in options.stages:
            small.search()
        if "ablations" in options.stages:
            small.vary(ablations())
        if "temperatures" in options.stages:
            small.vary(temperatures())
        if "budget" in options.stages:
            small.budget(budgets)


if __name__ == "__main__":
    main()
