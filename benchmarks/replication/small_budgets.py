r"""What each part of a small budget is worth: alone, together, over seeds; and how to reconstruct.

    OMP_NUM_THREADS=1 python benchmarks/replication/small_budgets.py --out runs/small_budgets

Stage ``parts``: straight-through and Hestia; then Hestia with distillation, a learned scale, a hard
tail, a reconstruction before. All train on the same tokens; the table has the seconds of each (with
those of its reconstruction and its sensitivity), and ``--steps`` sets a budget. Stage ``scales``:
where the scales start, as a share of the scale with the least squared error, and whether they are
learned or follow mean|w| (``--config demo --steps 360``, and 1000 steps). Stage
``reconstruction``: with and without temperature, windows, numbers of sequences, and what follows
the windows. Stage ``systems``: the paper's ternary systems, in the windows and then all blocks
together towards the pretrained predictions. All are told as hard validation losses, mean and
deviation over ``--seeds``. What is done is kept: a stopped study goes on (the seconds of a row that
was stopped are those since then). ``--config`` and ``--overrides`` take another model than the
demo's, and its data.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from common import DEMO, HARD, many_runs, require_same, settings_of, slug
from omegaconf import OmegaConf

from hestia_tune.config.run_config import RunConfig
from hestia_tune.files import write_atomically
from hestia_tune.run import Run
from hestia_tune.stages import measure_sensitivity, reconstruct
from hestia_tune.torchtune.recipe import HestiaQATRecipe
from hestia_tune.training.outputs import RECONSTRUCTED

STRAIGHT_THROUGH = ["schedule.rho=0", "schedule.tau_init=0", "schedule.alpha=0", "sensitivity=null"]
UNIFORM = ["schedule.alpha=0", "sensitivity=null"]
DISTILLED = ["distillation.weight=1"]
LEARNED = ["quantizer.scale=learned", "quantizer.start=least_squares", "quantizer.scale_lr=1e-2"]
TAIL = ["schedule.hard_fraction=0.2"]
AFTER = ["reconstruction=auto", *UNIFORM, "schedule.rho=0", "schedule.tau_init=0.1", *TAIL]
PARTS = {
    "straight-through": STRAIGHT_THROUGH,
    "straight-through + distillation": [*STRAIGHT_THROUGH, *DISTILLED],
    "Hestia": UNIFORM,
    "Hestia + sensitivity": [],
    "Hestia + distillation": [*UNIFORM, *DISTILLED],
    "Hestia + learned scale": [*UNIFORM, *LEARNED],
    "Hestia + tail": [*UNIFORM, *TAIL],
    "Hestia + distillation + tail": [*UNIFORM, *DISTILLED, *TAIL],
    "Hestia + distillation + learned scale": [*UNIFORM, *DISTILLED, *LEARNED],
    "reconstruction": AFTER,
    "reconstruction, learned scale": [*AFTER, *LEARNED],
    "reconstruction, then distillation": [*AFTER, *DISTILLED],
    "reconstruction, then distillation, learned scale": [*AFTER, *DISTILLED, *LEARNED],
}
RECONSTRUCTIONS = {
    "AbsMean scale": [],
    "AbsMean scale, straight-through": ["reconstruct.tau_init=0"],
    "learned scale": LEARNED,
    "learned scale, straight-through": [*LEARNED, "reconstruct.tau_init=0"],
    "learned scale and threshold": [*LEARNED, "quantizer.threshold=learned"],
    "learned scale, threshold, offset": [
        *LEARNED,
        "quantizer.threshold=learned",
        "quantizer.offset=learned",
    ],
    "learned scale, windows of 2": [*LEARNED, "reconstruct.window=2"],
    "learned scale, windows of 4": [*LEARNED, "reconstruct.window=4"],
    "learned scale, tau_init 0.15": [*LEARNED, "reconstruct.tau_init=0.15"],
    "learned scale, batches of 4": [*LEARNED, "reconstruct.batch_size=4"],
    **{
        f"learned scale, then {n} blocks towards predictions": [
            *LEARNED,
            f"reconstruct.kl_blocks={n}",
            "reconstruct.kl_epochs=4",
        ]
        for n in (1, 2, 4)
    },
    **{
        f"learned scale, {n} sequences": [*LEARNED, f"reconstruct.num_samples={n}"]
        for n in (16, 64, 256, 1024)
    },
}
WHOLE = ["reconstruct.kl_blocks=1000", "reconstruct.kl_rate=0.2"]


def system(component: str, start: str | None = None) -> list[str]:
    """A straight-through method in Hestia's place. Its parameters, if it has a start, are steps of
    the size of weights, where Hestia's are factors: 1e-3 moves both by about 1% a step."""
    own = [] if start is None else [f"quantizer.start={start}", "reconstruct.parameter_lr=1e-3"]
    return [*STRAIGHT_THROUGH, f"quantizer._component_=hestia_tune.{component}", *WHOLE, *own]


SYSTEMS = {
    "AbsMean": system("AbsMean"),
    "TWN": system("TWN"),
    "Tequila": system("Tequila"),
    "LSQ, absmax": system("LSQ", "absmax"),
    "LSQ, least squares": system("LSQ", "least_squares"),
    "SEQ, ternary, absmax": system("SEQ", "absmax"),
    "SEQ, ternary, least squares": system("SEQ", "least_squares"),
    "DLT, absmax": system("DLT", "absmax"),
    "DLT, least squares": system("DLT", "least_squares"),
    "Hestia": [*UNIFORM, *WHOLE],
    "Hestia, learned scale, straight-through": [
        *(*UNIFORM, *LEARNED, *WHOLE),
        "reconstruct.tau_init=0",
    ],
    "Hestia, learned scale": [*UNIFORM, *LEARNED, *WHOLE],
}
TAUGHT = [*UNIFORM, *DISTILLED]
FOUR = [*TAUGHT, "quantizer._component_=hestia_tune.TwoBit"]
OWN_RATE = ["quantizer.scale=learned", "quantizer.scale_lr=1e-2"]
SCALES = {
    "ternary, AbsMean": TAUGHT,
    "ternary, learned from AbsMean": [*TAUGHT, *OWN_RATE],
    "ternary, learned from least squares": [*TAUGHT, *LEARNED],
    **{f"four levels, {s}": [*FOUR, f"quantizer.start={s}"] for s in (0.65, 0.75, 0.85, 1.0)},
    **{
        f"four levels, learned from {s}": [*FOUR, *OWN_RATE, f"quantizer.start={s}"]
        for s in (0.75, 1.0)
    },
}
STAGES = {
    "parts": PARTS,
    "scales": SCALES,
    "reconstruction": RECONSTRUCTIONS,
    "systems": SYSTEMS,
}


def one_run(folder: Path, config: str, overrides: list[str], *, trains: bool) -> dict[str, Any]:
    """The record of a run, from its file if it was made before."""
    path = folder / "record.json"
    cfg = settings_of(config, overrides)
    settings: Any = OmegaConf.to_container(cfg)
    if path.is_file():
        record = json.loads(path.read_text(encoding="utf-8"))
        require_same(record["settings"], settings, path)
        return record
    run = RunConfig.parse(OmegaConf.merge(cfg, {"output_dir": str(folder)}))
    started = time.perf_counter()
    if not trains or run.reconstruction == "auto":
        first = reconstruct(Run.of(run))
        if not first.finished:
            raise KeyboardInterrupt
        losses = first.losses
        run = run.changed(reconstruction=str(first.output))
    if trains:
        if run.sensitivity == "auto":
            measure_sensitivity(Run.of(run))
            run = run.changed(sensitivity=run.sensitivity_estimation.output)
        recipe = HestiaQATRecipe(run)
        recipe.setup(recipe.config)
        recipe.train()
        if not recipe.finished:
            raise KeyboardInterrupt
        losses = recipe.validation_losses
        recipe.release()
    seconds = round(time.perf_counter() - started, 1)
    record = {"settings": settings, "validation_loss": losses, "seconds": seconds}
    write_atomically(path, json.dumps(record, indent=1) + "\n")
    return record


def table(rows: dict[str, list[dict[str, Any]]], label: str) -> str:
    """Hard losses over seeds, mean and standard deviation, and mean seconds."""
    lines = ["| | hard validation loss | seconds |", "|---|---:|---:|"]
    for name, records in rows.items():
        losses = [record["validation_loss"][label] for record in records]
        spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        seconds = statistics.mean(record["seconds"] for record in records)
        lines.append(f"| {name} | {statistics.mean(losses):.4f}{spread} | {seconds:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=DEMO)
    parser.add_argument("--out", type=Path, default=Path("runs/replication/small_budgets"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--stages", nargs="+", default=[*STAGES], choices=STAGES)
    parser.add_argument("--rows", nargs="+", help="only these")
    parser.add_argument("--overrides", nargs="*", default=[], help="of the config")
    options = parser.parse_args()
    if unknown := set(options.rows or ()) - {name for s in options.stages for name in STAGES[s]}:
        parser.error(f"--rows {unknown}: no such rows in these stages")
    if settings_of(options.config, options.overrides).get("dataset_val") is None:
        parser.error(f"{options.config} has no dataset_val to measure on; give one in --overrides")
    # Enough passes over the demo's text for any number of steps.
    common = [f"max_steps={options.steps}", "max_steps_per_epoch=null", "epochs=100"]
    common += ["run_val_every_n_steps=null"]
    with many_runs():
        for stage in options.stages:
            trains = stage in ("parts", "scales")
            rows: dict[str, list[dict[str, Any]]] = {}
            for seed in options.seeds:
                for name, part in STAGES[stage].items():
                    if options.rows and name not in options.rows:
                        continue
                    folder = options.out / stage / slug(name) / f"seed{seed}"
                    overrides = [*common, *part, f"seed={seed}", *options.overrides]
                    record = one_run(folder, options.config, overrides, trains=trains)
                    rows.setdefault(name, []).append(record)
                    print(f"{stage}, {name}, seed {seed}: {record['validation_loss']}", flush=True)
            print(f"\n{table(rows, HARD if trains else RECONSTRUCTED)}\n", flush=True)


if __name__ == "__main__":
    main()
