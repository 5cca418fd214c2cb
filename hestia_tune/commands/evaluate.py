"""``hestia_eval``: several models of one config, one table.

What a model did is on disk as soon as it is done. Another run on files that have not changed since
takes it from there, and adds tasks and texts to it; results by other settings (another limit,
another model in its place) move to ``others`` of the same file, and come back when asked for.
"""

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from omegaconf import OmegaConf
from torchtune import training, utils

from hestia_tune.distributed import end_process_group, on_first_rank
from hestia_tune.evaluation import Evaluator, ModelResult, compare, versions
from hestia_tune.files import read_json, require_writable_dir
from hestia_tune.models import build
from hestia_tune.models.load import load_model, locate
from hestia_tune.training.base import join_ranks
from hestia_tune.training.options import Run

log = utils.get_logger("DEBUG")

# Keys of the eval section that no number depends on, and those that add numbers to others.
_NOT_MEASURED = ("models", "output", "every_n_steps", "at_end", "tasks", "perplexity")


def run_evaluation(run: Run) -> int:
    """Evaluates the models of the ``eval`` section one after the other; returns the exit code.

    All models and tasks are checked before any is loaded.
    """
    run = Run.of(run)
    cfg, options, settings = run.cfg, run.options, run.options.eval
    path = Path(settings.output)
    require_writable_dir(path.parent)
    if path.is_dir():
        raise ValueError(f"eval.output {path} is a folder; give the path of a JSON file")
    device = join_ranks(options.device, options.dtype)
    dtype = training.get_dtype(options.dtype, device)
    sensitivity = options.sensitivity
    if sensitivity == "auto":
        sensitivity = options.sensitivity_estimation.output if options.schedule.alpha else None
    folders = {name: locate(name, cfg)[1] for name in settings.models}
    on_meta = build.plain_on_meta(cfg.model)
    tokenizer = build.make_tokenizer(cfg.tokenizer, on_meta)
    evaluator = Evaluator(settings, tokenizer, on_meta.max_seq_len)
    given: Any = OmegaConf.to_container(cfg, resolve=True)
    common = {key: given[key] for key in ("model", "quantizer", "tokenizer", "dtype")}
    common["eval"] = {k: value for k, value in given["eval"].items() if k not in _NOT_MEASURED}
    common |= {"device": str(device), "versions": versions()}

    def on_disk() -> tuple[dict[str, dict], dict[str, Any], dict[str, ModelResult], list]:
        """What each model's numbers depend on, what is asked of all, the numbers of earlier runs
        that still hold, and the other ones."""
        inputs = [settings.include_path, sensitivity]
        times = {name: _last_change([folder, *inputs]) for name, folder in folders.items()}
        runs = {name: common | {"changed": time} for name, time in times.items()}
        asked: dict[str, Any] = {f"task {task}": _last_change([task]) for task in settings.tasks}
        for name, text in settings.perplexity.items():
            asked[f"text {name}"] = [dataclasses.asdict(text), _last_change([text.source])]
        try:
            saved = read_json(path)
            models = [ModelResult(**one) for one in [*saved["models"].values(), *saved["others"]]]
        except (OSError, ValueError, KeyError, TypeError):
            models = []
        hold = {one.name: one for one in models if one.settings.get("run") == runs.get(one.name)}
        return runs, asked, hold, [one for one in models if one is not hold.get(one.name)]

    runs, asked, results, others = cast(tuple, on_first_rank(on_disk))
    for name in settings.models:
        earlier = results.get(name)
        done = earlier is not None and asked.items() <= earlier.settings["asked"].items()
        utils.log_rank_zero(log, f"{name}: as found" if done else f"evaluating {name}")
        if not done:
            model, facts = load_model(
                name, cfg, device=device, dtype=dtype, sensitivity=sensitivity
            )
            facts |= {"world_size": dist.get_world_size(), "run": runs[name], "asked": asked}
            results[name] = evaluator.evaluate(name, model, facts, device).joined(earlier)
            del model
        comparison = compare([results[one] for one in settings.models if one in results])
        rest = others + [one for key, one in results.items() if key not in comparison.models]
        on_first_rank(functools.partial(comparison.save, path, rest), share=False)
    if dist.get_rank() == 0:
        print(f"\n{comparison.markdown()}\n\n{path}")
    end_process_group()
    return 0


def _last_change(paths: Iterable[str | Path | None]) -> float:
    """When any of these files, or of the files in these folders, was written last."""
    given = [Path(path) for path in paths if path]
    files = [file for path in given for file in (path, *path.rglob("*")) if file.is_file()]
    return max((file.stat().st_mtime for file in files), default=0.0)
