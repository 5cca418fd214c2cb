"""What an ``eval`` section measures, read and checked once, then applied to any number of models.

**Tasks.** lm-eval knows some fifteen thousand tasks. The YAML files in ``tasks/`` add groups.
The rows of a task come from the Hugging Face hub unless its YAML names local files, so a missing
network shows when tasks are loaded. What lm-eval seeds or sets is restored afterwards, so an
evaluation in the middle of a training run does not change the run.

**Perplexity**, by sliding windows. The tokens of a document follow one prefix token and are cut
into windows of at most ``window`` inputs. The first window scores all of its tokens. Each later
window moves by ``stride`` (the last one by what is left) and scores the new tokens, each after
at least ``window - stride + 1`` others. ``stride = window`` is cheapest and is what lm-eval
does. A smaller stride costs ``window / stride`` times as much. Published perplexities depend on
these choices. Per word and per byte they can be compared across tokenizers.
"""

import contextlib
import hashlib
import logging
import math
import platform
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hestia_tune.config import EvalConfig, TextConfig, nearest, require_number
from hestia_tune.distributed import on_first_rank
from hestia_tune.errors import InputError
from hestia_tune.evaluation.compare import ModelResult, compare
from hestia_tune.models.folder import import_optional

_FILES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}


def perplexity(
    lm: Any,
    documents: Sequence[str],
    window: int,
    stride: int | None = None,
    max_tokens: int | None = None,
) -> dict[str, float]:
    """Perplexity of ``documents``, each by itself. Collective if there is a process group.

    Args:
        lm: a `DecoderLM`; the prefix is its BOS, or EOS if there is none, and no other special
            token is put in.
        window: inputs per forward, at most those of ``lm``.
        stride: at most ``window``, which None is.
        max_tokens: score only the first so many tokens; words and bytes are then those of the
            text that these tokens decode to.

    Returns:
        On every rank, JSON-ready: ``nll``, the summed negative log-likelihood in nats of
        ``tokens`` (without the prefixes); their ``words`` (pieces between runs of whitespace, as
        lm-eval counts them) and ``bytes`` (in UTF-8); ``documents`` (with at least one token);
        ``window`` and ``stride``, in tokens; ``token_perplexity``, ``word_perplexity``,
        ``byte_perplexity`` and ``bits_per_byte``.

    Raises:
        InputError: on a window that is too long.
        NotFiniteError: naming a text with NaN in its logits.
    """
    require_number("window", window, 1, lm.max_length)
    stride = stride or window
    texts, tokenized, left = [], [], math.inf if max_tokens is None else max_tokens
    for text in documents:
        ids = lm.tok_encode(text, add_special_tokens=False)
        if len(ids) > left:
            ids = ids[: int(left)]
            text = lm.tok_decode(ids)
        if ids:
            texts.append(text)
            tokenized.append(ids)
            left -= len(ids)
        if not left:
            break
    nll = -math.fsum(lm.rolling(tokenized, window, stride))
    tokens = sum(map(len, tokenized))
    words = sum(len(re.split(r"\s+", text)) for text in texts)
    num_bytes = sum(len(text.encode("utf-8")) for text in texts)
    # In tensors, since a large one is infinite, not an error.
    means = torch.tensor([nll / tokens, nll / words, nll / num_bytes], dtype=torch.float64)
    per_token, per_word, per_byte = means.exp().tolist()
    return {
        "nll": nll,
        "tokens": tokens,
        "words": words,
        "bytes": num_bytes,
        "documents": len(texts),
        "window": window,
        "stride": stride,
        "token_perplexity": per_token,
        "word_perplexity": per_word,
        "byte_perplexity": per_byte,
        "bits_per_byte": nll / num_bytes / math.log(2),
    }


def read_documents(text: TextConfig) -> list[str]:
    """A text file as one document; the rows of a parquet, JSON or CSV file, or of a dataset.

    Raises:
        InputError: if the file does not exist; or if the dataset is on a hub that cannot be
            reached.
        InputError: if there is no such column or split, or what is read is no text.
    """
    import datasets

    path, column = Path(text.source), text.column
    is_file = path.is_absolute() or path.suffix in (".txt", ".md", *_FILES)
    if is_file and not path.exists():
        raise InputError(f"{path} does not exist; check the path")
    if path.is_file() and path.suffix not in _FILES:
        try:
            found = [path.read_bytes().decode("utf-8")]
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8 ({error}); convert it") from None
    else:
        options: Any = {"path": text.source, "name": text.name, "split": text.split}
        if path.is_file():
            kind = _FILES[path.suffix]
            options = {"path": kind, "data_files": text.source, "split": "train"}
        rows = datasets.load_dataset(**options)
        if column not in rows.column_names:
            raise InputError(f"{path} has no column {column!r}; it has {rows.column_names}")
        found = rows[column][:]
    if not any(found) or not all(isinstance(one, str) for one in found):
        raise InputError(f"{path} (column {column!r}) holds no text, or what is not text; check it")
    return found if text.join is None else [text.join.join(found)]


_SEED = 1234  # of few-shot draws and of whatever a task draws at random
_PACKAGES = ("hestia-tune", "torch", "torchao", "torchtune", "lm_eval", "datasets", "tokenizers")
_KEPT = ("results", "group_subtasks", "versions", "n-shot", "n-samples")
# Longer windows change a perplexity little and cost much.
_PERPLEXITY_WINDOW = 2048


class Evaluator:
    """Tasks and texts, loaded before any model is.

    Args:
        settings: the ``eval`` section.
        tokenizer: the config's, of torchtune's form.
        max_seq_len: the model's longest input.

    Raises:
        InputError: on tasks or texts that are not there, or if a package is missing; the message
            then names the command that installs it.
    """

    def __init__(self, settings: EvalConfig, tokenizer: Any, max_seq_len: int):
        self._lm = import_optional("hestia_tune.evaluation.lm", "eval").DecoderLM
        self.settings, self.tokenizer = settings, tokenizer
        self.window = max_seq_len
        self._texts, self._tasks = {}, None
        try:
            for name, text in settings.perplexity.items():
                window = min(self.window, text.window or _PERPLEXITY_WINDOW)
                stride = text.stride or window
                require_number(f"eval.perplexity.{name}.stride", stride, 1, window)
                self._texts[name] = (read_documents(text), window, stride, text.max_tokens)
            if settings.tasks:
                self._tasks = load_tasks(settings.tasks, find_tasks(settings.include_path))
        except ConnectionError as error:
            raise InputError(
                f"the Hugging Face hub cannot be reached ({error}); get the data once with a "
                "network (it stays in HF_HOME), or use local files (include_path, a text's path)"
            ) from error

    @torch.no_grad()
    def evaluate(
        self, name: str, model: nn.Module, description: Mapping[str, Any], device: torch.device
    ) -> ModelResult:
        """Run the tasks and measure the texts on one model. Collective.

        Args:
            name: The model's column in the table.
            model: A decoder as `DecoderLM` takes it.
            description: What the model is. The result keeps it as its ``settings``.
            device: The device of the model.

        Returns:
            The result, which is the same on every rank.
        """
        settings = self.settings
        with plain_outputs(model):
            size = {"window": self.window, "batch_size": settings.batch_size}
            lm = self._lm(model, self.tokenizer, device=device, **size)
            limit = settings.limit
            tasks = evaluate_tasks(lm, self._tasks, limit=limit) if settings.tasks else None
            texts = {label: perplexity(lm, *text) for label, text in self._texts.items()}
        return ModelResult(name=name, tasks=tasks, perplexity=texts, settings=description)


def find_tasks(include_path: str | None = None) -> Any:
    """lm-eval's ``TaskManager`` (some seconds); tasks of a folder come before those of one name."""
    from lm_eval.tasks import TaskManager

    if include_path is not None and not Path(include_path).is_dir():
        raise InputError(f"include_path {include_path} is not a folder; check the path")
    ours = Path(__file__).parent / "tasks"
    return TaskManager(include_path=[str(path) for path in (ours, include_path) if path])


def load_tasks(names: Sequence[str], manager: Any) -> tuple[list[Any], Any]:
    """The tasks and groups of lm-eval by these names or YAML paths, their rows loaded; the manager.

    Raises:
        InputError: on a name that is no task, group or tag, with a near one.
    """
    for name in names:
        if name not in manager.task_index and not (name.endswith(".yaml") and Path(name).is_file()):
            hint = f"{nearest(name, manager.all_tasks)}; `lm-eval ls tasks` lists all"
            raise InputError(f"unknown task {name!r}{hint}, include_path adds your own")
    loaded: list[Any] = []
    logging.getLogger("lm_eval.api.task").addFilter(lambda told: "Custom kwargs" not in told.msg)
    with _undisturbed():
        random.seed(_SEED)  # a task may shuffle its documents when it loads them
        for name in dict.fromkeys(names):
            found = manager.load([name])
            group = found["groups"].get(name)
            loaded += found["tasks"].values() if group is None else [group]
        manager.load(loaded)  # refuses a task that is in two of them
    return loaded, manager


def evaluate_tasks(lm: Any, loaded: tuple[list[Any], Any], **options: Any) -> dict[str, Any]:
    """Evaluates a `DecoderLM` on tasks by `load_tasks`; ``options`` are those of
    ``lm_eval.simple_evaluate``. Collective if there is a process group.

    Returns:
        On every rank, JSON-ready: lm-eval's ``results``, ``group_subtasks``, ``versions`` (of
        tasks), ``n-shot`` and ``n-samples``; of its ``samples``, per task, a digest of the
        ``documents`` and ``metrics`` -> scores in order of document.

    Raises:
        NotFiniteError: naming a text with NaN in its logits.
    """
    from lm_eval.evaluator import simple_evaluate

    tasks, manager = loaded
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    options |= dict.fromkeys(seeds, _SEED) | {"bootstrap_iters": 1000}
    with _undisturbed():
        raw: Any = simple_evaluate(lm, tasks=tasks, task_manager=manager, **options)

    def kept() -> dict[str, Any]:
        samples = {name: _by_document(found) for name, found in raw["samples"].items()}
        return {key: raw[key] for key in _KEPT} | {"samples": samples}

    # lm-eval hands results to the first rank of a node only.
    return cast(dict, on_first_rank(kept)) if dist.is_initialized() else kept()


def _by_document(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    hashes = {one["doc_id"]: one["doc_hash"] for one in samples}
    columns: dict[str, list[float]] = {}
    for one in sorted(samples, key=lambda one: one["doc_id"]):
        for metric in one["metrics"]:
            if isinstance(one[metric], int | float):
                name = f"{metric},{one['filter']}".removesuffix(",none")
                columns.setdefault(name, []).append(float(one[metric]))
    return {
        "documents": hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest(),
        "metrics": {name: found for name, found in columns.items() if len(found) == len(hashes)},
    }


def metrics_of(result: ModelResult) -> dict[str, float]:
    """A result as flat numbers for a metric logger: ``eval/arc_easy/acc``, ``eval/NAME/...``."""
    found = {f"eval/{name}/loss": m["nll"] / m["tokens"] for name, m in result.perplexity.items()}
    for metric, table in compare([result]).tables.items():
        found |= {f"eval/{row}/{metric}": cell["value"] for row, cell in table[result.name].items()}
    return found


def versions() -> dict[str, str]:
    """Versions of what a result depends on, as far as it is installed."""
    found = {one.name: one.version for one in metadata.distributions() if one.name in _PACKAGES}
    return {"python": platform.python_version()} | found


@contextlib.contextmanager
def plain_outputs(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, its logits in one piece; afterwards as it was."""
    chunks = getattr(model, "num_output_chunks", 0)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    model.num_output_chunks = 0
    try:
        yield
    finally:
        model.num_output_chunks = chunks
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Random generators are afterwards as they were. What lm-eval prints goes to stderr."""
    python, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices), contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
