"""Measures what an ``eval`` section asks for, on any number of models.

The section is read and checked once, before any model is loaded.

**Tasks.** lm-eval knows some fifteen thousand tasks. The YAML files in ``tasks/`` add groups.
The rows of a task come from the Hugging Face hub unless its YAML names local files. A missing
network is therefore noticed when tasks are loaded. lm-eval sets random seeds, and they are restored
afterwards. So an evaluation in the middle of a training run does not change the run.

**Perplexity** is measured with sliding windows. The tokens of a document follow one prefix token
and are cut into windows of at most ``window`` inputs. The first window scores all of its tokens.
Each later window moves by ``stride``, and the last window moves by the rest. It scores the new
tokens, each after at least ``window - stride + 1`` others. ``stride = window`` is cheapest, and
lm-eval uses it. A smaller stride costs ``window / stride`` times as much. Published perplexities
depend on these choices. Perplexities per word and per byte can be compared across tokenizers.

**Distance from a reference.** A quantized model can have the perplexity of its pretrained model and
still make other predictions. `DecoderLM.divergence` compares the predictions at every token that
the perplexity scores. It costs one more forward of both models. The logits of one batch of windows
are in memory, and their probabilities exist for 128 tokens at a time. No prediction is stored.

**Prompts.** `PROMPTS` are the beginnings of texts of ten kinds. Greedy continuations of them show a
reader what a number does not.
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

from hestia_tune.blocks import on_device
from hestia_tune.config import EvalConfig, TextConfig, nearest, require_number
from hestia_tune.distributed import on_first_rank
from hestia_tune.errors import InputError, one_line
from hestia_tune.evaluation.compare import ModelResult, compare
from hestia_tune.files import literal
from hestia_tune.models.folder import import_optional

# A fact, a list, a sentence, code, a question, a story, arithmetic, a letter, an explanation and a
# translation. hestia_eval evaluates every model again if they change.
PROMPTS = (
    "The capital of France is",
    "Three things to pack for a day at the beach:\n1.",
    "When the rain finally stopped, the children",
    'def is_prime(n):\n    """Return whether n is a prime number."""\n',
    "Question: Why do leaves turn yellow in autumn?\nAnswer:",
    "Once upon a time, in a small village by the sea,",
    "Tom has 12 apples and gives 5 of them away. Now he has",
    "Dear neighbours,\n\nI am writing to",
    "Photosynthesis is the process by which",
    "English: Good morning, my friend.\nSpanish:",
)

_FILES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}


def perplexity(
    lm: Any,
    documents: Sequence[str],
    window: int,
    stride: int | None = None,
    max_tokens: int | None = None,
) -> dict[str, float]:
    """Measure the perplexity of documents. This is collective if there is a process group.

    Each document is scored by itself.

    Args:
        lm: A `DecoderLM`. Its BOS, or EOS if there is no BOS, comes before every document. If the
            tokenizer begins texts with BOS, every window begins with it, in place of its oldest
            token. No other special token is added.
        documents: The texts.
        window: The number of inputs per forward, at most the longest input of ``lm``.
        stride: The step from one window to the next, at most ``window``. None: ``window``.
        max_tokens: Score only the first ``max_tokens`` tokens. Words and bytes are then counted in
            the text that these tokens decode to. None: score all tokens.

    Returns:
        On every rank, plain values for JSON: ``nll``, the summed negative log-likelihood in nats of
        ``tokens`` (without the prefixes); their ``words`` (pieces between runs of whitespace, as
        lm-eval counts them) and ``bytes`` (in UTF-8); ``documents`` (with at least one token);
        ``window`` and ``stride``, in tokens; ``token_perplexity``, ``word_perplexity``,
        ``byte_perplexity`` and ``bits_per_byte``.

    Raises:
        InputError: If the window is longer than the model's input.
        NotFiniteError: If the logits of a text have NaN. The message quotes the text.
    """
    require_number("window", window, 1, lm.max_length)
    stride = stride or window
    texts, tokenized = tokenize(lm, documents, max_tokens)
    nll = -math.fsum(lm.rolling(tokenized, window, stride))
    tokens = sum(map(len, tokenized))
    words = sum(len(re.split(r"\s+", text)) for text in texts)
    num_bytes = sum(len(text.encode("utf-8")) for text in texts)
    # Tensors, because math.exp raises an error where a tensor becomes infinite.
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


def tokenize(
    lm: Any, documents: Sequence[str], max_tokens: int | None
) -> tuple[list[str], list[list[int]]]:
    """Return the documents that have a token, as texts and as tokens.

    Args:
        lm: A `DecoderLM`.
        documents: The texts.
        max_tokens: Number of tokens to keep in all, from the beginning. None: all tokens.
    """
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
    return texts, tokenized


def read_documents(text: TextConfig) -> list[str]:
    """Read the documents of a text file, a file with rows, or a dataset.

    A text file is one document. Each row of a parquet, JSON or CSV file or of a dataset is one.

    Args:
        text: A text of the ``eval`` section. Its ``join`` makes one document of all rows.

    Raises:
        InputError: If the file or dataset cannot be read, or has no such split or column of text.
        ConnectionError: If the hub cannot be reached.
    """
    import datasets

    path, column = Path(text.source), text.column
    is_file = path.is_absolute() or path.suffix in (".txt", ".md", *_FILES)
    if is_file and not path.exists():
        raise InputError(f"{path} does not exist; check the path")
    if path.is_file() and path.suffix not in _FILES:
        try:
            # As in training, a byte order mark is no text.
            documents = [path.read_bytes().decode("utf-8").replace("\ufeff", "")]
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8 ({error}); convert it") from None
    else:
        options: Any = {"path": text.source, "name": text.name, "split": text.split}
        if path.is_file():
            kind = _FILES[path.suffix]
            options = {"path": kind, "data_files": literal(text.source), "split": "train"}
        try:
            rows = datasets.load_dataset(**options)
        except ConnectionError:  # an OSError, which `Evaluator` explains
            raise
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            why = one_line(error.__cause__ or error)
            raise InputError(f"{path} could not be read: {why}; check it") from error
        if column not in rows.column_names:
            raise InputError(f"{path} has no column {column!r}; it has {rows.column_names}")
        documents = rows[column][:]
    if not any(documents) or not all(isinstance(document, str) for document in documents):
        raise InputError(
            f"{path} (column {column!r}) must hold text; it is empty or holds other values"
        )
    return documents if text.join is None else [text.join.join(documents)]


_SEED = 1234  # seed for few-shot examples and for anything else that a task draws at random
_PACKAGES = ("hestia-tune", "torch", "torchao", "torchtune", "lm_eval", "datasets", "tokenizers")
_KEPT = ("results", "group_subtasks", "versions", "n-shot", "n-samples")
# Longer windows change a perplexity little and cost much.
_PERPLEXITY_WINDOW = 2048
_MORE_TOKENS = 65536  # the most tokens of a text that no option names


class Evaluator:
    """Tasks and texts of an ``eval`` section, loaded before any model.

    Args:
        settings: The ``eval`` section.
        tokenizer: The config's tokenizer, in torchtune's form.
        max_seq_len: The model's longest input in tokens.
        documents: Name of a further text -> its documents. Their first 65536 tokens are scored.

    Raises:
        InputError: If there is nothing to measure; if a task or a text does not exist; or if a
            package is missing. The message then names the command that installs it.
    """

    def __init__(
        self,
        settings: EvalConfig,
        tokenizer: Any,
        max_seq_len: int,
        documents: Mapping[str, Sequence[str]] | None = None,
    ):
        self._lm = import_optional("hestia_tune.evaluation.lm", "eval").DecoderLM
        self.settings, self.tokenizer = settings, tokenizer
        self.window = max_seq_len
        longest = min(self.window, _PERPLEXITY_WINDOW)
        self._texts, self._tasks = {}, None
        for name, texts in (documents or {}).items():
            self._texts[name] = (texts, longest, longest, _MORE_TOKENS)
        if not settings.tasks and not settings.perplexity and not self._texts:
            raise InputError("eval needs tasks or perplexity; both are empty")
        try:
            for name, text in settings.perplexity.items():
                window = text.window or longest
                require_number(f"eval.perplexity.{name}.window", window, 1, self.window)
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
        self,
        name: str,
        model: nn.Module,
        description: Mapping[str, Any],
        device: torch.device,
        continues: bool = False,
    ) -> ModelResult:
        """Run the tasks and measure the texts on one model. This is collective.

        Args:
            name: The model's column in the table.
            model: A decoder as `DecoderLM` takes it.
            description: A description of the model. The result keeps it as its ``settings``.
            device: The device of the model.
            continues: Whether to continue `hestia_tune.evaluation.evaluator.PROMPTS` too. The model
                must not be sharded then.

        Returns:
            The result, which is the same on every rank.
        """
        limit = self.settings.limit
        with plain_outputs(model):
            lm = self._make_lm(model, device)
            tasks = self._tasks and evaluate_tasks(lm, self._tasks, limit=limit)
            measured = {label: perplexity(lm, *text) for label, text in self._texts.items()}
            texts = lm.continuations(PROMPTS) if continues else {}
        options = {"perplexity": measured, "continuations": texts, "settings": description}
        return ModelResult(name=name, tasks=tasks, **options)

    @torch.no_grad()
    def divergence(
        self, model: nn.Module, reference: nn.Module, device: torch.device
    ) -> dict[str, dict[str, float]]:
        """Compare a model's predictions with a reference on every text. This is collective.

        Both models run one after the other on the same batch. A reference that waits on the CPU
        comes to the device block by block, so the device needs no room for two models.

        Args:
            model: A decoder as `DecoderLM` takes it, on the device.
            reference: Such a decoder, on the device or on the CPU.
            device: The device.

        Returns:
            Name of a text -> what `DecoderLM.divergence` returned.
        """
        is_there = next(reference.parameters()).device.type == device.type
        moved = contextlib.nullcontext() if is_there else on_device(reference, device, whole=False)
        with plain_outputs(model), plain_outputs(reference), moved:
            lm, other = self._make_lm(model, device), self._make_lm(reference, device)
            return {
                label: lm.divergence(other, tokenize(lm, documents, limit)[1], window, stride)
                for label, (documents, window, stride, limit) in self._texts.items()
            }

    def _make_lm(self, model: nn.Module, device: torch.device) -> Any:
        """Return a model as lm-eval takes it."""
        options = {"window": self.window, "batch_size": self.settings.batch_size}
        return self._lm(model, self.tokenizer, device=device, **options)


def find_tasks(include_path: str | None = None) -> Any:
    """Return lm-eval's ``TaskManager``, which takes some seconds.

    Args:
        include_path: A folder with tasks. They replace lm-eval's tasks of the same names.

    Raises:
        InputError: If the folder does not exist.
    """
    from lm_eval.tasks import TaskManager

    if include_path is not None and not Path(include_path).is_dir():
        raise InputError(f"include_path {include_path} is not a folder; check the path")
    ours = Path(__file__).parent / "tasks"
    return TaskManager(include_path=[str(path) for path in (ours, include_path) if path])


def load_tasks(names: Sequence[str], manager: Any) -> tuple[list[Any], Any]:
    """Load tasks and groups of lm-eval with their rows.

    Args:
        names: Names of tasks, groups or tags, or paths of YAML files.
        manager: The task manager; see `find_tasks`.

    Returns:
        The tasks and groups, and the manager.

    Raises:
        InputError: If a name is unknown. The message suggests a similar name.
    """
    for name in names:
        if name not in manager.task_index and not (name.endswith(".yaml") and Path(name).is_file()):
            hint = f"{nearest(name, manager.all_tasks)}; `lm-eval ls tasks` lists all"
            raise InputError(f"unknown task {name!r}{hint}; include_path adds your own tasks")
    loaded: list[Any] = []
    logging.getLogger("lm_eval.api.task").addFilter(lambda line: "Custom kwargs" not in line.msg)
    with _undisturbed():
        random.seed(_SEED)  # a task may shuffle its documents when it loads them
        for name in dict.fromkeys(names):
            entries = manager.load([name])
            group = entries["groups"].get(name)
            loaded += entries["tasks"].values() if group is None else [group]
        manager.load(loaded)  # raises an error if a task is there twice
    return loaded, manager


def evaluate_tasks(lm: Any, loaded: tuple[list[Any], Any], **options: Any) -> dict[str, Any]:
    """Evaluate a model on tasks. This is collective if there is a process group.

    Args:
        lm: A `DecoderLM`.
        loaded: What `load_tasks` returned.
        options: Options of ``lm_eval.simple_evaluate``.

    Returns:
        On every rank, plain values for JSON: lm-eval's ``results``, ``group_subtasks``,
        ``versions`` (of tasks), ``n-shot`` and ``n-samples``. Its ``samples`` become, for each
        task, a digest of the ``documents``, and ``metrics`` -> scores in the order of documents.

    Raises:
        NotFiniteError: If the logits of a text have NaN. The message quotes the text.
    """
    from lm_eval.evaluator import simple_evaluate

    tasks, manager = loaded
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    options |= dict.fromkeys(seeds, _SEED) | {"bootstrap_iters": 1000}
    with _undisturbed():
        raw: Any = simple_evaluate(lm, tasks=tasks, task_manager=manager, **options)

    def kept() -> dict[str, Any]:
        samples = {name: _by_document(rows) for name, rows in raw["samples"].items()}
        return {key: raw[key] for key in _KEPT} | {"samples": samples}

    # lm-eval returns results on the first rank only.
    return cast(dict, on_first_rank(kept)) if dist.is_initialized() else kept()


def _by_document(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a digest of a task's documents, and each metric's scores in the order of documents."""
    hashes = {sample["doc_id"]: sample["doc_hash"] for sample in samples}
    columns: dict[str, list[float]] = {}
    for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
        for metric in sample["metrics"]:
            if isinstance(sample[metric], int | float):
                name = f"{metric},{sample['filter']}".removesuffix(",none")
                columns.setdefault(name, []).append(float(sample[metric]))
    return {
        "documents": hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest(),
        "metrics": {name: column for name, column in columns.items() if len(column) == len(hashes)},
    }


def metrics_of(result: ModelResult) -> dict[str, float]:
    """Return a result as flat numbers for a metric logger, such as ``eval/arc_easy/acc``."""
    flat = {f"eval/{name}/loss": m["nll"] / m["tokens"] for name, m in result.perplexity.items()}
    for metric, table in compare([result]).tables.items():
        flat |= {f"eval/{row}/{metric}": cell["value"] for row, cell in table[result.name].items()}
    return flat


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that a result depends on."""
    installed = {d.name: d.version for d in metadata.distributions() if d.name in _PACKAGES}
    return {"python": platform.python_version()} | installed


@contextlib.contextmanager
def plain_outputs(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode, with logits in one tensor, and restore the model afterwards."""
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
    """Restore random generators afterwards, and send what lm-eval prints to stderr."""
    python, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices), contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
