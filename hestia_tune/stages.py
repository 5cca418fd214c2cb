"""The stages of a run, as functions of it.

The first two return the run with what they have found, the others the recipe that has done it.

    measure_sensitivity    sensitivity.json, sensitivity.png, temperatures.png
    choose_bits            bits.json, bits.png
    reconstruct            the folder reconstruction/ (`hestia_tune.reconstruction.reconstruct`)
    train                  the hard model and its losses (`hestia_tune.torchtune.recipe`)

``hestia_qat`` runs all of them, and every other command a shorter list. Each stage keeps its result
in a file. A run that starts again reads the file if everything that the result depends on is the
same. Stages of one run share the weights: they are read, checked and hashed once.
"""

import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from hestia_tune.annealing import AnnealingSchedule
from hestia_tune.bits import BITS_FILE, Budget, kept, read_choices, settings_of
from hestia_tune.components import torchtune_module
from hestia_tune.distributed import on_first_rank
from hestia_tune.errors import InputError, one_line
from hestia_tune.files import (
    digest,
    kept_result,
    locked,
    remove,
    require_writable_dir,
    write_json,
)
from hestia_tune.models import loading
from hestia_tune.plots import plot_bits, plot_sensitivity, plot_temperatures
from hestia_tune.qat.linear import weights_of
from hestia_tune.reconstruction.reconstruct import ReconstructionRecipe
from hestia_tune.run import Run, TrainingRun, keep_date, read_starts
from hestia_tune.sensitivity import CalibrationBatch, SensitivityArtifact, estimate_sensitivity
from hestia_tune.sensitivity.estimation import Journal, estimation_identity
from hestia_tune.training import loader

if TYPE_CHECKING:
    from hestia_tune.torchtune.recipe import HestiaQATRecipe


log = logging.getLogger(__name__)

R = TypeVar("R", bound=Run)


def measure_sensitivity(run: R) -> R:
    """Return the run with the sensitivity of every linear, and measure it if need be. Collective.

    The result is the file ``sensitivity_estimation.output``, which ``sensitivity`` then names. It
    has linears that a budget of bits leaves dense, too. Every rank holds the whole model in float32
    and measures a share of the batches.

    Raises:
        InputError: If the file holds an artifact of another model or with other settings.
    """
    config, settings, seed = run.config, run.config.sensitivity_estimation, run.config.seed or 0
    path = Path(str(settings.output))
    require_writable_dir(path.parent, "sensitivity_estimation.output")
    keep_date(run)
    prepared = run.undecided
    count, size = settings.num_samples, settings.batch_size
    batches = loader.calibration_batches(config, run.tokenizer, count, size)
    state = run.pretrained.read(run, prepared)

    def find() -> tuple[dict[str, Any], SensitivityArtifact | None]:
        fingerprint = run.pretrained.fingerprint(prepared.layers)
        identity = estimation_identity(fingerprint, batches, settings, seed)
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
        artifact = _measure(run, state, batches, identity, Journal(folder, dist.get_rank()))

    def write() -> None:
        artifact.save(path)
        _draw_sensitivity(run, artifact, path, state)
        remove(folder)

    on_first_rank(write, share=False)
    return dataclasses.replace(run.changed(sensitivity=str(path)), artifact=artifact)


def _measure(
    run: Run,
    state: Mapping[str, torch.Tensor],
    batches: list[CalibrationBatch],
    identity: Mapping[str, Any],
    journal: Journal,
) -> SensitivityArtifact:
    """Estimate the sensitivity of the pretrained model. Collective."""
    config, layers = run.config, run.undecided.layers
    log.info(f"measuring how much the loss depends on each of {len(layers)} layers (sensitivity)")
    model = loading.load_on_all_ranks(config.model, state, run.device)
    weights = weights_of(layers, dict(model.named_parameters()))
    options = {"seed": config.seed or 0, "journal": journal}
    try:
        artifact = estimate_sensitivity(
            model,
            weights,
            batches,
            config.sensitivity_estimation,
            identity=identity,
            **options,
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


def _draw_sensitivity(
    run: Run, artifact: SensitivityArtifact, path: Path, state: Mapping[str, torch.Tensor]
) -> None:
    """Draw the traces, and the temperatures of the layers in training."""
    settings, schedule = run.config.sensitivity_estimation, run.config.schedule
    plot_sensitivity(artifact.traces, path.with_suffix(".png"), settings.curvature)
    tau_init = schedule.tau_init
    if tau_init == "auto":  # training resolves it the same way
        weights = weights_of(artifact.traces, state)
        tau_init = run.undecided.component.fit_temperature(weights, run.undecided.methods)
    annealing = AnnealingSchedule.of(100, schedule, tau_init=tau_init)
    fan = f"{path.stem}_temperatures.png".removeprefix("sensitivity_")
    plot_temperatures(annealing, artifact.scores, path.with_name(fan))
    worst = max(artifact.score_standard_errors.values())
    log.info(f"sensitivity: wrote {path}; the standard error of a score is at most {worst:.4f}")
    ranking = sorted(artifact.scores.items(), key=lambda item: item[1], reverse=True)
    shown = [f"  {score:.3f}  {name}" for name, score in ranking]
    gap = [f"  ... {len(shown) - 10} layers between ..."] if len(shown) > 10 else []
    rows = shown if not gap else [*shown[:5], *gap, *shown[-5:]]
    log.info("\n".join(["scores of the most and the least sensitive layers:", *rows]))


def choose_bits(run: R, *, overwrite: bool = False) -> R:
    """Return the run with the bits of every linear, and choose them if need be. Collective.

    The choices are kept in bits.json in output_dir. If the file has the same settings, its choices
    are used, even if they were edited by hand. Without ``bits.average`` there is nothing to choose.
    The first rank computes the errors of the weights on its device, one linear after another.

    Args:
        run: The run.
        overwrite: Whether to replace a file with other settings.

    Raises:
        InputError: If the file has other settings and may not be replaced, or names other linears
            than the quantizer selects.
    """
    config = run.asked
    if config.bits.average is None:
        return run
    path = require_writable_dir(config.output_dir) / BITS_FILE
    prepared = run.undecided
    budget = Budget.of(config, prepared.component, prepared.model)
    state = run.pretrained.read(run, prepared)

    def choose() -> dict[str, str]:
        weights, artifact = weights_of(prepared.layers, state), None
        identity = settings_of(config)
        identity["model_fingerprint"] = run.pretrained.fingerprint(prepared.layers)
        if run.config.sensitivity is not None:
            artifact = SensitivityArtifact.load(run.config.sensitivity)
            artifact.check_model(prepared.layers, identity["model_fingerprint"])
        identity["traces"] = digest(artifact.traces) if artifact else None
        saved = kept(config, identity, overwrite)
        if saved is None:
            saved = identity | budget.choose(weights, artifact, run.device)
            write_json(path, saved)
            log.info(f"bits: wrote {path}")
        else:
            log.info(f"bits: the choices come from {path}")
        choices = read_choices(saved, path)
        if odd := choices.keys() ^ budget.layers.keys():
            raise InputError(
                f"{path} and the quantizer's linears differ in {min(odd)}; correct the file, or "
                "delete it to choose again"
            )
        _report_bits(budget, choices, path, saved)
        return choices

    return run.choosing(on_first_rank(choose) or {})


def _report_bits(budget: Budget, choices: dict[str, str], path: Path, saved: dict) -> None:
    """Draw the choices, and log how many linears have which choice."""
    plot_bits(budget.bits(choices), path.with_suffix(".png"))
    counts = Counter(choices.values())
    parts = ", ".join(f"{counts[name]} {name}" for name in budget.methods if counts[name])
    mean = budget.mean_bits(choices)
    log.info(f"bits: {parts}; {mean:.4f} bits per weight of at most {budget.average:g}")
    edited = [
        n for n, bits in budget.bits(choices).items() if saved["layers"][n].get("bits") != bits
    ]
    if edited:
        log.info(f"bits: {len(edited)} choices were edited by hand, such as {edited[0]}")
    if mean > budget.average:
        log.warning(f"bits: the edited choices exceed bits.average {budget.average:g}")


def reconstruct(run: Run) -> ReconstructionRecipe:
    """Reconstruct the blocks of a run, and return the recipe that has done it. Collective.

    Its folder is locked against other jobs. The recipe is not finished after a Ctrl-C.
    """
    with locked(str(run.config.reconstruct.output), "reconstruct.output"):
        recipe = ReconstructionRecipe(run)
        recipe.run()
    return recipe


def with_starts(run: R) -> R:
    """Return the run with the sensitivity and the reconstruction that its config names now."""
    artifact, start = read_starts(run.config, run.prepared)
    return dataclasses.replace(run, artifact=artifact, start=start)


def train(run: TrainingRun) -> "HestiaQATRecipe":
    """Train the model of a run, and return the recipe that has done it. Collective.

    The recipe is not finished after a Ctrl-C, and has saved a checkpoint.
    """
    recipe = torchtune_module("recipe", "hestia_qat").HestiaQATRecipe(run.config)
    recipe.build(run)
    recipe.train()
    return recipe
