"""``hestia_eval``: evaluate several models of one config and compare them in one table.

The result of each model goes to its own file as soon as the model is done. A later failure or stop
therefore loses no result. The next run reads a result from its file if everything that the result
depends on is unchanged (`hestia_tune.files`). Otherwise it evaluates the model again. The files are
in a folder beside ``eval.output``: ``evaluation/trained.json`` beside ``evaluation.json``.

The predictions of each model are compared with the predictions of the first model. This result
depends on two models, so it has a file of its own: ``evaluation/against_pretrained/trained.json``.
On a GPU the first model waits on the CPU, and its blocks are copied to the GPU one at a time.
"""

import dataclasses
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hestia_tune.bits import chosen
from hestia_tune.commands.launch import next_command
from hestia_tune.config.run_config import RunConfig
from hestia_tune.data.sequences import prefix_of
from hestia_tune.devices import get_dtype
from hestia_tune.distributed import end_process_group, on_first_rank
from hestia_tune.errors import InputError
from hestia_tune.evaluation import Evaluator, ModelResult, compare, versions
from hestia_tune.evaluation.compare import Comparison
from hestia_tune.evaluation.evaluator import PROMPTS
from hestia_tune.files import digest, kept_result, require_writable_dir, write_json
from hestia_tune.models import loading
from hestia_tune.models.loading import load_model, locate
from hestia_tune.run import join_ranks, say_choices
from hestia_tune.training.loader import calibration_batches, texts_of

log = logging.getLogger(__name__)

# Keys of the eval section that do not change the numbers of a model.
_NOT_MEASURED = ("models", "output", "every_n_steps")
_SAMPLES = 256  # samples of dataset_val that are measured if no text is named


def run_evaluation(config: RunConfig | Mapping[str, Any]) -> int:
    """Evaluate the models of the ``eval`` section one after another and print the table.

    All models and tasks are checked before the first model is loaded.

    Returns:
        The exit code.
    """
    config = chosen(RunConfig.parse(config), required=True)
    settings, path = config.eval, Path(config.eval.output)
    if path.suffix != ".json" or path.is_dir():
        raise InputError(f"eval.output must be a file whose name ends in .json; got {path}")
    results_folder = require_writable_dir(path.with_suffix(""), "eval.output")
    device = join_ranks(config.device, config.dtype)
    say_choices(config)
    dtype = get_dtype(config.dtype, device)
    sensitivity = config.sensitivity
    if sensitivity == "auto":
        sensitivity = config.sensitivity_estimation.output if config.schedule.alpha else None
    folders = {name: locate(name, config)[1] for name in settings.models}
    loading.check_model_section(config)
    on_meta = loading.plain_on_meta(config.model)
    tokenizer = loading.instantiate(config.tokenizer, "tokenizer")
    loading.check_tokenizer(tokenizer, on_meta)
    documents = _validation_documents(config, tokenizer)
    evaluator = Evaluator(settings, tokenizer, on_meta.max_seq_len, documents)
    texts = [documents, PROMPTS, *prefix_of(tokenizer)]
    identify = partial(_identity, config, device, texts, sensitivity)
    load = partial(load_model, config=config, dtype=dtype, sensitivity=sensitivity)
    comparison = _measure(evaluator, folders, results_folder, device, identify, load)
    on_first_rank(comparison.save, path, share=False)
    if dist.get_rank() == 0:
        print(f"\n{comparison.markdown()}\n\n{path} has these numbers. Next:")
        print(
            f"  {next_command('convert')}   # writes files for other programs, with these numbers"
        )
    end_process_group()
    return 0


def _measure(
    evaluator: Evaluator,
    folders: Mapping[str, Path],
    output: Path,
    device: torch.device,
    identify: Callable[..., Any],
    load: Callable[..., Any],
) -> Comparison:
    """Return the results of all models, read from their files or measured. Collective.

    A model is loaded once, and only if one of its files is missing or old.

    Args:
        evaluator: The tasks and texts.
        folders: Name -> folder of every model. The first model is the reference.
        output: The folder of the files.
        device: The device that the models run on.
        identify: Function from folders to everything that a result of these models depends on.
        load: Function from a name and a ``device`` to a model and its description.
    """
    results, distances, reference = [], {}, None
    first = next(iter(folders))
    for name, folder in folders.items():
        file = output / _file_name(name)
        pair_file = output / f"against_{_file_name(first)}".removesuffix(".json") / file.name
        identity = on_first_rank(identify, folder)
        pair = on_first_rank(identify, folder, folders[first])
        result = _kept(file, {"settings": {"identity": identity}})
        distance = {"texts": {}} if name == first else _kept(pair_file, {"identity": pair})
        if result is None or distance is None:
            model, description = load(name, device=device)
            if result is None:
                log.info(f"{name}: measuring the model, which may take minutes")
                description |= {"world_size": dist.get_world_size(), "identity": identity}
                measured = evaluator.evaluate(name, model, description, device, continues=True)
                on_first_rank(measured.save, file, share=False)
                result = dataclasses.asdict(measured)
            if distance is None:
                log.info(f"{name}: comparing its predictions with {first}")
                if reference is None:
                    reference, about = load(first, device=torch.device("cpu"))
                    if about["kind"] == "packed":  # packed tensors cannot move block by block
                        reference.to(device)
                texts = evaluator.divergence(model, reference, device)
                distance = {"identity": pair, "texts": texts}
                on_first_rank(write_json, pair_file, distance, share=False)
            del model
        results.append(ModelResult(**result))
        distances[name] = distance["texts"]
    return compare(results, distances)


def _kept(file: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the result in a file, or None if it is missing or depends on other things."""
    saved = on_first_rank(partial(kept_result, file, identity, overwrite=True))
    if saved is not None:
        log.info(f"measured before, in {file}")
    return saved


def _validation_documents(config: RunConfig, tokenizer: Any) -> dict[str, list[str]]:
    """Return samples of ``dataset_val`` as a text, if ``eval.perplexity`` names no text.

    Args:
        config: The run's config.
        tokenizer: The run's tokenizer.

    Returns:
        The name "dataset_val" -> documents. Empty if there is no such dataset, or if it cannot be
        read. A warning says why.
    """
    if config.eval.perplexity or config.dataset_val is None:
        return {}
    try:
        batches = calibration_batches(config, tokenizer, _SAMPLES, 1, key="dataset_val")
    except InputError as error:
        log.warning(f"no text is measured: {error}")
        return {}
    texts = texts_of(batches, tokenizer)
    return {"dataset_val": texts} if any(texts) else {}


def _identity(
    config: RunConfig,
    device: torch.device,
    texts: Sequence[Any],
    *paths: str | Path | None,
) -> dict[str, Any]:
    """Return everything that a result depends on, as plain values for JSON.

    Args:
        config: The run's config.
        device: The device that the model runs on.
        texts: The texts that are no files: of ``dataset_val``, prompts, and what begins windows.
        paths: The files and folders of the models. None is skipped.
    """
    settings = dataclasses.asdict(config.eval)
    sources = [text["source"] for text in settings["perplexity"].values()]
    roots = [*paths, settings["include_path"], *settings["tasks"], *sources]
    inputs = [path for root in roots if root for path in (Path(root), *Path(root).rglob("*"))]
    files = [(str(path), path.stat()) for path in sorted(inputs) if path.is_file()]
    return {
        **{key: getattr(config, key) for key in ("model", "quantizer", "tokenizer", "dtype")},
        "eval": {key: value for key, value in settings.items() if key not in _NOT_MEASURED},
        "device": str(device),
        "versions": versions(),
        "texts": digest(texts),
        "files": digest([(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]),
    }


def _file_name(model: str) -> str:
    """Return a file name for the result of a model. The model's name may be a path."""
    safe = re.sub(r"[^\w.-]", "_", model, flags=re.ASCII)[-60:]
    return f"{safe}.json" if safe == model else f"{safe}-{digest(model)}.json"
