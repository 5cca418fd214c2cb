"""The sensitivity recipe: the YAML's model and data in, the artifact and two pictures out.

Every rank holds the whole model in float32 and measures its share of the calibration batches.

output_dir/
    sensitivity.json       the artifact (`hestia_tune.sensitivity.artifact`)
    sensitivity.png        traces, layers by projections
    temperatures.png       the fan of temperatures that the config's schedule makes of them
"""

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torchtune import config, training, utils
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX

from hestia_tune.data import StreamingTextDataset
from hestia_tune.distributed import ensure_process_group, on_first_rank
from hestia_tune.files import require_writable_dir
from hestia_tune.models import build
from hestia_tune.modules import quantized_linears
from hestia_tune.plots import plot_sensitivity, plot_temperatures
from hestia_tune.schedule import AnnealingSchedule
from hestia_tune.sensitivity import (
    CalibrationBatch,
    SensitivityArtifact,
    estimate_sensitivity,
    model_fingerprint,
)
from hestia_tune.sensitivity.estimate import estimator_description
from hestia_tune.sensitivity.fingerprint import samples_digest
from hestia_tune.sensitivity.journal import Journal
from hestia_tune.sensitivity.memory import estimation_memory
from hestia_tune.training import data
from hestia_tune.training.checkpoint import digest
from hestia_tune.training.options import Run

log = utils.get_logger("DEBUG")

_PICTURE_STEPS = 400


class SensitivityRecipe:
    """Computes the sensitivity artifact of a config.

    Args:
        cfg: the run's YAML, checked here.

    Raises:
        TypeError, ValueError, FileNotFoundError: naming what is wrong with the config.
    """

    def __init__(self, cfg: DictConfig):
        run = Run.of(cfg)
        self.cfg, self.options = run.cfg, run.options
        self.settings = self.options.sensitivity_estimation
        self.output_dir = require_writable_dir(self.cfg.output_dir)
        self.path = Path(self.settings.output)
        require_writable_dir(self.path.parent)
        self.device = utils.get_device(self.cfg.device)
        ensure_process_group(self.device)

    def run(self) -> SensitivityArtifact:
        """The artifact: the one found at ``path`` if it is this one, else a new one, saved there.

        Raises:
            ValueError: if an artifact of another model or of other settings is in the way.
        """
        cfg = self.cfg
        self.component = config.instantiate(cfg.quantizer)
        meta = build.build_on_meta(cfg.model, self.component)
        names = list(quantized_linears(meta))
        batches = self._calibration_batches()
        state = on_first_rank(lambda: self._read_pretrained(meta), share=False) or {}
        wanted = on_first_rank(lambda: self._describe(state, names, batches))
        found = on_first_rank(lambda: self._find(wanted))
        self.computed = found is None
        if found is not None:
            on_first_rank(lambda: self._refresh(found, state, names), share=False)
            return found
        on_first_rank(lambda: self._announce(names, batches), share=False)
        model = self._load(state)
        weights = {name: model.get_submodule(name).weight for name in names}
        journal = Journal(
            self.path.with_name(f"{self.path.name}.{digest(wanted)}"), dist.get_rank()
        )
        artifact = estimate_sensitivity(model, weights, batches, self.settings, journal=journal)
        artifact = dataclasses.replace(
            artifact,
            alpha=self.options.schedule.alpha,
            dataset=artifact.dataset | self._describe_dataset(batches),
        )
        dist.barrier()  # every rank has what it needs of the journal
        on_first_rank(lambda: self._write(artifact, state, names, journal), share=False)
        return artifact

    def _read_pretrained(self, meta: nn.Module) -> dict[str, torch.Tensor]:
        load = lambda: config.instantiate(self.cfg.checkpointer).load_checkpoint()  # noqa: E731
        return build.read_checkpoint(load, meta, self.cfg.checkpointer)

    def _describe(
        self,
        state: Mapping[str, torch.Tensor],
        names: Sequence[str],
        batches: Sequence[CalibrationBatch],
    ) -> dict[str, Any]:
        """What the result depends on."""
        return {
            "model_fingerprint": model_fingerprint({n: state[f"{n}.weight"] for n in names}),
            "estimator": estimator_description(self.settings),
            "samples": samples_digest(batches),
        }

    def _find(self, wanted: Mapping[str, Any]) -> SensitivityArtifact | None:
        """The artifact that is already there, if it is the one wanted."""
        if not self.path.exists():
            return None
        remedy = (
            "set sensitivity_estimation.overwrite=True to replace it, or "
            "sensitivity_estimation.output to another path"
        )
        try:
            found = SensitivityArtifact.load(self.path)
        except ValueError as error:
            if self.settings.overwrite:
                return None
            raise ValueError(f"{error}; {remedy}") from None
        differing = [k for k, v in wanted["estimator"].items() if found.estimator.get(k) != v]
        if found.model_fingerprint != wanted["model_fingerprint"]:
            differing = ["the model's weights"]
        elif not differing and found.dataset.get("digest") != wanted["samples"]:
            differing = ["the calibration samples"]
        if differing and self.settings.overwrite:
            return None
        if differing and set(differing) <= {"kappa"}:  # the same traces, other scores
            found, differing = found.rescored(self.settings.kappa), []
        if differing:
            raise ValueError(
                f"{self.path} is an artifact of another estimation; it differs in "
                f"{', '.join(differing)}; {remedy}"
            )
        log.info(f"sensitivity: {self.path} is there already")
        return dataclasses.replace(found, alpha=self.options.schedule.alpha)

    def _refresh(
        self,
        found: SensitivityArtifact,
        state: Mapping[str, torch.Tensor],
        names: Sequence[str],
    ) -> None:
        """Brings the file's tau_scale and scores, and the pictures, up to the config."""
        if found != SensitivityArtifact.load(self.path):
            found.save(self.path)
        self._draw(found, state, names)

    def _announce(self, names: list[str], batches: Sequence[CalibrationBatch]) -> None:
        """Says in advance what the estimation will need."""
        meta = build.plain_on_meta(self.cfg.model)
        build.build_buffers(meta, "cpu")  # some refuse to be made on the meta device
        meta.to("meta")
        largest = max(batches, key=lambda batch: batch.tokens.numel())
        parts = estimation_memory(meta, names, largest, self.settings)
        need = sum(parts.values())
        if self.device.type == "cpu":
            need *= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        free = psutil.virtual_memory().available
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
        listed = ", ".join(f"{part} {size / 2**30:.2f}" for part, size in parts.items() if size)
        log.info(
            f"sensitivity of {len(names)} layers on {len(batches)} batches; memory needed: about "
            f"{need / 2**30:.2f} GiB (per rank: {listed}); free: {free / 2**30:.2f} GiB"
        )
        if need > free:
            log.warning(
                "the estimation may run out of memory; take a smaller "
                "sensitivity_estimation.batch_size, shorter sequences, or curvature: fisher"
            )

    def _load(self, state: Mapping[str, torch.Tensor]) -> nn.Module:
        """The pretrained model in float32 on the device of every rank."""
        with training.set_default_dtype(torch.float32), self.device:
            model = config.instantiate(self.cfg.model)
        if dist.get_rank() == 0:
            model.load_state_dict(state)
        if dist.get_world_size() > 1:
            for parameter in model.parameters():
                dist.broadcast(parameter.data, src=0)
        return model

    def _calibration_batches(self) -> list[CalibrationBatch]:
        """The samples that the seed draws, in batches; the same on every rank."""
        cfg, settings = self.cfg, self.settings
        tokenizer = config.instantiate(cfg.tokenizer)
        dataset, packed = data.build_dataset(
            cfg.dataset, tokenizer, "dataset", batch_size=1, calibration_seed=settings.seed
        )
        if isinstance(dataset, StreamingTextDataset):  # its seed shuffles blocks of documents
            samples = list(itertools.islice(dataset, settings.num_samples))
        else:
            generator = torch.Generator().manual_seed(settings.seed)
            chosen = torch.randperm(len(dataset), generator=generator)[: settings.num_samples]
            samples = [dataset[int(index)] for index in chosen]
        if len(samples) < settings.num_samples:
            utils.log_rank_zero(
                log,
                f"the dataset has {len(samples)} samples, fewer than num_samples; all are taken",
            )
        collate = data.collate_function(
            cfg.collate_fn, tokenizer.pad_id, CROSS_ENTROPY_IGNORE_IDX, packed
        )
        size = settings.batch_size
        batches = [collate(samples[k : k + size]) for k in range(0, len(samples), size)]
        return [data.calibration_batch(batch) for batch in batches]

    def _describe_dataset(self, batches: Sequence[CalibrationBatch]) -> dict[str, Any]:
        section = OmegaConf.to_container(self.cfg.dataset, resolve=True)
        return {"dataset": section, "num_samples": sum(len(batch.tokens) for batch in batches)}

    def _write(
        self,
        artifact: SensitivityArtifact,
        state: Mapping[str, torch.Tensor],
        names: Sequence[str],
        journal: Journal,
    ) -> None:
        artifact.save(self.path)
        self._draw(artifact, state, names)
        journal.remove()

    def _draw(
        self,
        artifact: SensitivityArtifact,
        state: Mapping[str, torch.Tensor],
        names: Sequence[str],
    ) -> None:
        """The pictures, beside the artifact."""
        heatmap = self.path.with_name(f"{self.path.stem}.png")
        plot_sensitivity(artifact.traces, heatmap, self.settings.curvature)
        prefix = "" if self.path.stem == "sensitivity" else f"{self.path.stem}_"
        fan = self.path.with_name(f"{prefix}temperatures.png")
        options = self.options.schedule
        tau_init = options.tau_init
        if tau_init == "auto":
            dtype = training.get_dtype(self.cfg.dtype, self.device)
            tau_init = build.fit_temperature(state, names, self.component, dtype)
        schedule = AnnealingSchedule(
            _PICTURE_STEPS, rho=options.rho, tau_init=tau_init, alpha=options.alpha
        )
        steps = range(_PICTURE_STEPS + 1)
        curves = {
            name: [schedule.temperature(step, score) for step in steps]
            for name, score in artifact.scores.items()
        }
        plot_temperatures([step / _PICTURE_STEPS for step in steps], curves, fan)
        worst = max(artifact.score_standard_errors.values())
        log.info(
            f"sensitivity: {self.path} (scores known to +-{worst:.4f} or better, "
            f"{artifact.wall_time_seconds:.1f} s), {heatmap}, {fan}"
        )


def run_sensitivity(cfg: DictConfig) -> int:
    """The recipe as a command; returns its exit code."""
    SensitivityRecipe(cfg).run()
    dist.barrier()
    dist.destroy_process_group()
    return 0
