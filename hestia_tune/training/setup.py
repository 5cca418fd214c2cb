"""Set up the recipe before its first step: torchtune's recipe, with the parts of a plan.

torchtune ships its recipes as files, not as importable modules. Its package ``recipes`` raises an
error on import. This file therefore loads the FSDP2 full fine-tune by its path. No other file does.
"""

import dataclasses
import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torchtune
from omegaconf import DictConfig, OmegaConf
from torchtune import training

from hestia_tune.config.run import RunConfig
from hestia_tune.distributed import StopRequest
from hestia_tune.errors import InputError
from hestia_tune.files import remove
from hestia_tune.models import build as models
from hestia_tune.qat.linear import quantized_linears
from hestia_tune.training import checkpoint
from hestia_tune.training.build import build
from hestia_tune.training.checkpoint import Resume
from hestia_tune.training.monitoring import CodeStatistics, History
from hestia_tune.training.plan import Plan, join_ranks, plan

_path = Path(torchtune.__file__).parent.parent / "recipes" / "full_finetune_distributed.py"
_spec: Any = importlib.util.spec_from_file_location("torchtune_full_finetune_distributed", _path)
_module: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
# A recipe uses the existing process group. Ending a gloo group and forming another one sometimes
# hangs under torchrun. This changes a private copy of the module.
_module.init_process_group = lambda backend: None
FullFinetuneRecipeDistributed = _module.FullFinetuneRecipeDistributed

log = logging.getLogger(__name__)


class RecipeSetup(FullFinetuneRecipeDistributed):
    """A recipe on torchtune's FSDP2 full fine-tune, with our model, data position and resuming.

    Args:
        cfg: The YAML as a mapping, or the parsed `RunConfig`.
    """

    # torchtune's recipe sets these to None until `setup`.
    _model: Any
    _optimizer: Any
    _loss_fn: Any
    history: History

    def __init__(self, cfg: DictConfig | Mapping[str, Any] | RunConfig):
        self.config = RunConfig.parse(cfg)
        device = join_ranks(self.config.device, self.config.dtype)
        options = dataclasses.asdict(self.config) | {
            # torchtune would look for its own recipe state. `_resume` restores ours.
            "resume_from_checkpoint": False,
            "log_peak_memory_stats": device.type == "cuda",
        }
        super().__init__(OmegaConf.create(options))
        self.output_dir = Path(self.config.output_dir)
        self.checkpoint_folder = self.output_dir / "checkpoints"
        self.tokens_seen = 0
        self.finished = False
        self.stop_request = StopRequest()
        self._compile = self.config.compile
        self._restored_random_state: dict[str, Any] | None = None

    def setup(self, cfg: DictConfig | Mapping[str, Any] | RunConfig) -> None:
        """Plan the run and build everything up to the first step. Collective."""
        if RunConfig.parse(cfg) != self.config:
            raise InputError("setup needs the config that the recipe was made of; got another one")
        self.build(plan(self.config))

    def build(self, planned: Plan) -> None:
        """Build everything up to the first step, from a plan of this run. Collective."""
        self.plan, self.config, config = planned, planned.config, planned.config
        self.data, self.seed = planned.data, config.seed
        self.total_steps = planned.data.total_steps
        built = build(planned)
        self._model, self._teacher = built.model, built.teacher
        self.schedule, self.driver = built.schedule, built.driver
        self._identity, self.validation_losses = built.identity, built.losses
        self._hard_start = built.hard_start
        if self._is_rank_zero:
            self._metric_logger = models.instantiate(config.metric_logger, "metric_logger")
            self._metric_logger.log_config(OmegaConf.create(dataclasses.asdict(config)))
        self._loss_fn = planned.loss
        if config.compile:
            log.info("compile=True: the first steps compile, which takes a minute or more")
            training.compile_loss(self._loss_fn, verbose=self._is_rank_zero)
        if type(self._loss_fn).__name__ == "CEWithChunkedOutputLoss":
            self._model.set_num_output_chunks(self._loss_fn.num_output_chunks)
        if self._teacher is not None:
            self._teacher.num_output_chunks = self._model.num_output_chunks
            if planned.recomputes_logits:  # its head runs again in the model's backward pass
                self._teacher.set_reshard_after_forward(False, recurse=False)
        self.activations_handling_ctx = training.get_act_offloading_ctx_manager(
            self._model, config.enable_activation_offloading
        )
        self._statistics = CodeStatistics(quantized_linears(self._model))
        self._optimizer = self._setup_optimizer(OmegaConf.create(config.optimizer))
        scheduler = config.lr_scheduler and OmegaConf.create(config.lr_scheduler)
        self._lr_scheduler = self._setup_lr_scheduler(scheduler, self.total_steps, -1)
        profiler = config.profiler and OmegaConf.create(config.profiler)
        self._profiler = self._setup_profiler(profiler)
        if planned.resume is not None:
            self._resume(planned.resume)
        if self._is_rank_zero:
            if planned.resume is None:  # delete an earlier run's files now that all checks passed
                for name in ("checkpoints", "hard_model", "results.json", "curves.png"):
                    remove(self.output_dir / name)
            self.history = History(self.output_dir / "metrics.jsonl", self.global_step)

    def _setup_optimizer(
        self,
        cfg_optimizer: DictConfig,
        optimizer_in_bwd: bool = False,
        opt_state_dict: dict[str, Any] | None = None,
    ) -> torch.optim.Optimizer:
        """Return the configured optimizer with its parameter groups.

        Norms, biases and the method's own parameters have no weight decay. The method's own
        parameters may have a learning rate of their own.

        Args:
            cfg_optimizer: The ``optimizer`` section.
            optimizer_in_bwd: False. torchtune's signature has this argument.
            opt_state_dict: None. torchtune's signature has this argument.
        """
        optimizer = super()._setup_optimizer(cfg_optimizer, optimizer_in_bwd, opt_state_dict)
        layers = quantized_linears(self._model).values()
        own = {id(p) for layer in layers for p in layer.method_parameters()}
        (group,) = optimizer.param_groups
        derived = {id(getattr(layer, name)) for layer in layers for name in layer.derived_names}
        trained = [p for p in group["params"] if p.requires_grad and id(p) not in derived]
        group["params"] = [p for p in trained if p.dim() >= 2 and id(p) not in own]
        if vectors := [p for p in trained if p.dim() < 2 and id(p) not in own]:
            optimizer.add_param_group({"params": vectors, "weight_decay": 0.0})
        if methods := [p for p in trained if id(p) in own]:
            lr = self.plan.component.parameter_lr
            rate = {} if lr is None else {"lr": lr}
            optimizer.add_param_group({"params": methods, "weight_decay": 0.0, **rate})
        return optimizer

    def _resume(self, resume: Resume) -> None:
        """Restore weights, optimizer, scheduler and random numbers from a checkpoint."""
        checkpoint.load_checkpoint(resume.path, model=self._model, optimizer=self._optimizer)
        self.global_step, self.epochs_run = resume.meta["step"], resume.rank_state["epoch"]
        self.tokens_seen = resume.meta.get("tokens_seen", 0)
        self.validation_losses = dict(resume.meta["validation_losses"])
        if self._lr_scheduler is not None:
            self._lr_scheduler.load_state_dict(resume.rank_state["lr_scheduler"])
        if resume.meta["world_size"] == self.world_size:
            self._restored_random_state = resume.rank_state["random"]
        log.info(f"resumed from {resume.path} at step {self.global_step}")
