"""lm-eval's tasks: found and loaded first, then run on a model, with results that JSON can hold.

lm-eval knows some fifteen thousand tasks; the YAML files in ``tasks/`` add groups of ours. A task's
rows come from the Hugging Face hub unless its YAML points to local files, so loading is where a
missing network shows. What lm-eval seeds or sets is put back afterwards, so that an evaluation in
the middle of a training run does not change the run.
"""

import contextlib
import hashlib
import importlib
import importlib.metadata
import logging
import platform
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from hestia_tune.config import nearest, one_line

if TYPE_CHECKING:
    from hestia_tune.evaluation.lm import DecoderLM

_SEED = 1234  # of few-shot draws and of whatever a task draws at random
_PACKAGES = ("hestia-tune", "torch", "torchao", "torchtune", "lm-eval", "datasets", "tokenizers")
# Names, since these classes live in packages and versions that need not be there.
_UNREACHABLE = {
    "ConnectionError",
    "LocalEntryNotFoundError",
    "OfflineModeIsEnabled",
    "Timeout",
    "TransportError",
}


def require_eval_extra() -> None:
    """Raises ImportError, with the command that installs what is missing."""
    try:
        for package in ("lm_eval", "transformers", "accelerate", "scipy"):
            importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"evaluation needs lm-eval and more; pip install 'hestia-tune[eval]' ({error})"
        ) from error


def find_tasks(include_path: str | Path | None = None) -> Any:
    """lm-eval's ``TaskManager``, which reads every task's YAML (some seconds).

    Args:
        include_path: a folder with task YAML files, which come before lm-eval's own.

    Raises:
        FileNotFoundError: naming the folder that does not exist.
    """
    from lm_eval.tasks import TaskManager

    if include_path is not None and not Path(include_path).is_dir():
        raise FileNotFoundError(
            f"include_path {include_path} is not a folder; it must hold the YAML files of tasks"
        )
    ours = Path(__file__).parent / "tasks"
    return TaskManager(include_path=[str(path) for path in (ours, include_path) if path])


def load_tasks(names: Sequence[str], manager: Any) -> list[Any]:
    """The tasks and groups of lm-eval by these names or YAML paths, their rows loaded.

    Raises:
        ValueError: on a name that is no task, group or tag, with near ones.
        ConnectionError: if rows are on a hub that cannot be reached.
    """
    for name in names:
        if name not in manager.task_index and not (name.endswith(".yaml") and Path(name).is_file()):
            raise ValueError(
                f"unknown task {name!r}{nearest(name, manager.all_tasks)}; `lm-eval ls tasks` "
                "lists all, and include_path adds a folder of your own"
            )
    loaded: list[Any] = []
    with _undisturbed():
        random.seed(_SEED)  # a task may shuffle its documents when it loads them
        for name in names:
            with hub_errors(f"the data of task {name}"):
                found = manager.load([name])
            group = found["groups"].get(name)
            loaded += found["tasks"].values() if group is None else [group]
    return loaded


def evaluate_tasks(
    lm: "DecoderLM",
    tasks: Sequence[Any],
    manager: Any,
    *,
    bootstrap_iters: int = 1000,
    **options: Any,
) -> dict[str, Any]:
    """Evaluates a model on tasks. Collective if there is a process group.

    Args:
        lm: the model and its tokenizer.
        tasks, manager: of `load_tasks` and `find_tasks`.
        bootstrap_iters: draws for the standard errors of metrics that are no means.
        options: others of ``lm_eval.simple_evaluate``: limit, num_fewshot, gen_kwargs.

    Returns:
        On every rank, JSON-ready: ``tasks`` and ``groups`` (name -> version, num_fewshot,
        num_documents, metrics -> value, stderr), ``samples`` (per-document metrics in order of
        document, with a digest of the documents), ``truncated_requests``, ``settings``,
        ``versions``.

    Raises:
        ValueError: on a request that cannot be answered.
        FloatingPointError: naming a request with NaN in its logits.
    """
    from lm_eval.evaluator import simple_evaluate

    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    lm.truncated.clear()
    with _undisturbed():
        raw = simple_evaluate(
            lm,
            tasks=list(tasks),
            task_manager=manager,
            bootstrap_iters=bootstrap_iters,
            **dict.fromkeys(seeds, _SEED),
            **options,
        )
    everyone = [(raw, lm.truncated)]
    if dist.is_initialized():  # lm-eval hands results to the first rank of a node only
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (raw if dist.get_rank() == 0 else None, lm.truncated))
    raw = everyone[0][0]
    settings = dict.fromkeys(("limit", "num_fewshot", "gen_kwargs")) | options
    settings |= {"tasks": list(raw["samples"]), "seed": _SEED, "bootstrap_iters": bootstrap_iters}
    return _digested(raw) | {
        "truncated_requests": len(set().union(*(truncated for _, truncated in everyone))),
        "settings": settings | {"world_size": len(everyone)} | lm.get_model_info(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Versions of what a result depends on; "not installed" where that is so."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _digested(raw: Mapping[str, Any]) -> dict[str, Any]:
    """lm-eval's results without the texts and the configuration dumps."""
    tasks = {
        name: {
            "version": raw["versions"].get(name),
            "num_fewshot": raw["n-shot"].get(name),
            "num_documents": raw["n-samples"][name]["effective"],
            "metrics": _metrics(raw["results"][name]),
        }
        for name in raw["samples"]
    }
    subtasks = raw.get("group_subtasks", {})
    groups = {
        name: {"metrics": metrics, "tasks": list(subtasks.get(name, []))}
        for name, found in raw.get("groups", {}).items()
        if (metrics := _metrics(found))
    }
    samples = {name: _by_document(found) for name, found in raw["samples"].items()}
    return {"tasks": tasks, "groups": groups, "samples": samples}


def _metrics(found: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """ "acc,none": 0.5, "acc_stderr,none": 0.1 -> {"acc": {"value": 0.5, "stderr": 0.1}}."""
    metrics = {}
    for key, value in found.items():
        metric, comma, rule = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = found.get(f"{metric}_stderr,{rule}")
        metrics[_metric_name(metric, rule)] = {
            "value": float(value),
            "stderr": float(stderr) if isinstance(stderr, int | float) else None,
        }
    return metrics


def _by_document(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Per-document metrics as columns in order of document."""
    columns: dict[str, dict[int, float]] = {}
    hashes = {sample["doc_id"]: sample["doc_hash"] for sample in samples}
    for sample in samples:
        for metric in sample["metrics"]:
            if isinstance(value := sample.get(metric), int | float):
                column = columns.setdefault(_metric_name(metric, sample["filter"]), {})
                column[sample["doc_id"]] = float(value)
    order = sorted(hashes)
    whole = {name: column for name, column in columns.items() if len(column) == len(order)}
    return {
        "documents": hashlib.sha256("".join(hashes[doc] for doc in order).encode()).hexdigest(),
        "metrics": {name: [column[doc] for doc in order] for name, column in whole.items()},
    }


def _metric_name(metric: str, rule: str) -> str:
    return metric if rule == "none" else f"{metric},{rule}"


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Turns a failure to reach the Hugging Face hub into one message that says what to do.

    Raises:
        ConnectionError: if the block failed for want of a network, whatever class said so.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not {k.__name__ for k in type(cause).__mro__} & _UNREACHABLE:
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise ConnectionError(
            f"{what} is on the Hugging Face hub, which cannot be reached ({one_line(cause, 160)}); "
            "get it once where there is a network (it stays in HF_HOME), or use local files: tasks "
            "by include_path, text by its path. HF_HUB_OFFLINE=1 in the environment skips the "
            "waiting for a network that is not there"
        ) from error


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Random generators are afterwards as they were. What lm-eval prints goes to stderr; its notes
    about options that do not concern us stay out, its warnings pass."""
    python, numpy_state = random.getstate(), np.random.get_state()
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.WARNING)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices), contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logger.setLevel(level)
        random.setstate(python)
        np.random.set_state(numpy_state)
