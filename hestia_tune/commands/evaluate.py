"""The evaluation recipe: several models of one config, one table; and its use during training."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torchtune import config, training, utils

from hestia_tune.distributed import ensure_process_group, on_first_rank
from hestia_tune.evaluation import (
    Comparison,
    ModelResult,
    PerplexityResult,
    check_tasks,
    compare,
    evaluate_tasks,
    make_task_manager,
    perplexity,
    read_documents,
)
from hestia_tune.evaluation.evaluate import versions
from hestia_tune.files import require_writable_dir
from hestia_tune.models import build
from hestia_tune.models.load import load_model, locate
from hestia_tune.sections import EvalConfig
from hestia_tune.training.options import Run

log = utils.get_logger("DEBUG")

# Longer windows change a perplexity little and cost much.
_PERPLEXITY_WINDOW = 2048


class Evaluator:
    """What is measured, read and checked once, then applied to any number of models.

    Args:
        settings: the ``eval`` section.
        tokenizer: the config's.
        max_seq_len: the model's longest input.
        cache: beginning of the names of lm-eval's cache files, or None.

    Raises:
        ValueError, FileNotFoundError, ConnectionError: on tasks or texts that are not there.
        ImportError: if there are tasks and lm-eval is not installed.
    """

    def __init__(self, settings: EvalConfig, tokenizer: Any, max_seq_len: int, cache: Path | None):
        self.settings, self.tokenizer, self._cache = settings, tokenizer, cache
        if settings.window is not None and settings.window > max_seq_len:
            raise ValueError(
                f"eval.window {settings.window} is longer than the model's {max_seq_len}; lower it"
            )
        self.window = settings.window or max_seq_len
        self._documents = {
            name: read_documents(
                text.source,
                column=text.column,
                name=text.name,
                split=text.split,
                limit=text.limit,
                join=text.join,
            )
            for name, text in settings.perplexity.items()
        }
        self._manager = None
        if settings.tasks:
            self._manager = make_task_manager(settings.include_path)
            check_tasks(settings.tasks, self._manager)

    @torch.no_grad()
    def evaluate(
        self, name: str, model: nn.Module, about: Mapping[str, Any], device: torch.device
    ) -> ModelResult:
        """One row. Collective if there is a process group; the same on every rank."""
        settings = self.settings
        tasks = None
        if settings.tasks:
            tasks = evaluate_tasks(
                model,
                self.tokenizer,
                settings.tasks,
                window=self.window,
                limit=settings.limit,
                num_fewshot=settings.num_fewshot,
                include_path=settings.include_path,
                batch_size=settings.batch_size,
                cache=self._cache_of(about),
                device=device,
                task_manager=self._manager,
            )
        texts: dict[str, PerplexityResult] = {}
        for label, text in settings.perplexity.items():
            texts[label] = perplexity(
                model,
                self.tokenizer,
                self._documents[label],
                window=min(self.window, text.window or _PERPLEXITY_WINDOW),
                stride=text.stride,
                batch_size=settings.batch_size,
                max_tokens=text.max_tokens,
                device=device,
            )
        return ModelResult(name=name, tasks=tasks, perplexity=texts, settings=dict(about))

    def _cache_of(self, about: Mapping[str, Any]) -> str | None:
        """Packed models have files of their own: they are to answer by themselves."""
        if self._cache is None:
            return None
        kind = hashlib.sha256(f"{about.get('kind')} {about.get('source')}".encode()).hexdigest()
        return f"{self._cache}_{kind[:8]}"


@contextmanager
def plain_outputs(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, its logits in one piece; afterwards as it was, in train mode."""
    chunks = getattr(model, "num_output_chunks", 0)
    model.eval()
    model.num_output_chunks = 0
    try:
        yield
    finally:
        model.num_output_chunks = chunks
        model.train()


def metrics_of(result: ModelResult) -> dict[str, float]:
    """A row as flat numbers for a metric logger: ``eval/arc_easy/acc``, ``eval/NAME/...``."""
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
        found[f"eval/{name}/word_perplexity"] = measured.word_perplexity
        found[f"eval/{name}/bits_per_byte"] = measured.bits_per_byte
        found[f"eval/{name}/loss"] = measured.nll / measured.tokens
    return found


class EvaluationRecipe:
    """Evaluates the models that the config's ``eval`` section names.

    Args:
        cfg: the run's YAML, checked here, with all models and tasks, before any is loaded.
    """

    def __init__(self, cfg: DictConfig):
        run = Run.of(cfg)
        self.cfg, options = run.cfg, run.options
        self.settings: EvalConfig = options.eval
        self.output_dir = require_writable_dir(self.cfg.output_dir)
        self.path = Path(self.settings.output)
        require_writable_dir(self.path.parent)
        self.device = utils.get_device(self.cfg.device)
        self.dtype = training.get_dtype(self.cfg.dtype, self.device)
        ensure_process_group(self.device)
        self.sensitivity = options.sensitivity
        if self.sensitivity == "auto":
            self.sensitivity = (
                options.sensitivity_estimation.output if options.schedule.alpha else None
            )
        for name in self.settings.models:
            locate(name, self.cfg)
        max_seq_len = build.plain_on_meta(self.cfg.model).max_seq_len
        cache = self.output_dir / "eval_cache" / "answers" if self.settings.cache else None
        tokenizer = config.instantiate(self.cfg.tokenizer)
        self.evaluator = Evaluator(self.settings, tokenizer, max_seq_len, cache)

    def run(self) -> Comparison:
        """Evaluates one model after the other; what is finished is on disk."""
        results: list[ModelResult] = []
        for name in self.settings.models:
            utils.log_rank_zero(log, f"evaluating {name}")
            model, about = load_model(
                name, self.cfg, device=self.device, dtype=self.dtype, sensitivity=self.sensitivity
            )
            about |= self._settings()
            results.append(self.evaluator.evaluate(name, model, about, self.device))
            del model
            comparison = compare(results)
            on_first_rank(lambda done=comparison: done.save(self.path), share=False)
        return comparison

    def _settings(self) -> dict[str, Any]:
        """What every row has in common, for the record."""
        return {
            "eval": dataclasses.asdict(self.settings),
            "tokenizer": OmegaConf.to_container(self.cfg.tokenizer, resolve=True),
            "device": str(self.device),
            "world_size": dist.get_world_size(),
            "versions": versions(),
        }


def run_evaluation(cfg: DictConfig) -> int:
    """The recipe as a command; returns its exit code."""
    recipe = EvaluationRecipe(cfg)
    comparison = recipe.run()
    if dist.get_rank() == 0:
        print(f"\n{comparison.markdown()}\n\n{recipe.path}")
    dist.barrier()
    dist.destroy_process_group()
    return 0
