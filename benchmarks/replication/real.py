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
import logging
from pathlib import Path

import torch
from common import METHODS, Study, settings_of, slug
from omegaconf import OmegaConf
from torch import distributed as dist

from hestia_tune.training.evaluation import EvaluationRecipe

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
    logging.disable(logging.INFO)
    torch._dynamo.config.recompile_limit = 64
    base = settings_of(options.config, [f"max_steps={options.steps}", *options.overrides])
    window = {"window": base.dataset.seq_len}
    texts = {name: window | text for name, text in map(text_of, options.texts)}
    out = Path(options.out)
    study = Study(base, out)
    folders = []
    for method in METHODS:
        if method.name not in options.methods:
            continue
        quantizer = dict(method.quantizer)
        if "group_size" in quantizer:  # 64 where 128 does not divide the model
            quantizer["group_size"] = base.quantizer.get("group_size", quantizer["group_size"])
        curvature = method.curvature and options.curvature
        method = dataclasses.replace(method, quantizer=quantizer, curvature=curvature)
        changes = {} if options.lr is None else {"optimizer__lr": options.lr}
        study.run(method, f"steps{options.steps}", **changes)
        folders.append(str(study.folder(method, f"steps{options.steps}") / "hard_model"))
    if texts or options.tasks:
        evaluation = {
            "models": ["pretrained", "naive", *folders],
            "tasks": options.tasks,
            "include_path": options.tasks_path,
            "limit": options.limit,
            "perplexity": texts,
            "output": str(out / f"evaluation_{slug(options.config)}.json"),
        }
        cfg = OmegaConf.merge(base, {"output_dir": str(out / "evaluation"), "eval": evaluation})
        print(EvaluationRecipe(cfg).run().markdown())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
