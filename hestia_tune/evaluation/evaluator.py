"""What an ``eval`` section measures, read and checked once, then applied to any number of models.

The same object serves the evaluation command and the training recipe.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hestia_tune.config import require_number
from hestia_tune.evaluation.compare import ModelResult
from hestia_tune.evaluation.harness import (
    evaluate_tasks,
    find_tasks,
    load_tasks,
    require_eval_extra,
)
from hestia_tune.evaluation.perplexity import perplexity, read_documents
from hestia_tune.sections import EvalConfig

# Longer windows change a perplexity little and cost much.
_PERPLEXITY_WINDOW = 2048


class Evaluator:
    """Tasks and texts, loaded before any model is.

    Args:
        settings: the ``eval`` section.
        tokenizer: the config's, of torchtune's form.
        max_seq_len: the model's longest input.

    Raises:
        ValueError, FileNotFoundError, ConnectionError: on tasks or texts that are not there.
        ImportError: with the command that installs what is missing.
    """

    def __init__(self, settings: EvalConfig, tokenizer: Any, max_seq_len: int):
        require_eval_extra()
        self.settings, self.tokenizer = settings, tokenizer
        if settings.window is not None and settings.window > max_seq_len:
            raise ValueError(
                f"eval.window {settings.window} is longer than the model's {max_seq_len}; lower it"
            )
        self.window = settings.window or max_seq_len
        self._text_windows: dict[str, int] = {}
        for name, text in settings.perplexity.items():
            window = min(self.window, text.window or _PERPLEXITY_WINDOW)
            require_number(f"eval.perplexity.{name}.stride", text.stride or window, 1, window)
            self._text_windows[name] = window
        self._documents = {name: read_documents(t) for name, t in settings.perplexity.items()}
        self._manager = find_tasks(settings.include_path) if settings.tasks else None
        self._tasks = load_tasks(settings.tasks, self._manager)

    @torch.no_grad()
    def evaluate(
        self,
        name: str,
        model: nn.Module,
        facts: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> ModelResult:
        """One model. Collective if there is a process group; the same on every rank.

        Args:
            name: of the model in tables.
            model, device: see `DecoderLM`.
            facts: what the model is, for the record.
        """
        from hestia_tune.evaluation.lm import DecoderLM

        settings, tasks = self.settings, None
        with plain_outputs(model):
            lm = DecoderLM(
                model,
                self.tokenizer,
                window=self.window,
                batch_size=settings.batch_size,
                device=device,
            )
            if self._tasks:
                options = {"limit": settings.limit, "num_fewshot": settings.num_fewshot}
                tasks = evaluate_tasks(lm, self._tasks, self._manager, **options)
            texts = {
                label: perplexity(
                    lm,
                    self._documents[label],
                    window=self._text_windows[label],
                    stride=text.stride,
                    max_tokens=text.max_tokens,
                )
                for label, text in settings.perplexity.items()
            }
        return ModelResult(name=name, tasks=tasks, perplexity=texts, settings=dict(facts or {}))

    def files(self) -> list[str]:
        """Files and folders that the results depend on, beside the model's; some may not exist."""
        texts = [text.source for text in self.settings.perplexity.values()]
        return [*texts, *self.settings.tasks, self.settings.include_path or ""]


@contextmanager
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


def state_of_files(path: str | Path) -> list[tuple[str, int, int]]:
    """(name, size, time of the last change) of a file, or of all files in a folder, if any."""
    path = Path(path)
    files = [path] if path.is_file() else sorted(path.rglob("*")) if path.is_dir() else []
    stats = [(str(one), one.stat()) for one in files if one.is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def metrics_of(result: ModelResult) -> dict[str, float]:
    """A result as flat numbers for a metric logger: ``eval/arc_easy/acc``, ``eval/NAME/...``."""
    found: dict[str, float] = {}
    averages: list[float] = []
    for task, entry in (result.tasks or {}).get("tasks", {}).items():
        for metric, cell in entry["metrics"].items():
            found[f"eval/{task}/{metric}"] = cell["value"]
        if "acc" in entry["metrics"]:
            averages.append(entry["metrics"]["acc"]["value"])
    if averages:
        found["eval/average/acc"] = sum(averages) / len(averages)
    for name, measured in result.perplexity.items():
        for measure in ("word_perplexity", "bits_per_byte"):
            found[f"eval/{name}/{measure}"] = measured[measure]
        found[f"eval/{name}/loss"] = measured["nll"] / measured["tokens"]
    return found
