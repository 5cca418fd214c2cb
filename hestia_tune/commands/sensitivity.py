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
from hestia_tune.distributed import end_process_group, ensure_process_group, on_first_rank
from hestia_tune.files import require_writable_dir
from hestia_tune.models import build
from hestia_tune.modules import quantized_linears
from hestia_tune.plots import plot_sensitivity, plot_temperatures
from hestia_tune.schedule import AnnealingSchedule
from hestia_tune.sensitivity import CalibrationBatch, SensitivityArtifact, estimate_sensitivity
from hestia_tune.sensitivity.estimation import estimation_identity
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
        run: the run's options, or its YAML, which is then checked here.

    Attributes:
        path: of the artifact.
        computed: whether `run` had to compute it.

    Raises:
        TypeError, ValueError, FileNotFoundError: naming what is wrong with the config.
    """

    def __init__(self, run: Run | DictConfig):
        run = Run.of(run)
        self.cfg, self.options = run.cfg, run.options
        self.settings = self.options.sensitivity_estimation
        require_writable_dir(self.options.output_dir)
        self.path = Path(self.settings.output)
        require_writable_dir(self.path.parent)
        self.device = utils.get_device(self.options.device)
        ensure_process_group(self.device)
        self.component = config.instantiate(self.cfg.quantizer)
        self.computed = False

    def run(self) -> SensitivityArtifact:
        """The artifact: the one found at ``path`` if it is this one, else a new one, saved there.

        Raises:
            ValueError: if an artifact of another model or of other settings is in the way.
        """
        meta = build.build_on_meta(self.cfg.model, self.component)
        names = list(quantized_linears(meta))
        batches = self.calibration_batches()
        state = on_first_rank(lambda: self.read_pretrained(meta), share=False) or {}

        def describe() -> dict[str, Any]:
            weights = {name: state[f"{name}.weight"] for name in names}
            return estimation_identity(weights, batches, self.settings)

        identity = on_first_rank(describe)
        artifact = on_first_rank(lambda: self._find(identity))
        self.computed = artifact is None
        stem = self.path.with_name(f"{self.path.name}.{digest(identity)}")
        journal = Journal(stem, dist.get_rank())
        if artifact is None:
            on_first_rank(lambda: self._announce(names, batches), share=False)
            model = self.load(state)
            weights = {name: model.get_submodule(name).weight for name in names}
            artifact = estimate_sensitivity(model, weights, batches, self.settings, journal=journal)
            section = OmegaConf.to_container(self.cfg.dataset, resolve=True)
            num_samples = sum(len(batch.tokens) for batch in batches)
            dataset = artifact.dataset | {"dataset": section, "num_samples": num_samples}
            artifact = dataclasses.replace(artifact, dataset=dataset)
            dist.barrier()  # every rank has what it needs of the journal
        artifact = dataclasses.replace(artifact, alpha=self.options.schedule.alpha)
        on_first_rank(lambda: self._write(artifact, state, journal), share=False)
        return artifact

    def read_pretrained(self, meta: nn.Module) -> dict[str, torch.Tensor]:
        """The checkpoint's state dict, checked against the model on the meta device."""
        load = lambda: config.instantiate(self.cfg.checkpointer).load_checkpoint()  # noqa: E731
        return build.read_checkpoint(load, meta, self.cfg.checkpointer)

    def load(self, state: Mapping[str, torch.Tensor]) -> nn.Module:
        """The pretrained model in float32 on the device of every rank; rank 0 has ``state``."""
        with training.set_default_dtype(torch.float32), self.device:
            model = config.instantiate(self.cfg.model)
        if dist.get_rank() == 0:
            model.load_state_dict(state)
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
        return model

    def calibration_batches(self) -> list[CalibrationBatch]:
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

    def _find(self, identity: Mapping[str, Any]) -> SensitivityArtifact | None:
        """The artifact that is already there, if it is the one wanted."""
        if not self.path.exists():
            return None
        try:
            found = SensitivityArtifact.load(self.path)
            differing = found.differences(identity)
            if differing == ["kappa"]:  # the same traces, other scores
                found, differing = found.rescored(self.settings.kappa), []
            if differing:
                raise ValueError(
                    f"{self.path} is an artifact of another estimation; it differs in "
                    f"{', '.join(differing)}"
                )
        except ValueError as error:
            if self.settings.overwrite:
                return None
            raise ValueError(
                f"{error}; set sensitivity_estimation.overwrite=True to replace it, or "
                "sensitivity_estimation.output to another path"
            ) from None
        log.info(f"sensitivity: {self.path} is there already")
        return found

    def _announce(self, names: list[str], batches: Sequence[CalibrationBatch]) -> None:
        """Says in advance what the estimation will need."""
        meta = build.plain_on_meta(self.cfg.model)
        build.build_buffers(meta, "cpu")  # some refuse to be made on the meta device
        largest = max(batches, key=lambda batch: batch.tokens.numel())
        parts = estimation_memory(meta.to("meta"), names, largest, self.settings)
        need, free = sum(parts.values()), psutil.virtual_memory().available
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
        else:
            need *= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
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

    def _write(
        self, artifact: SensitivityArtifact, state: Mapping[str, torch.Tensor], journal: Journal
    ) -> None:
        """The artifact, and beside it the pictures."""
        artifact.save(self.path)
        heatmap = self.path.with_name(f"{self.path.stem}.png")
        plot_sensitivity(artifact.traces, heatmap, self.settings.curvature)
        prefix = "" if self.path.stem == "sensitivity" else f"{self.path.stem}_"
        fan = self.path.with_name(f"{prefix}temperatures.png")
        options = self.options.schedule
        tau_init = options.tau_init
        if tau_init == "auto":
            dtype = training.get_dtype(self.options.dtype, self.device)
            weights = (state[f"{name}.weight"].to(dtype) for name in artifact.traces)
            tau_init = self.component.method.fit_temperature(weights)
        schedule = AnnealingSchedule(
            _PICTURE_STEPS, rho=options.rho, tau_init=tau_init, alpha=options.alpha
        )
        plot_temperatures(schedule, artifact.scores, fan)
        journal.remove()
        worst = max(artifact.score_standard_errors.values())
        log.info(
            f"sensitivity: {self.path} (scores known to +-{worst:.4f} or better, "
            f"{artifact.wall_time_seconds:.1f} s), {heatmap}, {fan}"
        )


def run_sensitivity(run: Run | DictConfig) -> int:
    """The recipe as a command; returns its exit code."""
    SensitivityRecipe(run).run()
    end_process_group()
    return 0
