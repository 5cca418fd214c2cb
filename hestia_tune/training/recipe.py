"""Train by QAT: the train loop, and the files of a finished run.

output_dir/
    hard_model/        the deployable model, in Hugging Face format and bfloat16
    checkpoints/       checkpoints to resume from (see `hestia_tune.training.checkpoint`)
    metrics.jsonl      one JSON line per logged step
    results.json       losses before and after training, settings, versions
    curves.png         curves of loss, pressure and temperatures
    logs/              files of torchtune's metric logger
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
import torchao
import torchtune
from torchtune import training

import hestia_tune
from hestia_tune.distributed import (
    end_process_group,
    on_first_rank,
    progress_bar,
    totals_over_ranks,
)
from hestia_tune.files import write_json
from hestia_tune.plots import plot_training_curves
from hestia_tune.qat import shards
from hestia_tune.qat.hard_state import hard_state_dict
from hestia_tune.qat.linear import full_tensor
from hestia_tune.training import checkpoint, monitoring, outputs
from hestia_tune.training.base import RecipeBase
from hestia_tune.training.monitoring import StepResult

log = logging.getLogger(__name__)


class HestiaQATRecipe(RecipeBase):
    """Train latent weights through relaxed quantization, and write the hard model.

    Attributes:
        finished: Whether `train` reached the last step.
    """

    def train(self) -> None:
        """Train to the last step and set ``finished``. The first Ctrl-C saves and stops."""
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

    def train_step(self, batches: Sequence[dict[str, Any]]) -> StepResult:
        """Make one optimizer step on this rank's micro-batches. Collective."""
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
        # With offloading the gradients are on the CPU, and the host waits here, not further down.
        totals = totals_over_ranks(sums, self._device).to(next(self._model.parameters()).device)
        # FSDP averages gradients over ranks. The loss is a mean over the tokens on every rank.
        scale = totals.new_full((), self.world_size) / totals[1]
        training.scale_grads(self._model, scale.float())
        shards.pull_back(self.driver.layers.values(), compiled=bool(self.config.compile))
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
        if self.global_step % self._log_every_n_steps and self.global_step != self.total_steps:
            return
        step = self.global_step - 1  # this step has set the temperatures
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
            self._model.parameters(), max_norm=float(self._clip_grad_norm)
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
        log.info(f"writing the ternary model to {self.output_dir / 'hard_model'}")

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
            plot_training_curves(self.history.rows, temperatures, others, folder / "curves.png")

        on_first_rank(write, share=False)

    @property
    def model(self) -> torch.nn.Module:
        """Return the prepared, sharded model."""
        return self._model

    def summary(self) -> str:
        """Return the text to print at the end."""
        if self.finished:
            return (
                f"\n{self.table()}\n\n{self.output_dir} has the ternary model (hard_model), the "
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
        self._model = self._teacher = self._optimizer = self.driver = None
        if self._is_rank_zero:
            self._metric_logger.close()

    def cleanup(self) -> None:
        """Release the recipe and end the process group. Collective."""
        self.release()
        end_process_group()
