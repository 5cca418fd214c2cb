"""``hestia_sensitivity``: measure the sensitivity of every layer, and draw it.

Every rank holds the whole model in float32 and measures a share of the batches. The command writes
to output_dir:

    sensitivity.json       the artifact (`hestia_tune.sensitivity.artifact`)
    sensitivity.png        the trace of every layer, as a table of layers and projections
    temperatures.png       the temperatures that the config's schedule computes from the scores
"""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hestia_tune.annealing import AnnealingSchedule
from hestia_tune.commands.launch import next_command
from hestia_tune.config.run import RunConfig
from hestia_tune.distributed import end_process_group, on_first_rank
from hestia_tune.errors import InputError, one_line
from hestia_tune.files import digest, kept_result, remove, require_writable_dir
from hestia_tune.models import build
from hestia_tune.plots import plot_sensitivity, plot_temperatures
from hestia_tune.qat.linear import weights_of
from hestia_tune.sensitivity import CalibrationBatch, SensitivityArtifact, estimate_sensitivity
from hestia_tune.sensitivity.artifact import estimation_identity
from hestia_tune.sensitivity.estimation import Journal
from hestia_tune.training import data
from hestia_tune.training.generation import generate_missing
from hestia_tune.training.plan import Plan, plan
from hestia_tune.training.weights import read_pretrained

log = logging.getLogger(__name__)


def run_sensitivity(config: RunConfig | Mapping[str, Any]) -> int:
    """Compute the artifact of a config and return the exit code."""
    config = RunConfig.parse(config)
    generate_missing(config)
    estimate(config)
    if dist.get_rank() == 0:
        found = f"sensitivity={config.sensitivity_estimation.output}"
        print(f"{config.sensitivity_estimation.output} has the scores. Next:")
        print(f"  {next_command('qat', *([] if config.sensitivity == 'auto' else [found]))}")
    end_process_group()
    return 0


def estimate(config: RunConfig | Mapping[str, Any]) -> SensitivityArtifact:
    """Return the artifact of a config, and compute it if its file does not hold it. Collective.

    The file is ``sensitivity_estimation.output``.

    Raises:
        InputError: If the file holds an artifact of another model or with other settings.
    """
    config = RunConfig.parse(config)
    settings, seed = config.sensitivity_estimation, config.seed or 0
    path = Path(str(settings.output))
    require_writable_dir(path.parent)
    # Linears that a budget of bits leaves dense are measured too.
    plain = config.changed(dtype="fp32", bits={"average": None})
    planned = plan(plain, trains=False)
    count, size = settings.num_samples, settings.batch_size
    batches = data.calibration_batches(config, planned.tokenizer, count, size)
    state = read_pretrained(planned)

    def find() -> tuple[dict[str, Any], SensitivityArtifact | None]:
        weights = weights_of(planned.layers, state)
        identity = estimation_identity(weights, batches, settings, seed)
        # With another kappa, the same traces give the new scores.
        estimator = {k: v for k, v in identity["estimator"].items() if k != "kappa"}
        remedy = "set sensitivity_estimation.overwrite=True, or .output to another path"
        options = {"overwrite": settings.overwrite, "remedy": remedy}
        if kept_result(path, identity | {"estimator": estimator}, **options) is None:
            return identity, None
        saved = SensitivityArtifact.load(path)
        return identity, dataclasses.replace(saved, scores={}, estimator=identity["estimator"])

    identity, artifact = on_first_rank(find)
    folder = path.with_name(f"{path.name}.{digest(identity)}")  # the journal's folder
    if artifact is None:
        artifact = _measure(planned, state, batches, Journal(folder, dist.get_rank()))

    def write() -> None:
        artifact.save(path)
        _draw(planned, artifact, path, state)
        remove(folder)

    on_first_rank(write, share=False)
    return artifact


def _measure(
    planned: Plan,
    state: Mapping[str, torch.Tensor] | None,
    batches: list[CalibrationBatch],
    journal: Journal,
) -> SensitivityArtifact:
    """Estimate the sensitivity of the pretrained model. Collective."""
    config = planned.config
    log.info(
        f"measuring how much the loss depends on each of {len(planned.layers)} layers (sensitivity)"
    )
    model = build.load_on_all_ranks(config.model, state, planned.device)
    weights = weights_of(planned.layers, dict(model.named_parameters()))
    options = {"seed": config.seed or 0, "journal": journal}
    try:
        artifact = estimate_sensitivity(
            model, weights, batches, config.sensitivity_estimation, **options
        )
    except torch.OutOfMemoryError as error:
        settings = config.sensitivity_estimation
        cheaper = ", or use curvature: fisher" if settings.curvature == "hessian" else ""
        raise InputError(
            f"the sensitivity estimation ran out of memory ({one_line(error)}); lower "
            f"sensitivity_estimation.batch_size{cheaper}; the estimation then starts again"
        ) from error
    num_samples = sum(len(batch.tokens) for batch in batches)
    samples = {"dataset": config.dataset, "num_samples": num_samples}
    return dataclasses.replace(artifact, dataset=artifact.dataset | samples)


def _draw(
    planned: Plan, artifact: SensitivityArtifact, path: Path, state: Mapping[str, torch.Tensor]
) -> None:
    """Draw the traces, and the temperatures of the layers in training."""
    curvature = planned.config.sensitivity_estimation.curvature
    plot_sensitivity(artifact.traces, path.with_suffix(".png"), curvature)
    tau_init = planned.config.schedule.tau_init
    if tau_init == "auto":  # training resolves it the same way
        weights = weights_of(artifact.traces, state)
        tau_init = planned.component.fit_temperature(weights, planned.methods)
    schedule = AnnealingSchedule.of(100, planned.config.schedule, tau_init=tau_init)
    fan = f"{path.stem}_temperatures.png".removeprefix("sensitivity_")
    plot_temperatures(schedule, artifact.scores, path.with_name(fan))
    worst = max(artifact.score_standard_errors.values())
    log.info(f"sensitivity: wrote {path}; the standard error of a score is at most {worst:.4f}")
    ranking = sorted(artifact.scores.items(), key=lambda item: item[1], reverse=True)
    shown = [f"  {score:.3f}  {name}" for name, score in ranking]
    gap = [f"  ... {len(shown) - 10} layers between ..."] if len(shown) > 10 else []
    rows = shown if not gap else [*shown[:5], *gap, *shown[-5:]]
    log.info("\n".join(["scores of the most and the least sensitive layers:", *rows]))
