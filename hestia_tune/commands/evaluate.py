"""``hestia_eval``: several models of one config, one table.

What a model did is on disk as soon as it is done; another run with the same settings, on the same
files, takes it from there and goes on with the next model.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from omegaconf import OmegaConf
from torchtune import config, training, utils

from hestia_tune.distributed import end_process_group, ensure_process_group, on_first_rank
from hestia_tune.evaluation import Comparison, Evaluator, ModelResult, compare, versions
from hestia_tune.evaluation.evaluator import state_of_files
from hestia_tune.files import require_writable_dir
from hestia_tune.models import build
from hestia_tune.models.load import load_model, locate
from hestia_tune.training.options import Run

log = utils.get_logger("DEBUG")

# Keys of the eval section that no number depends on.
_NOT_MEASURED = ("models", "output", "every_n_steps", "at_end")


def run_evaluation(run: Run) -> int:
    """Evaluates the models that the config's ``eval`` section names; returns the exit code."""
    comparison, path = evaluate_models(run)
    if dist.get_rank() == 0:
        print(f"\n{comparison.markdown()}\n\n{path}")
    end_process_group()
    return 0


def evaluate_models(run: Run) -> tuple[Comparison, Path]:
    """Evaluates one model after the other; all models and tasks are checked before any is loaded.

    Returns:
        The table and the file that holds it.
    """
    run = Run.of(run)
    cfg, options, settings = run.cfg, run.options, run.options.eval
    output_dir = require_writable_dir(options.output_dir)
    path = Path(settings.output or output_dir / "evaluation.json")
    require_writable_dir(path.parent)
    device = utils.get_device(options.device)
    dtype = training.get_dtype(options.dtype, device)
    ensure_process_group(device)
    sensitivity = options.sensitivity
    if sensitivity == "auto":
        sensitivity = options.sensitivity_estimation.output if options.schedule.alpha else None
    for name in settings.models:
        locate(name, cfg)
    max_seq_len = build.plain_on_meta(cfg.model).max_seq_len
    evaluator = Evaluator(settings, config.instantiate(cfg.tokenizer), max_seq_len)
    measured = dataclasses.asdict(settings)
    common = {
        "eval": measured,
        "tokenizer": OmegaConf.to_container(cfg.tokenizer, resolve=True),
        "device": str(device),
        "versions": versions(),
    }
    inputs = [OmegaConf.to_container(cfg[key], resolve=True) for key in ("model", "quantizer")]
    inputs += [common | {"eval": {k: v for k, v in measured.items() if k not in _NOT_MEASURED}}]
    inputs += [options.dtype, options.schedule, sensitivity]

    def digest(name: str) -> str:
        """Of all that the result of a model depends on."""
        files = [locate(name, cfg)[1], *evaluator.files(), sensitivity or ""]
        everything = [name, inputs, [state_of_files(file) for file in files if file]]
        return hashlib.sha256(json.dumps(everything, default=str).encode()).hexdigest()

    digests = on_first_rank(lambda: {name: digest(name) for name in settings.models})
    stored = on_first_rank(lambda: _stored(path))
    results = {
        name: ModelResult(**stored[name])
        for name in settings.models
        if stored.get(name, {}).get("settings", {}).get("digest") == digests[name]
    }
    for name in settings.models:
        if name in results:
            utils.log_rank_zero(log, f"{name}: as found in {path}")
        else:
            utils.log_rank_zero(log, f"evaluating {name}")
            model, facts = load_model(
                name, cfg, device=device, dtype=dtype, sensitivity=sensitivity
            )
            facts |= common | {"world_size": dist.get_world_size(), "digest": digests[name]}
            results[name] = evaluator.evaluate(name, model, facts, device)
            del model
        comparison = compare([results[one] for one in settings.models if one in results])
        on_first_rank(lambda done=comparison: done.save(path), share=False)
    return comparison, path


def _stored(path: Path) -> dict[str, Any]:
    """Model -> what is known of it from an earlier run; nothing if there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["models"]
    except (OSError, ValueError, KeyError):
        return {}
