"""The recipe before its first step: everything that can fail on a wrong config fails here.

Checks run from cheap to dear: the YAML file, the output folder, the sensitivity file, the model on
the meta device, then the checkpoint, the data, and only then sharding and optimizer. The first
rank alone reads the checkpoint; its errors are raised on every rank.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchtune import training, utils
from torchtune.config._utils import _get_component_from_path

from hestia_tune import sharded
from hestia_tune.distributed import StopRequest, on_first_rank
from hestia_tune.evaluation import Evaluator
from hestia_tune.files import read_json, remove, require_writable_dir
from hestia_tune.models import build
from hestia_tune.models.checkpoints import (
    complete_checkpoints,
    digest,
    find_damage,
    pretrained_folder,
    read_meta,
)
from hestia_tune.modules import quantized_linears
from hestia_tune.qat import QATQuantizerBase
from hestia_tune.schedule import AnnealingSchedule, ScheduleDriver
from hestia_tune.sensitivity import SensitivityArtifact, model_fingerprint
from hestia_tune.training import checkpoint, sharding
from hestia_tune.training.base import FullFinetuneRecipeDistributed, join_ranks
from hestia_tune.training.data import TrainingData
from hestia_tune.training.distillation import make_teacher, teacher_folder
from hestia_tune.training.monitoring import CodeStatistics, History
from hestia_tune.training.options import Run, RunOptions
from hestia_tune.training.reconstructed import read_results, reconstructed, validation_identity

log = utils.get_logger("DEBUG")


def check_output(options: RunOptions) -> Path:
    """The folder of checkpoints; a ValueError that names the remedy unless it can be written, and
    holds no earlier run, or one that is resumed or may be replaced."""
    folder = require_writable_dir(options.output_dir) / "checkpoints"
    found = complete_checkpoints(folder)
    if found and not (options.resume_from_checkpoint or options.overwrite_output):
        raise ValueError(
            f"output_dir {folder.parent} holds a run at step {found[-1][0]}; set "
            "resume_from_checkpoint=True, overwrite_output=True or another output_dir"
        )
    return folder


def check_components(run: Run, component: QATQuantizerBase) -> None:
    """Raises what `RecipeSetup.setup` would of components that need no checkpoint and no data, for
    a run that computes something first; and if it goes on from another."""
    cfg, options = run.cfg, run.options
    on_meta = build.checked_on_meta(cfg, component)
    tokenizer = build.make_tokenizer(cfg.tokenizer, on_meta)
    if options.eval.every_n_steps or options.eval.at_end:
        Evaluator(options.eval, tokenizer, on_meta.max_seq_len)
    if options.distillation.weight and options.distillation.teacher != "pretrained":
        teacher_folder(run)
    build.instantiate(cfg.loss, "loss")
    _get_component_from_path(cfg.metric_logger["_component_"])
    optimizer = build.instantiate(cfg.optimizer, "optimizer", [nn.Parameter(torch.zeros(2, 2))])
    steps = {"num_training_steps": 10**6, "last_epoch": -1}
    build.instantiate(cfg.lr_scheduler, "lr_scheduler", optimizer, **steps)
    if options.resume_from_checkpoint:
        checkpoint.check_config(cfg, component, Path(options.output_dir) / "checkpoints")


class RecipeSetup(FullFinetuneRecipeDistributed):
    """torchtune's FSDP2 full fine-tune with its own model setup, data position and resuming.

    Args:
        cfg: the YAML, or the `Run` that was made of it.
    """

    # Nothing, to torchtune, until `setup`.
    _model: Any
    _optimizer: Any
    _loss_fn: Any
    _evaluator: Evaluator
    _identity: dict[str, Any]

    def __init__(self, cfg: DictConfig | Run):
        self.run = Run.of(cfg)
        self.options = self.run.options
        self.identified = self.run.cfg  # the settings that a resumed run must share
        self.output_dir = require_writable_dir(self.options.output_dir)
        device = join_ranks(self.options.device, self.options.dtype)
        # torchtune would look for its own kind of recipe state; ours is restored in `_resume`.
        ours = {"resume_from_checkpoint": False}
        if device.type == "cpu":  # torchtune would say that it measures a GPU's memory only
            ours["log_peak_memory_stats"] = False
        super().__init__(OmegaConf.merge(self.run.cfg, ours))
        self.checkpoint_folder = self.output_dir / "checkpoints"
        self.validation_losses: dict[str, float] = {}
        self.tokens_seen = 0
        self.finished = False
        self.stop_request = StopRequest()
        self._restored_random_state: dict[str, Any] | None = None

    def setup(self, cfg: DictConfig) -> None:
        """Builds everything up to the first step."""
        if cfg is not self.run.cfg and Run.of(cfg).cfg != self.run.cfg:
            raise ValueError("setup takes the config that the recipe was made of; make another one")
        cfg, options = self.run.cfg, self.options
        resume_path = on_first_rank(self._choose_checkpoint)
        resume_meta = read_meta(resume_path) if resume_path else None
        given = options.sensitivity
        artifact = None if given is None else SensitivityArtifact.load(given)
        self.component = build.make_component(cfg.quantizer)
        on_meta = build.checked_on_meta(cfg, self.component)
        names = list(quantized_linears(on_meta))
        if artifact is not None:
            artifact.check_model(names)
        start = None
        if options.reconstruction is not None:
            start = read_results(options.reconstruction, self.component.method.key(), names)
        self._tokenizer = build.make_tokenizer(cfg.tokenizer, on_meta)
        if options.eval.every_n_steps or options.eval.at_end:
            self._evaluator = Evaluator(options.eval, self._tokenizer, on_meta.max_seq_len)
        self._loss_fn = build.instantiate(cfg.loss, "loss")
        ignored = self._loss_fn.ignore_index
        self.data = TrainingData(cfg, self._tokenizer, ignore_index=ignored, seed=self.seed)
        self.total_steps = self.data.total_steps
        if resume_path is not None:  # at once: a stream cannot go on on other ranks
            same_ranks = resume_meta["world_size"] == self.world_size
            rank_state = read_json(resume_path / f"rank_{self.rank * same_ranks}.json")
            self.data.restore(rank_state["dataloader"])

        plain = build.plain_on_meta(cfg.model)
        state = pretrained = {}
        teacher = options.distillation.teacher if options.distillation.weight else None
        if "pretrained" in (options.init, teacher):
            read = partial(self.read_pretrained, plain, artifact)
            state = pretrained = on_first_rank(read, share=False) or {}
        if options.init == "random":
            folder = pretrained_folder(cfg.checkpointer)
            make = partial(build.random_state, plain, folder, self.seed)
            state = on_first_rank(make, share=False) or {}
        if start is not None:
            make = partial(reconstructed, state, options.reconstruction, start)
            state = on_first_rank(make, share=False) or {}
            if start.get("validation") == validation_identity(cfg):
                self.validation_losses |= start["validation_loss"]
            elif self.data.val_loader is not None and resume_path is None:
                utils.log_rank_zero(
                    log,
                    "the reconstruction has no losses on these validation data, so those before it "
                    "are left out; hestia_reconstruct with these data measures them",
                )
        self.schedule = self._make_schedule(state, names, resume_meta)
        scores = None if artifact is None else artifact.scores
        identify = partial(self._identify, state, names, scores, resume_meta)
        self._identity = on_first_rank(identify)

        if self._is_rank_zero:
            self._metric_logger = build.instantiate(cfg.metric_logger, "metric_logger")
            self._metric_logger.log_config(cfg)
        self._compile = cfg.compile
        self._model = self.build_model(state)
        build.make_head_contiguous(self._model)  # it validates in chunks
        if cfg.compile:
            training.compile_loss(self._loss_fn, verbose=self._is_rank_zero)
        if type(self._loss_fn).__name__ == "CEWithChunkedOutputLoss":
            self._model.set_num_output_chunks(self._loss_fn.num_output_chunks)
        self._teacher = None
        if options.distillation.weight:
            mesh, dtype, device = self._mesh, self._dtype, self._device
            self._teacher = make_teacher(self.run, pretrained, mesh, dtype, device)
            self._teacher.num_output_chunks = self._model.num_output_chunks
            build.make_head_contiguous(self._teacher)
        self.driver = self.make_driver(scores)
        self._statistics = None
        if options.code_statistics:
            self._statistics = CodeStatistics(quantized_linears(self._model), self._device)
        self._optimizer = self._setup_optimizer(cfg.optimizer)
        self._lr_scheduler = self._setup_lr_scheduler(cfg.lr_scheduler, self.total_steps, -1)
        self._profiler = self._setup_profiler(cfg.profiler)
        if resume_path is not None:
            self._resume(resume_path, resume_meta, rank_state)
        if self._is_rank_zero:
            if resume_path is None:  # an earlier run's, and only now that nothing can fail any more
                for name in ("checkpoints", "hard_model", "results.json", "curves.png"):
                    remove(self.output_dir / name)
            self.history = History(self.output_dir / "metrics.jsonl", self.global_step)

    def _choose_checkpoint(self) -> Path | None:
        folder = check_output(self.options)
        if not self.options.resume_from_checkpoint:
            return None
        found = complete_checkpoints(folder)
        if not found:
            raise ValueError(
                f"no complete checkpoint in {folder}; set resume_from_checkpoint=False to start"
            )
        for _, path in reversed(found):
            problem = find_damage(path)
            if problem is None:
                return path
            log.warning(f"{problem}; going on from the newest one before it that is whole")
        raise ValueError(
            f"every checkpoint in {folder} is damaged; set overwrite_output=True and "
            "resume_from_checkpoint=False to start anew"
        )

    def read_pretrained(
        self, plain: nn.Module, artifact: SensitivityArtifact | None
    ) -> dict[str, torch.Tensor]:
        """The pretrained state dict, checked against the model and the sensitivity file."""
        load = self._checkpoint_client.load_base_checkpoint
        loaded = build.read_checkpoint(load, plain, self.run.cfg.checkpointer)
        if artifact is not None:
            weights = {name: loaded[f"{name}.weight"] for name in artifact.scores}
            artifact.check_model(artifact.scores, model_fingerprint(weights))
        return loaded

    def _make_schedule(
        self, state: dict[str, torch.Tensor], names: list[str], resume_meta: dict[str, Any] | None
    ) -> AnnealingSchedule:
        tau_init: Any = self.options.schedule.tau_init
        if tau_init == "auto" and resume_meta is not None:
            tau_init = resume_meta["identity"]["schedule.tau_init"]
        elif tau_init == "auto":
            weights = (state[f"{name}.weight"].to(self._device, torch.float32) for name in names)
            tau_init = on_first_rank(partial(self.component.method.fit_temperature, weights))
            utils.log_rank_zero(log, f"tau_init auto: {tau_init:.4f}")
        return AnnealingSchedule.of(self.total_steps, self.options.schedule, tau_init=tau_init)

    def _identify(
        self,
        state: dict[str, torch.Tensor],
        names: list[str],
        scores: dict[str, float] | None,
        resume_meta: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """What must be the same when a run is resumed; a ValueError if it is not."""
        shape = ("rho", "tau_init", "alpha", "hard_fraction")
        identity = {
            **checkpoint.config_identity(self.identified, self.component),
            "model_fingerprint": model_fingerprint({n: state[f"{n}.weight"] for n in names}),
            **{f"schedule.{key}": getattr(self.schedule, key) for key in shape},
            "sensitivity": digest(scores),
            "seed": self.seed,
            **self.data.identity(),
        }
        if resume_meta:
            checkpoint.check_same(identity, resume_meta)
        return identity

    def build_model(self, state: dict[str, torch.Tensor]) -> nn.Module:
        """Prepared, compiled, checkpointed, sharded and loaded, in this order.

        FSDP is applied on one process too: it does the mixed precision, and one code path is easier
        to keep exact than two.
        """
        options = self.options
        model = build.build_on_meta(self.run.cfg.model, self.component)
        for name in options.frozen_modules or ():
            model.get_submodule(name).requires_grad_(False)
        if options.compile:
            sharding.compile_blocks(model)
        sharding.apply_activation_checkpointing(model, options)
        sharded.quantize_shards(model)
        self._mesh = init_device_mesh(self._device.type, (self.world_size,), mesh_dim_names=("dp",))
        sharding.shard(model, self._mesh, self._dtype, options)
        sharding.materialize(model, state, self._device, options.fsdp_cpu_offload)
        self.activations_handling_ctx = training.get_act_offloading_ctx_manager(
            model, options.enable_activation_offloading
        )
        return model

    def make_driver(self, scores: dict[str, float] | None) -> ScheduleDriver:
        """What hands pressure and temperature to the layers, and has them quantize their shards."""
        layers = quantized_linears(self._model)
        requantize = partial(sharded.refresh, self._model, self._dtype, compiled=self._compile)
        return ScheduleDriver(self.schedule, layers, scores, requantize)

    def _setup_optimizer(
        self,
        cfg_optimizer: DictConfig,
        optimizer_in_bwd: bool = False,
        opt_state_dict: dict[str, Any] | None = None,
    ) -> torch.optim.Optimizer:
        """The configured optimizer. Norms and biases, being vectors, are not decayed, nor are
        parameters of the method, which may have a learning rate of their own."""
        try:
            optimizer = super()._setup_optimizer(cfg_optimizer, optimizer_in_bwd, opt_state_dict)
        except (TypeError, ValueError) as error:
            raise ValueError(f"optimizer {cfg_optimizer}: {error}; mend its options") from error
        layers = quantized_linears(self._model).values()
        own = {id(p) for layer in layers for p in layer.method_parameters()}
        (group,) = optimizer.param_groups
        added = {id(layer.added_bias) for layer in layers}  # which follow from latent weights
        trained = [p for p in group["params"] if p.requires_grad and id(p) not in added]
        group["params"] = [p for p in trained if p.dim() >= 2 and id(p) not in own]
        if vectors := [p for p in trained if p.dim() < 2 and id(p) not in own]:
            optimizer.add_param_group({"params": vectors, "weight_decay": 0.0})
        if methods := [p for p in trained if id(p) in own]:
            lr = self.component.parameter_lr
            rate = {} if lr is None else {"lr": lr}
            optimizer.add_param_group({"params": methods, "weight_decay": 0.0, **rate})
        return optimizer

    def _resume(self, path: Path, meta: dict[str, Any], rank_state: dict[str, Any]) -> None:
        checkpoint.load_checkpoint(path, model=self._model, optimizer=self._optimizer)
        self.global_step, self.epochs_run = meta["step"], rank_state["epoch"]
        self.tokens_seen = meta.get("tokens_seen", 0)
        self.validation_losses = dict(meta["validation_losses"])
        if self._lr_scheduler is not None:
            self._lr_scheduler.load_state_dict(rank_state["lr_scheduler"])
        if meta["world_size"] == self.world_size:
            self._restored_random_state = rank_state["random"]
        utils.log_rank_zero(log, f"Resumed from {path} at step {self.global_step}")
