"""From a pretrained model and calibration batches to the sensitivity artifact."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from hestia_tune.config import EstimationConfig
from hestia_tune.sensitivity.artifact import SensitivityArtifact
from hestia_tune.sensitivity.fingerprint import model_fingerprint, samples_digest
from hestia_tune.sensitivity.journal import Journal
from hestia_tune.sensitivity.rounds import Estimation, LayerTrace
from hestia_tune.sensitivity.scores import is_resolved
from hestia_tune.sensitivity.segments import CalibrationBatch

log = logging.getLogger(__name__)


def estimate_sensitivity(
    model: nn.Module,
    weights: Mapping[str, nn.Parameter],
    batches: Sequence[CalibrationBatch],
    settings: EstimationConfig | None = None,
    *,
    journal: Journal | None = None,
    progress: bool = True,
) -> SensitivityArtifact:
    """The sensitivity artifact of a model, from calibration batches.

    In a process group, every rank calls this with the whole model and all batches; they share the
    batches out and all get the same result.

    Args:
        model: pretrained, not prepared, in float32 (or float64), on any device; takes tokens and
            the batches' ``model_inputs``, gives logits. Left as it was.
        weights: fully qualified name -> weight of each layer that will be quantized.
        batches: the calibration samples.
        settings: see `EstimationConfig`; None takes the defaults.
        journal: keeps measurements for a later call; None does not.
        progress: shows a progress bar with the time left, on the first rank.

    Raises:
        TypeError: if a weight is of lower precision than float32.
        ValueError: if there is nothing to measure, or no trace comes out positive.
        FloatingPointError: naming the layer and the batch, if a product is not finite.
    """
    settings = settings or EstimationConfig()
    _check_inputs(weights, batches)
    run = Estimation(model, weights, batches, settings, journal or Journal(), progress)
    started = time.perf_counter()
    required = {p: p.requires_grad for p in model.parameters()}
    was_training = {module: module.training for module in model.modules()}
    wanted = {id(weight) for weight in weights.values()}
    try:
        model.eval()
        for parameter in required:
            parameter.requires_grad_(id(parameter) in wanted)
        traces = run.traces()
    finally:
        for parameter, flag in required.items():
            parameter.requires_grad_(flag)
        for module, flag in was_training.items():
            module.training = flag
    return _artifact(traces, weights, batches, settings, time.perf_counter() - started)


def _check_inputs(weights: Mapping[str, nn.Parameter], batches: Sequence[CalibrationBatch]) -> None:
    if not weights or not batches:
        raise ValueError("sensitivity needs at least one layer and one calibration sample")
    for name, weight in weights.items():
        if weight.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"second derivatives need float32 weights; {name} is {weight.dtype}; "
                "load the model in float32"
            )
    empty = [k for k, batch in enumerate(batches) if batch.num_predicted == 0]
    if empty:
        raise ValueError(f"calibration batch {empty[0]} has no token to predict; check the dataset")


def _artifact(
    traces: Mapping[str, LayerTrace],
    weights: Mapping[str, nn.Parameter],
    batches: Sequence[CalibrationBatch],
    settings: EstimationConfig,
    seconds: float,
) -> SensitivityArtifact:
    resolved = {n: is_resolved(t.trace, t.standard_error) for n, t in traces.items()}
    artifact = SensitivityArtifact.from_traces(
        {name: t.trace for name, t in traces.items()},
        {name: t.standard_error for name, t in traces.items()},
        resolved,
        kappa=settings.kappa,
        epsilon=settings.epsilon,
        model_fingerprint=model_fingerprint(weights),
        probes={name: t.probes for name, t in traces.items()},
        estimator=estimator_description(settings),
        dataset={"num_batches": len(batches), "digest": samples_digest(batches)},
        tokens_seen=sum(batch.num_predicted for batch in batches),
        wall_time_seconds=round(seconds, 3),
    )
    for name in artifact.unresolved:
        log.warning(
            "the trace of %s, %.3g +- %.2g, is not known to be positive; it takes the smallest "
            "resolved one (raise sensitivity_estimation.num_probes for a better estimate)",
            name,
            traces[name].trace,
            traces[name].standard_error,
        )
    return artifact


def estimator_description(settings: EstimationConfig) -> dict[str, Any]:
    """The settings that the numbers depend on, with the name of the method."""
    methods = {"hessian": "hutch++" if settings.fixed else "hutchinson", "fisher": "gauss-newton"}
    described = {"method": methods[settings.curvature], **asdict(settings)}
    for key in ("output", "overwrite", "vectors_at_once"):
        described.pop(key)
    return described
