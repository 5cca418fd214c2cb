r"""A pretrained model at equal tokens: straight-through, uniform, Hestia and Fairy2i-H.

    python benchmarks/replication/real.py --config smollm2_135m --steps 1000 --curvature fisher \
        --texts validation=validation.parquet,column=text other=test.txt \
        --tasks arc_easy arc_challenge hellaswag piqa winogrande \
        --overrides checkpointer.checkpoint_dir=DIR dataset.source=parquet \
        dataset.data_files=train.parquet dataset.split=train dataset.column=text

Every run leaves its record as soon as it is done, and is not made again. Then one evaluation of
all: perplexity on the held-out ``--texts``, in windows of the training's length, and zero-shot
``--tasks``, each against the pretrained model, naive ternarization among them.
"""

import argparse
import dataclasses
from pathlib import Path

from common import METHODS, Study, many_runs, settings_of, slug
from omegaconf import DictConfig, OmegaConf

from hestia_tune.commands.evaluate import run_evaluation

NAMES = ("straight-through", "Hestia, uniform", "Hestia", "Fairy2i-H")


def text_of(entry: str) -> tuple[str, dict[str, str]]:
    """``NAME=SOURCE[,key=value...]`` as an entry of ``eval.perplexity``."""
    name, _, rest = entry.partition("=")
    source, *options = rest.split(",")
    if not source:
        raise ValueError(f"--texts takes NAME=SOURCE[,key=value...]; got {entry!r}")
    return name, {"source": source} | OmegaConf.to_container(OmegaConf.from_dotlist(options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="smollm2_135m")
    parser.add_argument("--out", default="runs/replication/real")
    parser.add_argument("--methods", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, help="of all methods; the config's unless told")
    parser.add_argument("--curvature", choices=("hessian", "fisher"), default="hessian")
    parser.add_argument("--texts", nargs="*", default=[], metavar="NAME=SOURCE[,key=value]")
    parser.add_argument("--tasks", nargs="*", default=[])
    parser.add_argument("--tasks-path", help="folder with YAML files of tasks of your own")
    parser.add_argument("--limit", type=int, help="documents of each task")
    parser.add_argument("--overrides", nargs="*", default=[], help="of the config")
    options = parser.parse_args()
    base = settings_of(options.config, [f"max_steps={options.steps}", *options.overrides])
    window = {"window": base.dataset.seq_len}
    texts = {name: window | text for name, text in map(text_of, options.texts)}
    with many_runs():
        train_and_compare(options, base, texts)


def train_and_compare(options: argparse.Namespace, base: DictConfig, texts: dict) -> None:
    """Trains every method that is not done, then evaluates all models together."""
    out = Path(options.out)
    study, label = Study(base, out), f"steps{options.steps}"
    changes = {} if options.lr is None else {"optimizer__lr": options.lr}
    folders = []
    for method in METHODS:
        if method.name not in options.methods:
            continue
        curvature = method.curvature and options.curvature
        method = dataclasses.replace(method.fitted(base), curvature=curvature)
        study.run(method, label, **changes)
        folders.append(str(study.folder(method, label) / "hard_model"))
    if not (texts or options.tasks):
        return
    evaluation = {
        "models": ["pretrained", "naive", *folders],
        "tasks": options.tasks,
        "include_path": options.tasks_path,
        "limit": options.limit,
        "perplexity": texts,
        "output": str(out / f"evaluation_{slug(options.config)}.json"),
    }
    cfg = OmegaConf.merge(base, {"output_dir": str(out / "evaluation"), "eval": evaluation})
    run_evaluation(cfg)


if __name__ == "__main__":
    main()
