"""The sensitivity recipe: the YAML's model and data in, the artifact and two pictures out.

Every rank holds the whole model in float32 and measures a share of the batches. In output_dir:

    sensitivity.json       the artifact (`hestia_tune.sensitivity.artifact`)
    sensitivity.png        traces, layers by projections
    temperatures.png       the temperatures that the config's schedule makes of the scores
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torchtune import utils

from hestia_tune.config import one_line
from hestia_tune.distributed import end_process_group, on_first_rank
from hestia_tune.files import remove, require_writable_dir
from hestia_tune.models import build
from hestia_tune.models.checkpoints import digest
from hestia_tune.modules import quantized_linears
from hestia_tune.plots import plot_sensitivity, plot_temperatures
from hestia_tune.schedule import AnnealingSchedule
from hestia_tune.sensitivity import CalibrationBatch, SensitivityArtifact, estimate_sensitivity
from hestia_tune.sensitivity.artifact import estimation_identity
from hestia_tune.sensitivity.estimation import Journal
from hestia_tune.training import data
from hestia_tune.training.base import join_ranks
from hestia_tune.training.options import Run

log = utils.get_logger("DEBUG")


class SensitivityRecipe:
    """Computes the artifact of a run at ``path``; ``computed`` tells if that was necessary."""

    def __init__(self, run: Run | DictConfig):
        run = Run.of(run)
        self.cfg, self.options = run.cfg, run.options
        self.settings = self.options.sensitivity_estimation
        self.path = Path(self.settings.output)
        require_writable_dir(self.path.parent)
        self.device = join_ranks(self.options.device, "fp32")
        self.component = build.make_component(self.cfg.quantizer)

    def run(self) -> SensitivityArtifact:
        """The artifact: the one found at ``path`` if it is this one, else a new one, saved there.

        Raises:
            ValueError: if an artifact of another model or of other settings is in the way.
        """
        meta = build.build_on_meta(self.cfg.model, self.component)
        names = list(quantized_linears(meta))
        tokenizer = build.make_tokenizer(self.cfg.tokenizer, meta)
        batches = data.calibration_batches(self.cfg, tokenizer, self.settings)
        checkpointer = build.instantiate(self.cfg.checkpointer, "checkpointer")
        state = build.pretrained_state(self.cfg, checkpointer.load_checkpoint)
        identity, artifact = on_first_rank(lambda: self._find(names, state or {}, batches))
        folder = self.path.with_name(f"{self.path.name}.{digest(identity)}")  # of the journal
        self.computed = artifact is None
        if artifact is None:
            model = build.load_on_all_ranks(self.cfg.model, state, self.device)
            weights = {name: model.get_submodule(name).weight for name in names}
            journal = Journal(folder, dist.get_rank())
            try:
                artifact = estimate_sensitivity(
                    model, weights, batches, self.settings, journal=journal
                )
            except torch.OutOfMemoryError as error:
                raise ValueError(
                    f"the sensitivity estimation ran out of memory ({one_line(error)}); lower "
                    "sensitivity_estimation.batch_size, or use curvature: fisher; what was "
                    "measured is kept"
                ) from error
            dataset = artifact.dataset | {
                "dataset": OmegaConf.to_container(self.cfg.dataset, resolve=True),
                "num_samples": sum(len(batch.tokens) for batch in batches),
            }
            artifact = dataclasses.replace(artifact, dataset=dataset)
        on_first_rank(lambda: self._write(artifact, state), share=False)
        on_first_rank(lambda: remove(folder), share=False)
        return artifact

    def _find(
        self, names: list[str], state: Mapping[str, torch.Tensor], batches: list[CalibrationBatch]
    ) -> tuple[dict[str, Any], SensitivityArtifact | None]:
        """(identity of the estimation, the artifact that is there if it is of this estimation)."""
        weights = {name: state[f"{name}.weight"] for name in names}
        identity = estimation_identity(weights, batches, self.settings)
        if not self.path.exists():
            return identity, None
        try:
            return identity, SensitivityArtifact.load(self.path).of_estimation(identity)
        except ValueError as error:
            if self.settings.overwrite:
                return identity, None
            remedy = "set sensitivity_estimation.overwrite=True, or .output to another path"
            raise ValueError(f"{self.path}: {error}; {remedy}") from None

    def _write(self, artifact: SensitivityArtifact, state: Mapping[str, torch.Tensor]) -> None:
        """Write the artifact, and beside it the pictures; ``state`` is the pretrained model's."""
        artifact.save(self.path)
        plot_sensitivity(artifact.traces, self.path.with_suffix(".png"), self.settings.curvature)
        tau_init = self.options.schedule.tau_init
        if tau_init == "auto":  # as training will resolve it
            weights = (state[f"{name}.weight"].float() for name in artifact.traces)
            tau_init = self.component.method.fit_temperature(weights)
        schedule = AnnealingSchedule.of(100, self.options.schedule, tau_init=tau_init)
        fan = f"{self.path.stem}_temperatures.png".removeprefix("sensitivity_")
        plot_temperatures(schedule, artifact.scores, self.path.with_name(fan))
        worst = max(artifact.score_standard_errors.values())
        log.info(f"sensitivity: {self.path}, with scores known to +-{worst:.4f} or better")


def with_sensitivity(run: Run, alpha: float) -> tuple[Run, bool]:
    """``sensitivity: auto``: the run with the path of the artifact, computed if there is none (and
    not at all if ``alpha`` is 0, since nothing would read it); whether it was computed."""
    options = run.options
    if options.sensitivity != "auto":
        return run, False
    if alpha == 0:
        return run.changed({"sensitivity": None}), False
    if options.overwrite_output and not options.resume_from_checkpoint:
        # What a run may overwrite includes the artifact that it makes by itself.
        run = run.changed({"sensitivity_estimation": {"overwrite": True}})
    recipe = SensitivityRecipe(run)
    recipe.run()
    return run.changed({"sensitivity": str(recipe.path)}), recipe.computed


def run_sensitivity(run: Run | DictConfig) -> int:
    """The recipe as a command; returns its exit code."""
    SensitivityRecipe(run).run()
    end_process_group()
    return 0
