"""The recipe before its first step: everything that can fail on a wrong config fails here.

Checks run from cheap to dear: the YAML file, the output folder, the sensitivity file, the model on
the meta device, then the checkpoint, the data, and only then sharding and optimizer. The first
rank alone reads the checkpoint; its errors are raised on every rank.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch.distributed.device_mesh import init_device_mesh
from torchtune import config, training, utils

from hestia_tune.distributed import ensure_process_group, on_first_rank
from hestia_tune.evaluation import Evaluator
from hestia_tune.files import require_writable_dir
from hestia_tune.models import build
from hestia_tune.modules import quantized_linears
from hestia_tune.qat import QATQuantizerBase
from hestia_tune.schedule import AnnealingSchedule, ScheduleDriver
from hestia_tune.sensitivity import SensitivityArtifact, model_fingerprint
from hestia_tune.training import checkpoint
from hestia_tune.training.base import FullFinetuneRecipeDistributed
from hestia_tune.training.data import TrainingData
from hestia_tune.training.history import History
from hestia_tune.training.options import Run, RunOptions
from hestia_tune.training.statistics import CodeStatistics

log = utils.get_logger("DEBUG")


def check_output(options: RunOptions) -> Path:
    """The folder of checkpoints, after the checks that need no model: it can be written, and holds
    no earlier run unless that is resumed or may be replaced.

    Raises:
        ValueError: naming the folder and the remedy.
    """
    folder = require_writable_dir(options.output_dir) / "checkpoints"
    found = checkpoint.complete_checkpoints(folder)
    if found and not (options.resume_from_checkpoint or options.overwrite_output):
        raise ValueError(
            f"output_dir {folder.parent} holds a run at step {found[-1][0]}; set "
            "resume_from_checkpoint=True, overwrite_output=True or another output_dir"
        )
    return folder


class RecipeSetup(FullFinetuneRecipeDistributed):
    """torchtune's FSDP2 full fine-tune with its own model setup, data position and resuming."""

    def __init__(self, cfg: DictConfig):
        run = Run.of(cfg)
        self.cfg, self.options = run.cfg, run.options
        self.output_dir = require_writable_dir(self.cfg.output_dir)
        ensure_process_group(utils.get_device(self.cfg.device))
        # torchtune would look for its own kind of recipe state; ours is restored in `_resume`.
        super().__init__(OmegaConf.merge(self.cfg, {"resume_from_checkpoint": False}))
        self._resume_from_checkpoint = self.cfg.resume_from_checkpoint
        self.checkpoint_folder = self.output_dir / "checkpoints"
        self.validation_losses: dict[str, float] = {}
        self._epoch = 0
        self.tokens_seen = 0

    def setup(self, cfg: DictConfig) -> None:
        """Builds everything up to the first step; ``cfg`` is the one given to ``__init__``."""
        cfg = self.cfg
        resume_path = on_first_rank(self._choose_checkpoint)
        resume_meta = checkpoint.read_meta(resume_path) if resume_path else None
        artifact = None
        if self.options.sensitivity is not None:
            artifact = SensitivityArtifact.load(self.options.sensitivity)
        component = config.instantiate(cfg.quantizer)
        if not isinstance(component, QATQuantizerBase):
            raise TypeError(
                f"quantizer must be a component such as hestia_tune.HestiaQATQuantizer; got "
                f"{cfg.quantizer['_component_']}"
            )
        self._model = build.build_on_meta(cfg.model, component)
        layers = quantized_linears(self._model)
        if artifact is not None:
            artifact.check_model(layers)
        self.method_key = component.method.key()
        self._tokenizer = config.instantiate(cfg.tokenizer)
        self._evaluator = None
        if self.options.eval.every_n_steps or self.options.eval.at_end:
            self._evaluator = Evaluator(self.options.eval, self._tokenizer, self._model.max_seq_len)
        self._loss_fn = config.instantiate(cfg.loss)
        self._setup_data(cfg)
        self._reshard = resume_meta is not None and self.data.check_ranks(resume_meta)
        self.total_steps = self.data.total_steps

        scores = None if artifact is None else artifact.scores
        state = on_first_rank(lambda: self._read_pretrained(artifact), share=False) or {}
        self.schedule = self._make_schedule(state, list(layers), component, resume_meta)
        self._identity = on_first_rank(lambda: self._describe_run(state, list(layers), scores))
        if resume_meta is not None:
            self._check_identity(resume_meta)

        if self._is_rank_zero:
            self._metric_logger = config.instantiate(cfg.metric_logger)
            self._metric_logger.log_config(cfg)
        self._setup_model(state)
        layers = quantized_linears(self._model)
        self.driver = ScheduleDriver(self.schedule, layers, scores)
        self._statistics = None
        if self.options.code_statistics:
            self._statistics = CodeStatistics(layers, self._dtype, self._device)

        self._optimizer = self._setup_optimizer(cfg.optimizer)
        self._lr_scheduler = self._setup_lr_scheduler(cfg.lr_scheduler, self.total_steps, -1)
        self._profiler = self._setup_profiler(cfg.profiler)
        if resume_path is not None:
            self._resume(resume_path, resume_meta)
        if self._is_rank_zero:
            if resume_path is None:  # an earlier run's, and only now that nothing can fail any more
                for name in ("checkpoints", "hard_model"):
                    shutil.rmtree(self.output_dir / name, ignore_errors=True)
                for name in ("results.json", "curves.png"):
                    (self.output_dir / name).unlink(missing_ok=True)
            self.history = History(self.output_dir / "metrics.jsonl", self.global_step)

    def _choose_checkpoint(self) -> Path | None:
        found = checkpoint.complete_checkpoints(self.checkpoint_folder)
        if self._resume_from_checkpoint:
            if not found:
                raise ValueError(
                    f"no complete checkpoint in {self.checkpoint_folder}; "
                    "set resume_from_checkpoint=False to start"
                )
            return found[-1][1]
        check_output(self.options)
        return None

    def _read_pretrained(self, artifact: SensitivityArtifact | None) -> dict[str, torch.Tensor]:
        """The pretrained state dict, checked against the model and the sensitivity file."""
        load = self._checkpoint_client.load_base_checkpoint
        loaded = build.read_checkpoint(load, self._model, self.cfg.checkpointer)
        if artifact is not None:
            weights = {name: loaded[f"{name}.weight"] for name in artifact.scores}
            artifact.check_model(artifact.scores, model_fingerprint(weights))
        return loaded

    def _make_schedule(
        self,
        state: dict[str, torch.Tensor],
        names: list[str],
        component: QATQuantizerBase,
        resume_meta: dict[str, Any] | None,
    ) -> AnnealingSchedule:
        options = self.options.schedule
        tau_init = options.tau_init
        if tau_init == "auto" and resume_meta is not None:
            tau_init = resume_meta["identity"]["schedule.tau_init"]
        elif tau_init == "auto":
            fit = build.fit_temperature
            tau_init = on_first_rank(lambda: fit(state, names, component, self._dtype))
            utils.log_rank_zero(log, f"tau_init auto: {tau_init:.4f}")
        return AnnealingSchedule(
            self.total_steps, rho=options.rho, tau_init=tau_init, alpha=options.alpha
        )

    def _describe_run(
        self, state: dict[str, torch.Tensor], names: list[str], scores: dict[str, float] | None
    ) -> dict[str, Any]:
        """What must be the same when a run is resumed."""
        weights = {name: state[f"{name}.weight"] for name in names}
        return {
            "model_fingerprint": model_fingerprint(weights),
            "quantizer": self.method_key,
            "schedule.rho": self.schedule.rho,
            "schedule.tau_init": self.schedule.tau_init,
            "schedule.alpha": self.schedule.alpha,
            "sensitivity": checkpoint.digest(scores),
            "optimizer": OmegaConf.to_container(self.cfg.optimizer, resolve=True),
            "shuffle": self.cfg.shuffle,
            "seed": self.seed,
            "dtype": self.cfg.dtype,
            **self.data.identity(),
        }

    def _check_identity(self, meta: dict[str, Any]) -> None:
        for key, value in self._identity.items():
            saved = meta["identity"].get(key)
            if saved != value:
                raise ValueError(
                    f"the checkpoint to resume from has {key} {saved}, this run {value}; "
                    "use the same, or start anew with resume_from_checkpoint=False"
                )

    def _setup_data(self, cfg: DictConfig) -> None:
        mesh_shape = (self.data_parallel_dim, self.tensor_parallel_dim)
        self._mesh = init_device_mesh(
            self._device.type, mesh_shape=mesh_shape, mesh_dim_names=("dp", "tp")
        )
        self.dp_size, self.dp_rank = self.world_size, self.rank
        self.data = TrainingData(
            cfg,
            self._tokenizer,
            ignore_index=self._loss_fn.ignore_index,
            rank=self.dp_rank,
            world_size=self.dp_size,
            device=self._device,
            seed=self.seed,
        )
        self.total_steps = self.data.total_steps

    def _setup_model(self, state: dict[str, torch.Tensor]) -> None:
        """Compile, activation checkpointing, FSDP2 and weights, in this order."""
        cfg, model = self.cfg, self._model
        if cfg.compile:
            training.compile_model(model, verbose=self._is_rank_zero)
            training.compile_loss(self._loss_fn, verbose=self._is_rank_zero)
        build.apply_activation_checkpointing(model, cfg)
        build.shard(model, cfg, self._mesh["dp"], self._dtype)
        build.materialize(model, state, self._device, cfg.fsdp_cpu_offload)
        if type(self._loss_fn).__name__ == "CEWithChunkedOutputLoss":
            model.set_num_output_chunks(self._loss_fn.num_output_chunks)
        self.activations_handling_ctx = training.get_act_offloading_ctx_manager(
            model, cfg.enable_activation_offloading
        )

    def _setup_optimizer(self, cfg_optimizer: DictConfig) -> torch.optim.Optimizer:
        """The configured optimizer; norms and biases, being vectors, are not decayed."""
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        groups = [{"params": [p for p in parameters if p.dim() >= 2]}]
        vectors = [p for p in parameters if p.dim() < 2]
        if vectors:
            groups.append({"params": vectors, "weight_decay": 0.0})
        return config.instantiate(cfg_optimizer, groups)

    def _resume(self, path: Path, meta: dict[str, Any]) -> None:
        checkpoint.load_checkpoint(path, model=self._model, optimizer=self._optimizer)
        rank = 0 if self._reshard else self.rank
        rank_state = checkpoint.load_rank_state(path, rank)
        self.global_step, self._epoch = meta["step"], rank_state["epoch"]
        self.tokens_seen = meta.get("tokens_seen", 0)
        self.validation_losses = dict(meta["validation_losses"])
        if self._lr_scheduler is not None:
            self._lr_scheduler.load_state_dict(rank_state["lr_scheduler"])
        if self._reshard:
            ranks = range(meta["world_size"])
            states = [checkpoint.load_rank_state(path, r)["dataloader"] for r in ranks]
            self.data.restore_shares(states)
        else:
            self.data.restore(rank_state["dataloader"])
            self._resumed_random_state = rank_state["random"]
        utils.log_rank_zero(log, f"Resumed from {path} at step {self.global_step}")
