"""lm-eval's evaluator run on a model, and its results in a form that JSON can hold.

What lm-eval seeds or sets is put back afterwards, so that an evaluation in the middle of a training
run does not change the run.
"""

import glob
import hashlib
import importlib.metadata
import os
import platform
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hestia_tune.evaluation.optional import lm_eval_installed
from hestia_tune.evaluation.sharing import gather_from_ranks, rank_and_world_size
from hestia_tune.evaluation.tasks import (
    expand_groups,
    load_tasks,
    make_task_manager,
    quiet_lm_eval,
)


def evaluate_tasks(
    model: nn.Module,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    window: int,
    limit: int | float | None = None,
    num_fewshot: int | None = None,
    include_path: str | Path | Sequence[str | Path] | None = None,
    batch_size: int | str = "auto",
    cache: str | Path | None = None,
    add_bos: bool | None = None,
    gen_kwargs: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    seed: int = 1234,
    bootstrap_iters: int = 1000,
    progress: bool = True,
    task_manager: Any = None,
) -> dict[str, Any]:
    """Evaluates a model on tasks of lm-eval. Collective if there is a process group.

    Args:
        model, tokenizer, window, batch_size, add_bos, device: see `DecoderLM`.
        tasks: names of tasks, groups or tags of lm-eval, paths of task YAML files, or of `GROUPS`.
        limit: documents per task from the beginning, or a fraction of them below 1; None is all.
        num_fewshot: examples in each prompt; None is as each task says.
        include_path: folders with YAML files of tasks.
        cache: beginning of the names of lm-eval's response cache files. With it a killed run goes
            on where it was: answers are kept as they come. The names hold a digest of the model's
            outputs, so one ``cache`` serves any number of models. None keeps nothing.
        gen_kwargs: override the generation settings of tasks.
        seed: of few-shot draws and of whatever a task draws at random.
        bootstrap_iters: draws for the standard errors of metrics that are no means.
        task_manager: of `make_task_manager`, if one is at hand already; else it is made from
            ``include_path``.

    Returns:
        On every rank, JSON-ready: ``tasks`` and ``groups`` (name -> version, num_fewshot,
        num_documents, metrics -> value, stderr), ``samples`` (per-document metrics in order of
        document, with a digest of the documents), ``truncated_requests``, ``settings``,
        ``versions``.

    Raises:
        ValueError: on an unknown task, a bad limit, or a tokenizer that does not fit the model.
        ConnectionError: if a task's data is on a hub that cannot be reached.
        FloatingPointError: naming a request with NaN in its logits.
        ImportError: if lm-eval is not installed.
    """
    lm_eval_installed()
    _check_limit(limit)
    names = expand_groups(tasks)
    loaded: list[Any] = []

    manager = task_manager or make_task_manager(include_path)

    def load() -> None:
        random.seed(seed)  # a task may shuffle its documents when it loads them
        loaded.extend(load_tasks(names, manager))

    with quiet_lm_eval(), _random_state_kept():
        from lm_eval.evaluator import simple_evaluate

        from hestia_tune.evaluation.adapter import DecoderLM

        lm = DecoderLM(
            model,
            tokenizer,
            window=window,
            batch_size=batch_size,
            add_bos=add_bos,
            device=device,
            progress=progress,
        )
        gather_from_ranks(load, shared=True)
        leaves = _leaves(loaded)  # reading a task's name draws a random number
        path = None if cache is None else _open_cache(f"{cache}_{lm.fingerprint()}")
        try:
            raw = simple_evaluate(
                lm,
                tasks=loaded,
                task_manager=manager,
                num_fewshot=num_fewshot,
                limit=limit,
                batch_size=batch_size,
                use_cache=path,
                gen_kwargs=None if gen_kwargs is None else dict(gen_kwargs),
                bootstrap_iters=bootstrap_iters,
                random_seed=seed,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
            )
        finally:  # a cache that is left open keeps a thread of its own
            if lm.cache_hook.dbdict is not None:
                lm.cache_hook.dbdict.close()
    result = None
    if raw is not None:
        # Counted anew: answers that came out of the cache were not seen by the model.
        truncated = lm.truncated
        if cache is not None:
            truncated = lm.count_truncated(_instances(loaded))
        settings = {
            "tasks": list(tasks),
            "limit": limit,
            "num_fewshot": num_fewshot,
            "include_path": None if include_path is None else str(include_path),
            "batch_size": batch_size,
            "gen_kwargs": None if gen_kwargs is None else dict(gen_kwargs),
            "seed": seed,
            "bootstrap_iters": bootstrap_iters,
            "world_size": rank_and_world_size()[1],
            "device": str(lm.device),
        } | lm.get_model_info()
        result = _digested(raw, leaves) | {
            "truncated_requests": truncated,
            "settings": settings,
            "versions": versions(),
        }
    if rank_and_world_size()[1] > 1:  # lm-eval hands results to the first rank of a node only
        outcome = [result]
        dist.broadcast_object_list(outcome, src=0)
        result = outcome[0]
    return result


def versions() -> dict[str, str]:
    """Versions of what a result depends on; "not installed" where that is so."""
    found = {"python": platform.python_version()}
    for package in (
        "hestia-tune",
        "torch",
        "torchao",
        "torchtune",
        "lm-eval",
        "datasets",
        "tokenizers",
    ):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _check_limit(limit: int | float | None) -> None:
    is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
    if limit is None or (is_number and (0 < limit < 1 or (limit >= 1 and limit == int(limit)))):
        return
    raise ValueError(
        f"limit must be a whole number of documents, a fraction between 0 and 1, or null for all; "
        f"got {limit!r}"
    )


def _instances(loaded: Sequence[Any]) -> Iterator[Any]:
    """The requests of all tasks, those of groups included."""
    for one in loaded:
        for task in one.get_all_tasks() if hasattr(one, "get_all_tasks") else [one]:
            yield from task.instances


def _leaves(loaded: Sequence[Any]) -> list[str]:
    """Names of the tasks, those of groups included, in the order they were asked for."""
    groups = [one.get_all_tasks() if hasattr(one, "get_all_tasks") else [one] for one in loaded]
    return list(dict.fromkeys(task.task_name for group in groups for task in group))


def _digested(raw: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """lm-eval's results without the texts and the configuration dumps."""
    samples = {name: _by_document(raw["samples"][name]) for name in names}
    tasks = {
        name: {
            "version": raw["versions"].get(name),
            "num_fewshot": raw["n-shot"].get(name),
            "num_documents": raw["n-samples"][name]["effective"],
            "metrics": _metrics(raw["results"][name]),
        }
        for name in names
    }
    subtasks = raw.get("group_subtasks", {})
    groups = {
        name: {"metrics": metrics, "tasks": list(subtasks.get(name, []))}
        for name, found in raw.get("groups", {}).items()
        if (metrics := _metrics(found))
    }
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
    hashes: dict[int, str] = {}
    for sample in samples:
        hashes[sample["doc_id"]] = sample["doc_hash"]
        for metric in sample["metrics"]:
            value = sample.get(metric)
            if isinstance(value, int | float):
                column = columns.setdefault(_metric_name(metric, sample["filter"]), {})
                column[sample["doc_id"]] = float(value)
    order = sorted(hashes)
    digest = hashlib.sha256("".join(hashes[doc] for doc in order).encode()).hexdigest()
    return {
        "documents": digest,
        "metrics": {
            name: [column[doc] for doc in order]
            for name, column in columns.items()
            if len(column) == len(order)
        },
    }


def _metric_name(metric: str, rule: str) -> str:
    return metric if rule == "none" else f"{metric},{rule}"


def _open_cache(path: str) -> str:
    """Gives every rank what any rank has cached, and returns this rank's path for lm-eval.

    Ranks must agree on which requests are open, for these are what they share out. Files of a run
    with another number of ranks are read as well.
    """
    from sqlitedict import SqliteDict

    rank, _ = rank_and_world_size()
    mine = f"{path}.{rank}"
    # lm-eval completes the name by the number of this process on its machine.
    file = Path(f"{mine}_rank{os.environ.get('LOCAL_RANK', '0')}.db")
    file.parent.mkdir(parents=True, exist_ok=True)

    def read() -> dict[str, Any]:
        known: dict[str, Any] = {}
        for one in file.parent.glob(f"{glob.escape(Path(path).name)}.*.db"):
            with SqliteDict(str(one), flag="r") as stored:
                known |= dict(stored.items())
        return known

    merged: dict[str, Any] = {}
    for known in gather_from_ranks(read, shared=True):
        merged |= known
    with SqliteDict(str(file)) as stored:
        stored.update(merged)
        stored.commit()
    return mine


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Random generators are afterwards as they were before."""
    import numpy as np

    python, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
