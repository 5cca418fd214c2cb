"""The QAT recipe: the train loop, validation, saving, and what a finished run leaves behind.

output_dir/
    hard_model/        the deployable model, Hugging Face format, bfloat16
    checkpoints/       resumable (see `hestia_tune.training.checkpoint`)
    metrics.jsonl      one JSON line per logged step
    results.json       losses before and after, settings, versions
    curves.png         loss, pressure and the fan of temperatures
    logs/              torchtune's metric logger
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torchao
import torchtune
from torchtune import training, utils

import hestia_tune
from hestia_tune import sharded
from hestia_tune.config import one_line
from hestia_tune.data import DataStreamError
from hestia_tune.distributed import end_process_group, on_first_rank, progress_bar, sum_over_ranks
from hestia_tune.evaluation import metrics_of
from hestia_tune.files import write_json
from hestia_tune.modules import full_tensor
from hestia_tune.plots import plot_training_curves
from hestia_tune.training import checkpoint, monitoring, outputs
from hestia_tune.training.data import shifted_labels
from hestia_tune.training.distillation import distillation_loss_sum
from hestia_tune.training.monitoring import StepResult
from hestia_tune.training.setup import RecipeSetup

log = utils.get_logger("DEBUG")


class HestiaQATRecipe(RecipeSetup):
    """Trains latent weights through relaxed quantization and writes the hard model.

    Attributes:
        finished: whether `train` reached the last step.
    """

    def train(self) -> None:
        """Trains to the end, or to the first Ctrl-C, which saves; sets ``finished``."""
        if self._device.type == "cuda":
            training.cleanup_before_training()
        if self.global_step:
            self._measure()  # what the run that is resumed did not come to
        elif self.data.val_loader is not None:
            self._evaluate_baselines()
        if self._statistics is not None and self.global_step < self.total_steps:
            self._statistics.update()
        progress = progress_bar(total=self.total_steps, initial=self.global_step)
        self._profiler.start()
        with progress, self.stop_request.installed():
            while self.global_step < self.total_steps:
                epoch_end = (self.epochs_run + 1) * self.data.steps_per_epoch
                if self.global_step == self.epochs_run * self.data.steps_per_epoch:
                    self._restore_random_state()  # from which the epoch's beginning draws
                batches = self.data.begin(self.epochs_run)
                self._restore_random_state()  # within an epoch
                for _ in range(self.global_step, min(epoch_end, self.total_steps)):
                    started = time.perf_counter()
                    with self._saving_first(self.data.position()):
                        result = self.train_step(self.data.fetch(batches))
                    progress.update(1)
                    read = self.data.tokens_read(self.global_step, self.tokens_seen)
                    progress.set_postfix_str(f"{read}, loss {result.loss:.4f}", refresh=False)
                    self._log_step(result, time.perf_counter() - started)
                    at_end = self.global_step == self.total_steps
                    every = (self.options.save_every_n_steps, self.options.eval.every_n_steps)
                    if at_end or result.stop_requested or any(map(self._is_due, every)):
                        self._save()  # before what may take long: torchrun's patience is 30 seconds
                    if result.stop_requested and not at_end:
                        self._profiler.stop()
                        return
                    self._measure()
                self.epochs_run += 1
        self._profiler.stop()
        self._finish()
        if self.options.eval.at_end:
            self._evaluate_tasks()
        self.finished = True

    def train_step(self, batches: Sequence[dict[str, Any]]) -> StepResult:
        """One optimizer step on this rank's micro-batches. Collective."""
        step = self.global_step
        self.driver.set_step(step)
        if self._is_rank_zero:
            monitoring.record_memory_history(self, step)
        losses, counts = [], []
        for batch in batches:
            loss, count = self.loss_sum(batch, self._teacher)
            loss.backward()
            losses.append(loss.detach())
            counts.append(count)
        stop = float(self.stop_request.requested)
        sums = [torch.stack(losses).sum(), torch.stack(counts).sum(), stop]
        loss_sum, num_tokens, stop_requests = sum_over_ranks(sums, self._device)
        monitoring.check_loss(loss_sum, num_tokens, self._model, self._device, step)
        # FSDP averages gradients over ranks; the loss is a mean over the tokens of all of them.
        scale = torch.tensor(self.world_size / num_tokens, device=self._device)
        training.scale_grads(self._model, scale)
        sharded.pull_back(self.driver.layers.values(), compiled=self._compile)
        grad_norm = self.clip_gradients()
        monitoring.check_gradient(grad_norm, step)
        self._learning_rate = self._optimizer.param_groups[0]["lr"]
        self._optimizer.step()
        strength = self.options.cage.at((step + 1) / self.total_steps)
        sharded.pull_to_codes(self._optimizer, self.driver.layers.values(), strength)
        self._optimizer.zero_grad(set_to_none=True)
        if self._lr_scheduler is not None:
            self._lr_scheduler.step()
        self._profiler.step()
        self.global_step += 1
        self.tokens_seen += int(num_tokens)
        return StepResult(loss_sum / num_tokens, int(num_tokens), grad_norm, stop_requests > 0)

    def _log_step(self, result: StepResult, seconds: float) -> None:
        if self.global_step % self._log_every_n_steps and self.global_step != self.total_steps:
            return
        step = self.global_step - 1  # whose temperatures it was
        taus = list(self.driver.temperatures(step).values())
        metrics = {
            "loss": result.loss,
            "lr": self._learning_rate,
            "tokens_per_second_per_gpu": result.num_tokens / seconds / self.world_size,
            "tokens_seen": self.tokens_seen,
            "data_wait": self.data.seconds_waited / seconds,
            "pressure": self.schedule.pressure(step),
            "tau_min": min(taus),
            "tau_mean": sum(taus) / len(taus),
            "tau_max": max(taus),
        }
        if result.grad_norm is not None:
            metrics["grad_norm"] = result.grad_norm
        if self._statistics is not None:
            metrics |= self._statistics.update()
        self._log(metrics | monitoring.memory_metrics(self._device, self._log_peak_memory_stats))

    def _is_due(self, every: int | None) -> bool:
        return bool(every) and self.global_step % every == 0

    def _measure(self) -> None:
        """Validation and tasks, where they are due after this step and were not logged."""
        at_end, options = self.global_step == self.total_steps, self.options
        losses_due = at_end or self._is_due(options.run_val_every_n_steps)
        tasks_due = not at_end and self._is_due(options.eval.every_n_steps)
        if not (losses_due or tasks_due):
            return
        logged = on_first_rank(lambda: self.history.at(self.global_step)) or {}
        if losses_due and "val_loss_hard" in logged:
            self.validation_losses[outputs.HARD] = logged["val_loss_hard"]
        elif losses_due and self.data.val_loader is not None:
            with self._saving_first():
                self._validate()
        if tasks_due and not any(name.startswith("eval/") for name in logged):
            self._evaluate_tasks()

    @contextmanager
    def _saving_first(self, position: Any = None) -> Iterator[None]:
        """If the body raises, what was trained before is saved, with this position of the data."""
        try:
            yield
        except (DataStreamError, FloatingPointError):  # which all ranks have
            path = self.checkpoint_folder / f"step_{self.global_step}"
            if self.global_step and not path.exists():
                self._save(position)
            raise

    def _restore_random_state(self) -> None:
        """That of the checkpoint; once."""
        if self._restored_random_state is not None:
            checkpoint.set_random_state(self._restored_random_state, self._device)
            self._restored_random_state = None

    def loss_sum(
        self, batch: dict[str, Any], teacher: torch.nn.Module | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum of the loss over predicted tokens, number of predicted tokens) of one batch.

        The loss is the config's, mixed with the distillation from ``teacher`` if there is one.
        """
        utils.batch_to_device(batch, self._device)
        ignore, fused = self._loss_fn.ignore_index, self._compile
        labels = shifted_labels(batch.pop("labels"), ignore)
        count = (labels != ignore).sum()
        wanted = None if teacher is None else teacher(**batch)
        with self.activations_handling_ctx:
            logits = self._model(**batch)
        settings, weight = self.options.distillation, 0.0
        total = torch.zeros_like(count, dtype=torch.float32)
        if wanted is not None:
            weight = settings.weight
            total = weight * distillation_loss_sum(logits, wanted, labels, settings, ignore, fused)
        if weight == 1:
            return total, count
        # Without a token to predict the mean would be NaN; any label will do, its weight is 0.
        labels = torch.where(count > 0, labels, torch.zeros_like(labels))
        if not isinstance(logits, list):
            labels, logits = labels.reshape(-1), logits.reshape(-1, logits.size(-1))
        return total + (1 - weight) * self._loss_fn(logits, labels) * count, count

    def clip_gradients(self) -> float | None:
        """The norm of the gradient before clipping; None if it is not clipped. Collective."""
        if self._clip_grad_norm is None:
            return None
        norm = torch.nn.utils.clip_grad_norm_(
            self._model.parameters(), max_norm=float(self._clip_grad_norm)
        )
        return float(full_tensor(norm))

    def _log(self, metrics: dict[str, float]) -> None:
        if not self._is_rank_zero:
            return
        try:
            self.history.append({"step": self.global_step} | metrics)
            self._metric_logger.log_dict(metrics, step=self.global_step)
        except Exception as error:  # of a service, or a full disk, of which the run must not die
            log.warning(f"step {self.global_step} could not be logged: {one_line(error)}")

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the validation tokens of all ranks, with the model as it stands."""
        self._model.eval()
        limit = self.options.max_val_batches
        loss = self.data.validation_loss(self.loss_sum, limit, self._device)
        self._model.train()
        return loss

    def _evaluate_baselines(self) -> None:
        hard = f"naive {self.component.method.name}"  # quantized as it is
        if self.options.reconstruction is None:
            with self.driver.latent():
                self.validation_losses[self.options.init] = self.evaluate()
        else:  # which has measured the pretrained and the naive model
            hard = outputs.RECONSTRUCTED
        with self.driver.hard():
            self.validation_losses[hard] = self.evaluate()
        for label, loss in self.validation_losses.items():
            utils.log_rank_zero(log, f"validation loss, {label}: {loss:.4f}")

    def _validate(self) -> None:
        self.driver.set_step(self.global_step)
        relaxed = self.evaluate()
        with self.driver.hard():
            hard = self.evaluate()
        self._log({"val_loss_relaxed": relaxed, "val_loss_hard": hard})
        self.validation_losses[outputs.HARD] = hard

    def _evaluate_tasks(self) -> None:
        """The ``eval`` section's tasks and texts on the hard model, into the metric logger.

        Much can go wrong in it that has nothing to do with training: what was trained is saved.
        """
        with self.driver.hard():
            result = self._evaluator.evaluate("hard", self._model, {}, self._device)
        self._log(metrics_of(result))

    def _save(self, position: Any = None) -> None:
        """Writes a checkpoint; ``position`` is that of the data if it is not the present one."""
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
                "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
                "random": checkpoint.random_state(self._device),
            },
            meta={
                "identity": self._identity,
                # But for the hard model's, which `_measure` has from the history.
                "validation_losses": {
                    k: v for k, v in self.validation_losses.items() if k != outputs.HARD
                },
                "tokens_seen": self.tokens_seen,
            },
            keep_last=self.options.keep_last_checkpoints,
        )

    def _finish(self) -> None:
        """Writes the hard model, the results and the curves."""
        state, losses = outputs.hard_state_dict(self._model), self.validation_losses
        description = {
            "hestia_tune": hestia_tune.__version__,
            "step": self.global_step,
            "layers": [*self.driver.temperatures(0)],
            "validation_loss": losses,
            **outputs.provenance(self.run.cfg, self.tokens_seen),
            **self._identity,
        }
        if self.data.is_stream:
            sequences = self.global_step * self.data.sequences_per_step
            description["stream"] = {"sequences": sequences}
            utils.log_rank_zero(log, f"read from the stream: {description['stream']}")

        def write() -> None:
            folder, checkpointer = self.output_dir, self._checkpoint_client._get_checkpointer()
            outputs.write_hard_model(state, checkpointer, folder / "hard_model", description)
            modules = (hestia_tune, torch, torchao, torchtune)
            versions = {module.__name__: module.__version__ for module in modules}
            write_json(folder / "results.json", description | {"versions": versions})
            by_step = [self.driver.temperatures(step) for step in range(self.total_steps + 1)]
            temperatures = {name: [row[name] for row in by_step] for name in by_step[0]}
            others = {label: loss for label, loss in losses.items() if label != outputs.HARD}
            plot_training_curves(self.history.rows, temperatures, others, folder / "curves.png")

        on_first_rank(write, share=False)

    @property
    def model(self) -> torch.nn.Module:
        """The prepared, sharded model."""
        return self._model

    def summary(self) -> str:
        """What to print at the end."""
        if self.finished:
            return f"\n{self.table()}\n\n{self.output_dir}: hard_model, results.json, curves.png"
        return (
            f"stopped after step {self.global_step}, checkpoint written; "
            "go on with resume_from_checkpoint=True"
        )

    def table(self) -> str:
        """The results as Markdown; without validation data, the loss on the training data."""
        if self.validation_losses:
            return outputs.results_table(self.validation_losses)
        rows = self.history.rows
        return outputs.training_losses({row["step"]: row["loss"] for row in rows if "loss" in row})

    def release(self) -> None:
        """Lets go of the model and the logger; the process group stays, for another recipe."""
        torch.distributed.barrier()
        self._model = self._teacher = self._optimizer = self.driver = None
        if self._is_rank_zero:
            self._metric_logger.close()

    def cleanup(self) -> None:
        """`release`, and the end of the process group once all ranks are here."""
        self.release()
        end_process_group()
