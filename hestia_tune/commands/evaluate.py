"""``hestia_eval``: evaluates several models of one config and compares them in one table.

Each model's result is written to a file of its own as soon as the model is done, so a later failure
or a stop loses nothing. The next run takes a result from its file if everything that its numbers
depend on is the same (`hestia_tune.cache`), and otherwise evaluates the model again. The files are
in a folder beside ``eval.output``: ``evaluation/trained.json`` beside ``evaluation.json``.
"""

import dataclasses
import logging
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtune import training

from hestia_tune import cache
from hestia_tune.config.run import RunConfig
from hestia_tune.distributed import end_process_group, on_first_rank
from hestia_tune.errors import InputError
from hestia_tune.evaluation import Evaluator, ModelResult, compare, versions
from hestia_tune.files import require_writable_dir
from hestia_tune.models import build
from hestia_tune.models.load import load_model, locate
from hestia_tune.training.plan import join_ranks

log = logging.getLogger(__name__)

# Keys of the eval section that do not change a model's numbers.
_NOT_MEASURED = ("models", "output", "every_n_steps", "at_end")


def run_evaluation(config: RunConfig | Mapping[str, Any]) -> int:
    """Evaluate the models of the ``eval`` section one after the other and print the table.

    All models and tasks are checked before the first model is loaded.

    Returns:
        The exit code.
    """
    config = RunConfig.parse(config)
    settings, path = config.eval, Path(config.eval.output)
    if path.suffix != ".json" or path.is_dir():
        raise InputError(f"eval.output must be a file whose name ends in .json; got {path}")
    results_folder = require_writable_dir(path.with_suffix(""))
    device = join_ranks(config.device, config.dtype)
    dtype = training.get_dtype(config.dtype, device)
    sensitivity = config.sensitivity
    if sensitivity == "auto":
        sensitivity = config.sensitivity_estimation.output if config.schedule.alpha else None
    folders = {name: locate(name, config)[1] for name in settings.models}
    build.check_model_section(config)
    on_meta = build.plain_on_meta(config.model)
    tokenizer = build.make_tokenizer(config.tokenizer, on_meta)
    evaluator = Evaluator(settings, tokenizer, on_meta.max_seq_len)

    results = []
    for name, folder in folders.items():
        file = results_folder / _file_name(name)
        identity: Any = on_first_rank(partial(_identity, config, device, folder, sensitivity))
        expected = {"settings": {"identity": identity}}
        found = on_first_rank(partial(cache.kept, file, expected, overwrite=True))
        log.info(f"{name}: {'evaluating it' if found is None else f'read from {file}'}")
        if found is not None:
            results.append(ModelResult(**found))
            continue
        options = {"device": device, "dtype": dtype, "sensitivity": sensitivity}
        model, description = load_model(name, config, **options)
        description |= {"world_size": dist.get_world_size(), "identity": identity}
        results.append(evaluator.evaluate(name, model, description, device))
        del model
        on_first_rank(partial(results[-1].save, file), share=False)
    comparison = compare(results)
    on_first_rank(partial(comparison.save, path), share=False)
    if dist.get_rank() == 0:
        print(f"\n{comparison.markdown()}\n\n{path}")
    end_process_group()
    return 0


def _identity(config: RunConfig, device: torch.device, *paths: str | Path | None) -> dict[str, Any]:
    """Return what the numbers of one model depend on, as plain values for JSON.

    Args:
        config: The config that is evaluated.
        device: The device that the model runs on.
        paths: The model's files and folders. None is skipped.
    """
    settings = dataclasses.asdict(config.eval)
    texts = [text["source"] for text in settings["perplexity"].values()]
    roots = [*paths, settings["include_path"], *settings["tasks"], *texts]
    found = [path for root in roots if root for path in (Path(root), *Path(root).rglob("*"))]
    files = [(str(path), path.stat()) for path in sorted(found) if path.is_file()]
    return {
        **{key: getattr(config, key) for key in ("model", "quantizer", "tokenizer", "dtype")},
        "eval": {key: value for key, value in settings.items() if key not in _NOT_MEASURED},
        "device": str(device),
        "versions": versions(),
        "files": cache.digest([(name, s.st_size, s.st_mtime_ns) for name, s in files]),
    }


def _file_name(model: str) -> str:
    """Return a file name for the result of a model, which may be given as a path."""
    safe = re.sub(r"[^\w.-]", "_", model, flags=re.ASCII)[-60:]
    return f"{safe}.json" if safe == model else f"{safe}-{cache.digest(model)}.json"
