"""Train by QAT: torchtune's FSDP2 full fine-tune with our model, losses, data and resuming.

torchtune ships its recipes as files, not as importable modules. Its package ``recipes`` raises an
error on import. This file therefore loads the FSDP2 full fine-tune by its path. No other file does.

output_dir/
    hard_model/        the deployable model, in Hugging Face format and bfloat16
    checkpoints/       checkpoints to resume from (see `hestia_tune.training.checkpoint`)
    metrics.jsonl      one JSON line per logged step
    results.json       losses before and after training, settings, versions
    curves.png         curves of loss, pressure and temperatures
    logs/              files of torchtune's metric logger
"""

import contextlib
import dataclasses
import importlib.util
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torchao
import torchtune
from omegaconf import DictConfig, OmegaConf
from torch.distributed.fsdp import FSDPModule
from torchtune import training

import hestia_tune
from hestia_tune.config.run_config import RunConfig
from hestia_tune.data import DataStreamError
from hestia_tune.data.sequences import IGNORE_INDEX
from hestia_tune.devices import compile_backend, move_batch
from hestia_tune.distributed import (
    StopRequest,
    end_process_group,
    on_first_rank,
    progress_bar,
    totals_over_ranks,
)
from hestia_tune.errors import InputError, NotFiniteError, one_line
from hestia_tune.evaluation import metrics_of
from hestia_tune.files import remove, write_json
from hestia_tune.graphs import Graphed
from hestia_tune.losses import output_chunks, training_loss
from hestia_tune.models import loading
from hestia_tune.plots import plot_training_curves
from hestia_tune.qat.linear import full_tensor, quantized_linears
from hestia_tune.qat.shards import hard_state_dict
from hestia_tune.run import TrainingRun, join_ranks
from hestia_tune.training import checkpoint, monitoring, outputs
from hestia_tune.training.build import build
from hestia_tune.training.checkpoint import Resume
from hestia_tune.training.loader import shifted_labels
from hestia_tune.training.monitoring import CodeStatistics, History, StepResult
from hestia_tune.training.optimizer import make_optimizer

_path = Path(torchtune.__file__).parent.parent / "recipes" / "full_finetune_distributed.py"
_spec: Any = importlib.util.spec_from_file_location("torchtune_full_finetune_distributed", _path)
_module: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
# A recipe uses the existing process group. Ending a gloo group and forming another one sometimes
# hangs under torchrun. This changes a private copy of the module.
_module.init_process_group = lambda backend: None
FullFinetuneRecipeDistributed = _module.FullFinetuneRecipeDistributed

log = logging.getLogger(__name__)


def _plain_state(scheduler: Any) -> dict[str, Any]:
    """Return the state of a learning-rate scheduler with numbers in place of tensors."""
    state = scheduler.state_dict()
    return state | {"_last_lr": [float(rate) for rate in state["_last_lr"]]}


class HestiaQATRecipe(FullFinetuneRecipeDistributed):
    """Train latent weights through relaxed quantization, and write the hard model.

    Args:
        cfg: The YAML as a mapping, or the parsed `RunConfig`.

    Attributes:
        finished: Whether `train` reached the last step.
    """

    # torchtune's recipe sets these to None until `setup`.
    _model: Any
    _optimizer: Any
    _loss_fn: Any
    history: History

    def __init__(self, cfg: DictConfig | Mapping[str, Any] | RunConfig):
        self.config = RunConfig.parse(cfg)
        join_ranks(self.config.device, self.config.dtype)
        # torchtune would look for its own recipe state. `_resume` restores ours.
        options = dataclasses.asdict(self.config) | {"resume_from_checkpoint": False}
        super().__init__(OmegaConf.create(options))
        self.output_dir = Path(self.config.output_dir)
        self.checkpoint_folder = self.output_dir / "checkpoints"
        self.tokens_seen = 0
        self.finished = False
        self.stop_request = StopRequest()
        self._restored_random_state: dict[str, Any] | None = None

    def setup(self, cfg: DictConfig | Mapping[str, Any] | RunConfig) -> None:
        """Check the run and build everything up to the first step. Collective."""
        if RunConfig.parse(cfg) != self.config:
            raise InputError("setup needs the config that the recipe was made of; got another one")
        self.build(TrainingRun.of(self.config))

    def build(self, run: TrainingRun) -> None:
        """Build everything up to the first step of a run. Collective."""
        self.run, self.config, config = run, run.config, run.config
        self.data, self.seed = run.data, config.seed
        self.total_steps = run.data.total_steps
        built = build(run)
        run.pretrained.release()
        self._model, self._teacher, self._weights = built.model, built.teacher, built.weights
        self.schedule, self.driver = built.schedule, built.driver
        self._identity, self.validation_losses = built.identity, built.losses
        self._validation = outputs.validation_identity(config)
        self._hard_start = built.hard_start
        if self._is_rank_zero:
            is_disk = str(config.metric_logger["_component_"]).endswith(".DiskLogger")
            with contextlib.redirect_stdout(None if is_disk else sys.stdout):  # it prints its path
                self._metric_logger = loading.instantiate(config.metric_logger, "metric_logger")
            self._metric_logger.log_config(OmegaConf.create(dataclasses.asdict(config)))
        self._loss_fn = run.loss
        if config.compile:
            if hasattr(run.loss, "compute_cross_entropy"):  # of one chunk of the logits
                compute = run.loss.compute_cross_entropy
                run.loss.compute_cross_entropy = torch.compile(compute, backend=compile_backend())
            else:
                run.loss.compile(backend=compile_backend())
        if chunks := output_chunks(run.loss):
            self._model.set_num_output_chunks(chunks)
        if self._teacher is not None:
            self._teacher.num_output_chunks = self._model.num_output_chunks
            if run.drops_logits == "recompute" and isinstance(
                self._teacher, FSDPModule
            ):  # its head runs again in the model's backward pass
                self._teacher.set_reshard_after_forward(False, recurse=False)
        self.activations_handling_ctx = training.get_act_offloading_ctx_manager(
            self._model, config.enable_activation_offloading
        )
        self._graphed: Graphed | None = None
        if run.graphs_micro_batches:
            self._graphed = Graphed(
                self._device,
                what="micro-batches",
                sums=self._weights.sums,
                reset=self._weights.reset,
            )
        # Walking through the modules of a small model takes longer than its optimizer step.
        self._parameters = [*self._model.parameters()]
        self._statistics = CodeStatistics(quantized_linears(self._model))
        self._optimizer = make_optimizer(
            config.optimizer,
            self._parameters,
            quantized_linears(self._model).values(),
            run.component.parameter_lr,
        )
        steps = {"num_training_steps": self.total_steps, "last_epoch": -1}
        self._lr_scheduler = loading.instantiate(
            config.lr_scheduler, "lr_scheduler", self._optimizer, **steps
        )
        if self._lr_scheduler is not None:  # torchao's rates are tensors, which JSON cannot hold
            self._lr_scheduler.base_lrs = [float(rate) for rate in self._lr_scheduler.base_lrs]
        self._profiler: Any = training.DummyProfiler()
        if config.profiler:  # without one, torchtune's own function would warn
            self._profiler = self._setup_profiler(OmegaConf.create(config.profiler))
        if run.resume is not None:
            self._resume(run.resume)
        self._seconds = 0.0  # of all steps until now, on rank 0
        if self._is_rank_zero:
            if run.resume is None:  # delete an earlier run's files now that all checks passed
                for name in ("checkpoints", "hard_model", "results.json", "curves.png"):
                    remove(self.output_dir / name)
                evaluation = Path(config.eval.output)  # of the earlier model
                if evaluation.parent == self.output_dir:
                    remove(evaluation)
            self.history = History(self.output_dir / "metrics.jsonl", self.global_step)
            self._seconds = max((row.get("seconds", 0.0) for row in self.history.rows), default=0.0)

    def _resume(self, resume: Resume) -> None:
        """Restore weights, optimizer, scheduler and random numbers from a checkpoint."""
        checkpoint.load_checkpoint(resume.path, model=self._model, optimizer=self._optimizer)
        self.global_step, self.epochs_run = resume.meta["step"], resume.rank_state["epoch"]
        self.tokens_seen = resume.meta.get("tokens_seen", 0)
        self.validation_losses = dict(resume.meta["validation_losses"])
        if resume.meta.get("validation", self._validation) != self._validation:
            log.info(
                "the validation data are not those of the checkpoint, so the table has no losses "
                "from before training"
            )
            self.validation_losses = {}
        if self._lr_scheduler is not None:
            self._lr_scheduler.load_state_dict(resume.rank_state["lr_scheduler"])
        if resume.meta["world_size"] == self.world_size:
            self._restored_random_state = resume.rank_state["random"]
        log.info(f"continuing after step {self.global_step}, from {resume.path}")
        if odd := checkpoint.machine_differences(self.config.machine_settings, resume.meta):
            log.info(f"the checkpoint is from a run with {odd}")

    def loss_sum(
        self, batch: dict[str, Any], teacher: torch.nn.Module | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the loss over the predicted tokens of a batch, and their number.

        Args:
            batch: The batch. Its labels are removed.
            teacher: The model to distil from. The loss is then the config's loss mixed with the
                distillation loss. None takes the config's loss alone.
        """
        move_batch(batch, self._device)
        labels = shifted_labels(batch.pop("labels"))
        count = (labels != IGNORE_INDEX).sum()
        total = training_loss(
            self._model,
            teacher,
            batch,
            labels,
            self._loss_fn,
            self.config,
            compiled=bool(self.config.compile),
            drop=self.run.drops_logits,
            context=self.activations_handling_ctx,
        )
        return total, count

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over the validation tokens on every rank. Collective."""
        self._model.eval()
        loss = self.data.validation_loss(self.loss_sum, self.config.max_val_batches, self._device)
        self._model.train()
        return loss

    def _evaluate_baselines(self) -> None:
        """Measure the validation losses of the models before training."""
        log.info("measuring the validation loss before training")
        hard = f"naive {self.run.component.name}"  # quantized without training
        if self.config.reconstruction is None:
            with self.driver.latent(self._hard_start):
                self.validation_losses[self.config.init] = self.evaluate()
        else:  # the reconstruction has measured the pretrained and the naive model
            hard = outputs.RECONSTRUCTED
        known = set() if self.config.reconstruction is None else {*self.validation_losses}
        with self.driver.hard():
            self.validation_losses[hard] = self.evaluate()
        for label, loss in self.validation_losses.items():
            if label not in known or label == hard:
                log.info(f"validation loss, {label}: {loss:.4f}")

    def _validate(self) -> None:
        """Measure and log the validation losses of the relaxed and of the hard model."""
        self.driver.set_step(self.global_step)
        relaxed = self.evaluate()
        with self.driver.hard():
            hard = self.evaluate()
        self._log({"val_loss_relaxed": relaxed, "val_loss_hard": hard})
        self.validation_losses[outputs.HARD] = hard

    def _evaluate_tasks(self) -> None:
        """Evaluate the hard model on the ``eval`` section's tasks and texts, and log the results.

        An evaluation may fail for reasons outside of training, so `train` saves a checkpoint first.
        """
        with self.driver.hard():
            result = self.run.evaluator.evaluate("hard", self._model, {}, self._device)
        self._log(metrics_of(result))

    def _is_due(self, every: int | None) -> bool:
        """Return whether something is due now that happens every so many steps (None: never)."""
        return bool(every) and self.global_step % every == 0

    def _measure(self) -> None:
        """Validate, and evaluate tasks, if they are due after this step and not logged yet.

        After the last step, `train` evaluates tasks later.
        """
        at_end = self.global_step == self.total_steps
        if at_end or self._is_due(self.config.run_val_every_n_steps):
            logged = self._logged()
            if "val_loss_hard" in logged:
                self.validation_losses[outputs.HARD] = logged["val_loss_hard"]
            elif self.data.val_loader is not None:
                with self._saving_first():
                    self._validate()
        if not at_end:
            self._evaluate_if_due()

    def _evaluate_if_due(self) -> None:
        """Evaluate tasks if they are due after this step and not logged yet."""
        is_due = self._is_due(self.config.eval.every_n_steps)
        if is_due and not any(name.startswith("eval/") for name in self._logged()):
            self._evaluate_tasks()

    def _logged(self) -> dict[str, float]:
        """Return what the history has for the present step, on every rank."""
        return on_first_rank(lambda: self.history.at(self.global_step)) or {}

    def _log(self, metrics: dict[str, float]) -> None:
        """Append metrics of the present step to the history and to the metric logger."""
        if not self._is_rank_zero:
            return
        try:
            self.history.append({"step": self.global_step} | metrics)
            self._metric_logger.log_dict(metrics, step=self.global_step)
        except Exception as error:  # a failing service or a full disk must not end the run
            log.warning(f"step {self.global_step} could not be logged: {one_line(error)}")

    @contextmanager
    def _saving_first(self, position: Any = None) -> Iterator[None]:
        """Save a checkpoint if the body raises an error of the data or of the numbers.

        Args:
            position: Position of the data to save. None takes the present position.
        """
        try:
            yield
        except (DataStreamError, NotFiniteError):  # all ranks raise these together
            path = self.checkpoint_folder / f"step_{self.global_step}"
            if self.global_step and not path.exists():
                self._save(position)
            raise

    def _save(self, position: Any = None) -> None:
        """Write a checkpoint. Collective.

        Args:
            position: Position of the data to save. None takes the present position.
        """
        monitoring.check_finite(self._model, self._device, self.global_step)
        epoch_done = self.global_step == (self.epochs_run + 1) * self.data.steps_per_epoch
        scheduler = self._lr_scheduler
        checkpoint.save_checkpoint(
            self.checkpoint_folder,
            self.global_step,
            model=self._model,
            optimizer=self._optimizer,
            rank_state={
                "epoch": self.epochs_run + epoch_done,
                "dataloader": None if epoch_done else position or self.data.position(),
                "lr_scheduler": None if scheduler is None else _plain_state(scheduler),
                "random": checkpoint.random_state(self._device),
            },
            meta={
                "identity": self._identity,
                "machine": self.config.machine_settings,
                # Without the loss of the hard model, which `_measure` reads from the history.
                "validation_losses": {
                    k: v for k, v in self.validation_losses.items() if k != outputs.HARD
                },
                "validation": self._validation,
                "tokens_seen": self.tokens_seen,
                "date": self.data.date,
            },
            keep_last=self.config.keep_last_checkpoints,
        )

    def train(self) -> None:
        """Train to the last step and set ``finished``. In a step, Ctrl-C saves and stops."""
        if self._device.type == "cuda":
            training.cleanup_before_training()
        steps = self.total_steps - self.global_step
        stage = "stage 3: " if self.config.reconstruction is not None else ""
        log.info(f"{stage}training the whole model for {steps} steps")
        if self.config.compile and steps:
            log.info("compiling the first step, which takes a minute or two")
        if self.global_step:
            self._measure()  # the resumed run may have stopped before it measured
        elif self.data.val_loader is not None:
            self._evaluate_baselines()
        if self.global_step < self.total_steps:
            self._statistics.update()
        progress = progress_bar(
            total=self.total_steps, initial=self.global_step, desc="training", unit=" steps"
        )
        self._profiler.start()
        with progress, self.stop_request.installed():
            while self.global_step < self.total_steps:
                epoch_end = (self.epochs_run + 1) * self.data.steps_per_epoch
                if self.global_step == self.epochs_run * self.data.steps_per_epoch:
                    self._restore_random_state()  # the beginning of an epoch draws from it
                batches = self.data.begin(self.epochs_run)
                self._restore_random_state()  # for a run that resumes within an epoch
                for _ in range(self.global_step, min(epoch_end, self.total_steps)):
                    started = time.perf_counter()
                    with self._saving_first(self.data.position()):
                        result = self.train_step(self.data.fetch(batches))
                    progress.update(1)
                    read = self.data.tokens_read(self.global_step, self.tokens_seen)
                    progress.set_postfix_str(f"{read}, loss {result.loss:.4f}", refresh=False)
                    self._log_step(result, time.perf_counter() - started)
                    at_end = self.global_step == self.total_steps
                    every = (self.config.save_every_n_steps, self.config.eval.every_n_steps)
                    if at_end or result.stop_requested or any(map(self._is_due, every)):
                        self._save()  # before slow work: torchrun kills a rank after 30 seconds
                    if result.stop_requested and not at_end:
                        self._profiler.stop()
                        return
                    self._measure()
                self.epochs_run += 1
        self._profiler.stop()
        self._finish()
        self._evaluate_if_due()  # after the results are written, because an evaluation may fail
        self.finished = True

    def _add_gradients(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the gradients of a micro-batch, and return its loss and its number of tokens."""
        loss, count = self.loss_sum(dict(batch), self._teacher)
        loss.backward()
        self._weights.accumulate()
        return loss.detach(), count

    def train_step(self, batches: Sequence[dict[str, Any]]) -> StepResult:
        """Make one optimizer step on this rank's micro-batches. Collective."""
        step = self.global_step
        self.driver.set_step(step)
        if self._is_rank_zero:
            monitoring.record_memory_history(self, step)
        losses, counts = [], []
        for index, batch in enumerate(batches):
            if (graphed := self._graphed) is None:
                loss, count = self._add_gradients(batch)
            else:
                move_batch(batch, self._device)
                found = graphed(self._add_gradients, batch, is_first=index == 0)
                loss, count = (value.clone() for value in found)  # The next replay overwrites them.
            losses.append(loss)
            counts.append(count)
        stop = float(self.stop_request.requested)
        sums = [torch.stack(losses).sum(), torch.stack(counts).sum(), stop]
        # With offloading the gradients are on the CPU, and the host waits here, not further down.
        totals = totals_over_ranks(sums, self._device).to(self._parameters[0].device)
        # FSDP averages gradients over ranks. The loss is a mean over the tokens on every rank.
        scale = totals.new_full((), self.world_size) / totals[1]
        self._weights.pull_back(scale.float())
        norm = self.clip_gradients()
        # One copy to the host, and so one wait for the GPU, before bad gradients reach the weights.
        found = [*totals] if norm is None else [*totals, norm.double()]
        loss_sum, num_tokens, stop_requests, *norms = torch.stack(found).tolist()
        grad_norm = norms[0] if norms else None
        monitoring.check_step(loss_sum, num_tokens, grad_norm, self._model, self._device, step)
        self._learning_rate = float(self._optimizer.param_groups[0]["lr"])
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._lr_scheduler is not None:
            self._lr_scheduler.step()
        self._profiler.step()
        self.global_step += 1
        self.tokens_seen += int(num_tokens)
        return StepResult(loss_sum / num_tokens, int(num_tokens), grad_norm, stop_requests > 0)

    def _log_step(self, result: StepResult, seconds: float) -> None:
        """Log the metrics of the last step if it is a step to log. Collective.

        Args:
            result: The result of the step.
            seconds: Duration of the step, including the wait for data.
        """
        self._seconds += seconds
        if self.global_step % self._log_every_n_steps and self.global_step != self.total_steps:
            return
        step = self.global_step - 1  # this step has set the temperatures
        taus = list(self.driver.temperatures(step).values())
        metrics = {
            "loss": result.loss,
            "lr": self._learning_rate,
            "tokens_per_second_per_gpu": result.num_tokens / seconds / self.world_size,
            "tokens_seen": self.tokens_seen,
            "seconds": round(self._seconds, 3),
            "data_wait": self.data.seconds_waited / seconds,
            "pressure": self.schedule.pressure(step),
            "tau_min": min(taus),
            "tau_mean": sum(taus) / len(taus),
            "tau_max": max(taus),
        }
        if result.grad_norm is not None:
            metrics["grad_norm"] = result.grad_norm
        metrics |= self._statistics.update()
        self._log(metrics | monitoring.memory_metrics(self._device))

    def _restore_random_state(self) -> None:
        """Restore the random-number state of the checkpoint, at the first call only."""
        if self._restored_random_state is not None:
            checkpoint.set_random_state(self._restored_random_state, self._device)
            self._restored_random_state = None

    def clip_gradients(self) -> torch.Tensor | None:
        """Clip the gradient. Return its norm before clipping, or None without. Collective."""
        if self._clip_grad_norm is None:
            return None
        norm = torch.nn.utils.clip_grad_norm_(
            self._parameters, max_norm=float(self._clip_grad_norm)
        )
        return full_tensor(norm)

    def _finish(self) -> None:
        """Write the hard model, the results and the curves. Collective."""
        state, losses = hard_state_dict(self._model), self.validation_losses
        description = {
            "hestia_tune": hestia_tune.__version__,
            "step": self.global_step,
            **self.run.component.describe(self._model),
            "validation_loss": losses,
            **outputs.provenance(self.config, self.tokens_seen),
            **self._identity,
        }
        if self.data.is_stream:
            sequences = self.global_step * self.data.sequences_per_step
            description["stream"] = {"sequences": sequences}
        log.info(f"writing the trained model to {self.output_dir / 'hard_model'}")

        def write() -> None:
            folder, checkpointer = self.output_dir, self.run.checkpointer
            outputs.write_hard_model(state, checkpointer, folder / "hard_model", description)
            modules = (hestia_tune, torch, torchao, torchtune)
            versions = {module.__name__: module.__version__ for module in modules}
            machine = {"versions": versions, "machine": self.config.machine_settings}
            write_json(folder / "results.json", description | machine)
            by_step = [self.driver.temperatures(step) for step in range(self.total_steps + 1)]
            temperatures = {name: [row[name] for row in by_step] for name in by_step[0]}
            others = {label: loss for label, loss in losses.items() if label != outputs.HARD}
            plot_training_curves(
                self.history.rows,
                temperatures,
                others,
                folder / "curves.png",
                before=outputs.stage_seconds(self.run.start),
                has_teacher=self._teacher is not None,
            )

        on_first_rank(write, share=False)

    @property
    def model(self) -> torch.nn.Module:
        """The prepared, sharded model."""
        return self._model

    def summary(self) -> str:
        """Return the text to print at the end."""
        if self.finished:
            return (
                f"\n{self.table()}\n\n{self.output_dir} has the trained model (hard_model), the "
                "losses (results.json) and a picture (curves.png)"
            )
        return f"stopped after step {self.global_step} of {self.total_steps}; a checkpoint is kept"

    def table(self) -> str:
        """Return the validation losses as Markdown, or the training losses if there are none."""
        if self.validation_losses:
            return outputs.results_table(self.validation_losses)
        rows = self.history.rows
        return outputs.training_losses({row["step"]: row["loss"] for row in rows if "loss" in row})

    def release(self) -> None:
        """Free the model and close the logger. The process group stays, for another recipe."""
        torch.distributed.barrier()
        self._model = self._teacher = self._optimizer = self.driver = self._weights = None
        self._graphed = None
        self._parameters = []
        if self._is_rank_zero:
            self._metric_logger.close()

    def cleanup(self) -> None:
        """Release the recipe and end the process group. Collective."""
        self.release()
        end_process_group()
