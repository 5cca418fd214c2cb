"""``hestia_eval``: evaluate several models of one config and compare them in one table.

The result of each model goes to its own file as soon as the model is done. A later failure or stop
therefore loses no result. The next run reads a result from its file if everything that the result
depends on is unchanged (`hestia_tune.cache`). Otherwise it evaluates the model again. The files are
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

# Keys of the eval section that do not change the numbers of a model.
_NOT_MEASURED = ("models", "output", "every_n_steps", "at_end")


def run_evaluation(config: RunConfig | Mapping[str, Any]) -> int:
    """Evaluate the models of the ``eval`` section one after another and print the table.

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
    tokenizer = build.instantiate(config.tokenizer, "tokenizer")
    build.check_tokenizer(tokenizer, on_meta)
    evaluator = Evaluator(settings, tokenizer, on_meta.max_seq_len)

    results = []
    for name, folder in folders.items():
        file = results_folder / _file_name(name)
        identity: Any = on_first_rank(_identity, config, device, folder, sensitivity)
        expected = {"settings": {"identity": identity}}
        saved = on_first_rank(partial(cache.kept, file, expected, overwrite=True))
        if saved is not None:
            log.info(f"{name}: read the result from {file}")
            results.append(ModelResult(**saved))
            continue
        log.info(f"{name}: evaluating the model")
        options = {"device": device, "dtype": dtype, "sensitivity": sensitivity}
        model, description = load_model(name, config, **options)
        description |= {"world_size": dist.get_world_size(), "identity": identity}
        results.append(evaluator.evaluate(name, model, description, device))
        del model
        on_first_rank(results[-1].save, file, share=False)
    comparison = compare(results)
    on_first_rank(comparison.save, path, share=False)
    if dist.get_rank() == 0:
        print(f"\n{comparison.markdown()}\n\n{path}")
    end_process_group()
    return 0


def _identity(config: RunConfig, device: torch.device, *paths: str | Path | None) -> dict[str, Any]:
    """Return everything that the result of one model depends on, as plain values for JSON.

    Args:
        config: The run's config.
        device: The device that the model runs on.
        paths: The files and folders of the model. None is skipped.
    """
    settings = dataclasses.asdict(config.eval)
    texts = [text["source"] for text in settings["perplexity"].values()]
    roots = [*paths, settings["include_path"], *settings["tasks"], *texts]
    inputs = [path for root in roots if root for path in (Path(root), *Path(root).rglob("*"))]
    files = [(str(path), path.stat()) for path in sorted(inputs) if path.is_file()]
    return {
        **{key: getattr(config, key) for key in ("model", "quantizer", "tokenizer", "dtype")},
        "eval": {key: value for key, value in settings.items() if key not in _NOT_MEASURED},
        "device": str(device),
        "versions": versions(),
        "files": cache.digest([(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]),
    }


def _file_name(model: str) -> str:
    """Return a file name for the result of a model. The model's name may be a path."""
    safe = re.sub(r"[^\w.-]", "_", model, flags=re.ASCII)[-60:]
    return f"{safe}.json" if safe == model else f"{safe}-{cache.digest(model)}.json"
