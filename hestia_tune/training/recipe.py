"""The QAT recipe: the train loop, validation, saving, and what a finished run leaves behind.

output_dir/
    hard_model/        the deployable model, Hugging Face format, bfloat16
    checkpoints/       resumable (see `hestia_tune.training.checkpoint`)
    metrics.jsonl      one JSON line per logged step
    results.json       losses before and after, settings, versions
    curves.png         loss, pressure and the fan of temperatures
    logs/              torchtune's metric logger
"""

import json
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
import torchao
import torchtune
from torchtune import training, utils
from torchtune.training.lr_schedulers import get_lr
from tqdm import tqdm

import hestia_tune
from hestia_tune.data import DataStreamError
from hestia_tune.distributed import StopRequest, on_first_rank, sum_over_ranks
from hestia_tune.evaluation import metrics_of, plain_outputs
from hestia_tune.files import write_atomically
from hestia_tune.modules import full_tensor
from hestia_tune.plots import plot_training_curves
from hestia_tune.training import checkpoint
from hestia_tune.training.data_setup import shifted_labels
from hestia_tune.training.hard_model import hard_state_dict, write_hard_model
from hestia_tune.training.history import results_table
from hestia_tune.training.memory import memory_metrics, record_memory_history
from hestia_tune.training.setup import RecipeSetup
from hestia_tune.training.statistics import check_finite

log = utils.get_logger("DEBUG")

PRETRAINED, HARD = "pretrained", "trained, hard"


class HestiaQATRecipe(RecipeSetup):
    """Trains latent weights through relaxed quantization and writes the hard model."""

    def train(self) -> bool:
        """Trains to the end, or to the first Ctrl-C; returns whether the end was reached."""
        if self._device.type == "cuda":
            training.cleanup_before_training()
        if self.global_step == 0 and self.data.val_loader is not None:
            self._evaluate_baselines()
        if self._statistics is not None and self.global_step < self.total_steps:
            self._statistics.update()
        if hasattr(self, "_resumed_random_state"):
            checkpoint.set_random_state(self._resumed_random_state, self._device)
        self._profiler.start()
        with StopRequest().installed() as stop:
            finished = self._train_epochs(stop)
        self._profiler.stop()
        if finished:
            self._finish()
            if self.options.eval.at_end:
                self._evaluate_tasks()
        return finished

    def _train_epochs(self, stop: StopRequest) -> bool:
        progress = tqdm(
            total=self.total_steps, initial=self.global_step, disable=not self._is_rank_zero
        )
        with progress:
            while self.global_step < self.total_steps:
                batches = self.data.begin(self._epoch)
                end = min((self._epoch + 1) * self.data.steps_per_epoch, self.total_steps)
                while self.global_step < end:
                    stopping = self._train_step(batches, stop, progress)
                    at_end = self.global_step == self.total_steps
                    if stopping and not at_end:  # at once: torchrun's patience is 30 seconds
                        self._save()
                        return False
                    try:
                        self._validate_if_due(at_end)
                    except DataStreamError:
                        self._save()
                        raise
                    every = self.options.save_every_n_steps
                    tasks_due = self._tasks_due()
                    if at_end or tasks_due or (every and self.global_step % every == 0):
                        self._save()
                    if tasks_due and not at_end:
                        self._evaluate_tasks()
                self._epoch += 1
        return True

    def _train_step(self, batches: Iterator, stop: StopRequest, progress: tqdm) -> bool:
        """One optimizer step; returns whether some rank was asked to stop."""
        started = time.perf_counter()
        step = self.global_step
        self.driver.set_step(step)
        if self._is_rank_zero:
            record_memory_history(self, step)
        losses, counts = [], []
        for batch in self._fetch(batches):
            loss, count = self._loss_sum(batch)
            loss.backward()
            losses.append(loss.detach())
            counts.append(count)
        sums = [torch.stack(losses).sum(), torch.stack(counts).sum(), float(stop.requested)]
        loss_sum, num_tokens, stopping = sum_over_ranks(sums, self._device)
        self._check_loss(loss_sum, num_tokens)
        # FSDP averages gradients over ranks; the loss is a mean over the tokens of all of them.
        scale = torch.tensor(self.world_size / num_tokens, device=self._device)
        training.scale_grads(self._model, scale)
        grad_norm = self._clip_gradients()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        learning_rate = get_lr(self._optimizer)
        if self._lr_scheduler is not None:
            self._lr_scheduler.step()
        self.global_step += 1
        self._profiler.step()
        loss = loss_sum / num_tokens
        progress.update(1)
        self.tokens_seen += int(num_tokens)
        progress.set_postfix_str(f"{self._tokens_read()}, loss {loss:.4f}")
        if self.global_step % self._log_every_n_steps == 0 or self.global_step == self.total_steps:
            seconds = time.perf_counter() - started
            self._log(
                {
                    "loss": loss,
                    "lr": learning_rate,
                    "tokens_per_second_per_gpu": num_tokens / seconds / self.world_size,
                    "tokens_seen": self.tokens_seen,
                    "data_wait": self.data.seconds_waited / seconds,
                }
                | ({} if grad_norm is None else {"grad_norm": grad_norm})
                | self._schedule_metrics(step)
                | ({} if self._statistics is None else self._statistics.update())
                | memory_metrics(self._device, self._log_peak_memory_stats)
            )
        return stopping > 0

    def _tokens_read(self) -> str:
        """Tokens so far, of those there will be where that is known."""
        done = self.data.tokens_at(self.global_step)
        if done is None:
            return f"{self.tokens_seen / 1e6:.2f}M tokens"
        return f"{done / 1e6:.2f}M of {self.data.tokens_at(self.total_steps) / 1e6:.2f}M tokens"

    def _fetch(self, batches: Iterator) -> list[dict[str, Any]]:
        """The batches of one step; if the data fail, what was trained is saved first."""
        position = self.data.position() if self.data.is_stream else None
        try:
            return self.data.fetch(batches)
        except DataStreamError:
            if (
                self.global_step
                and not (self.checkpoint_folder / f"step_{self.global_step}").exists()
            ):
                self._save(position)
            raise

    def _check_loss(self, loss_sum: float, num_tokens: float) -> None:
        """Stops before a bad gradient reaches the weights."""
        step = self.global_step + 1
        if num_tokens == 0:
            raise ValueError(f"the batches of step {step} have no token to predict; check dataset")
        if not math.isfinite(loss_sum):
            check_finite(self._model, self._device, self.global_step)
            raise FloatingPointError(
                f"the loss of step {step} is {loss_sum} though all weights are finite; look at "
                "the data, or start anew with a lower learning rate"
            )

    def _loss_sum(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum of the loss over predicted tokens, number of predicted tokens) of one batch."""
        utils.batch_to_device(batch, self._device)
        ignore = self._loss_fn.ignore_index
        labels = shifted_labels(batch.pop("labels"), ignore)
        count = (labels != ignore).sum()
        with self.activations_handling_ctx:
            logits = self._model(**batch)
        if not isinstance(logits, list):
            labels, logits = labels.reshape(-1), logits.reshape(-1, logits.size(-1))
        loss = self._loss_fn(logits, labels)
        return loss * count, count

    def _clip_gradients(self) -> float | None:
        if self._clip_grad_norm is None:
            return None
        norm = torch.nn.utils.clip_grad_norm_(
            self._model.parameters(), max_norm=float(self._clip_grad_norm)
        )
        return float(full_tensor(norm))

    def _schedule_metrics(self, step: int) -> dict[str, float]:
        taus = list(self.driver.temperatures(step).values())
        return {
            "pressure": self.schedule.pressure(step),
            "tau_min": min(taus),
            "tau_mean": sum(taus) / len(taus),
            "tau_max": max(taus),
        }

    def _log(self, metrics: dict[str, float]) -> None:
        if self._is_rank_zero:
            self._metric_logger.log_dict(metrics, step=self.global_step)
            self.history.append({"step": self.global_step} | metrics)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the validation tokens of all ranks, with the model as it stands."""
        self._model.eval()
        own_samples = self.data.own_validation_samples()
        seen, total, count = 0, 0.0, 0
        for batch in self.data.validation_batches(self.options.max_val_batches):
            labels = batch["labels"]
            if own_samples is not None:
                labels[max(0, own_samples - seen) :] = self._loss_fn.ignore_index
            seen += len(labels)
            loss, tokens = self._loss_sum(batch)
            total = total + torch.where(tokens > 0, loss, torch.zeros_like(loss)).double()
            count = count + tokens
        self._model.train()
        total, count = sum_over_ranks([total, count], self._device)
        return total / count

    @property
    def _naive(self) -> str:
        """Label of the pretrained model quantized as it is: "naive ternary"."""
        return f"naive {self.method_key.partition(',')[0]}"

    def _evaluate_baselines(self) -> None:
        with self.driver.latent():
            self.validation_losses[PRETRAINED] = self.evaluate()
        with self.driver.hard():
            self.validation_losses[self._naive] = self.evaluate()
        for label, loss in self.validation_losses.items():
            utils.log_rank_zero(log, f"validation loss, {label}: {loss:.4f}")

    def _validate_if_due(self, at_end: bool) -> None:
        every = self.options.run_val_every_n_steps
        due = at_end or (every is not None and self.global_step % every == 0)
        if self.data.val_loader is None or not due:
            return
        self.driver.set_step(self.global_step)
        relaxed = self.evaluate()
        with self.driver.hard():
            hard = self.evaluate()
        self._log({"val_loss_relaxed": relaxed, "val_loss_hard": hard})
        self.validation_losses[HARD] = hard

    def _tasks_due(self) -> bool:
        every = self.options.eval.every_n_steps
        return every is not None and self.global_step % every == 0

    def _evaluate_tasks(self) -> None:
        """The ``eval`` section's tasks and texts on the hard model, into the metric logger.

        Much can go wrong in it that has nothing to do with training: what was trained is saved.
        """
        with self.driver.hard(), plain_outputs(self._model):
            result = self._evaluator.evaluate("hard", self._model, {}, self._device)
        self._log(metrics_of(result))

    def _save(self, position: Any = None) -> None:
        """Writes a checkpoint; ``position`` is that of the data if it is not the present one."""
        check_finite(self._model, self._device, self.global_step)
        epoch_done = self.global_step == (self._epoch + 1) * self.data.steps_per_epoch
        scheduler = self._lr_scheduler
        checkpoint.save_checkpoint(
            self.checkpoint_folder,
            self.global_step,
            model=self._model,
            optimizer=self._optimizer,
            rank_state={
                "epoch": self._epoch + epoch_done,
                "dataloader": None if epoch_done else position or self.data.position(),
                "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
                "random": checkpoint.random_state(self._device),
            },
            meta={
                "identity": self._identity,
                "validation_losses": self.validation_losses,
                "tokens_seen": self.tokens_seen,
                "num_workers": self.cfg.num_workers,
            },
            keep_last=self.options.keep_last_checkpoints,
        )

    def _finish(self) -> None:
        """Writes the hard model, the results and the curves."""
        state = hard_state_dict(self._model, self._dtype)
        description = {
            "hestia_tune": hestia_tune.__version__,
            "step": self.global_step,
            "layers": [*self.driver.temperatures(0)],
        } | self._identity
        if self.data.is_stream:
            description["stream"] = self.data.counts()
            utils.log_rank_zero(log, f"read from the stream: {description['stream']}")
        on_first_rank(lambda: self._write_outputs(state, description), share=False)

    def _write_outputs(self, state: dict[str, torch.Tensor], description: dict[str, Any]) -> None:
        folder = self.output_dir / "hard_model"
        checkpointer = self._checkpoint_client._get_checkpointer()
        write_hard_model(state, checkpointer, folder, description)
        versions = {m.__name__: m.__version__ for m in (hestia_tune, torch, torchao, torchtune)}
        results = {"validation_loss": self._ordered_losses(), "versions": versions} | description
        write_atomically(self.output_dir / "results.json", json.dumps(results, indent=1) + "\n")
        by_step = [self.driver.temperatures(step) for step in range(self.total_steps + 1)]
        temperatures = {name: [row[name] for row in by_step] for name in by_step[0]}
        lines = {label: loss for label, loss in self._ordered_losses().items() if label != HARD}
        plot_training_curves(self.history.rows, temperatures, lines, self.output_dir / "curves.png")
        log.info(f"hard model: {folder}")

    @property
    def is_first_rank(self) -> bool:
        """Whether this process speaks for all."""
        return self._is_rank_zero

    def summary(self, finished: bool) -> str:
        """What to print at the end."""
        if finished:
            return f"\n{self.table()}\n\n{self.output_dir}: hard_model, results.json, curves.png"
        return (
            f"stopped after step {self.global_step}, checkpoint written; "
            "go on with resume_from_checkpoint=True"
        )

    def table(self) -> str:
        """The results as Markdown; empty without validation data."""
        if not self.validation_losses:
            return ""
        return results_table(
            self._ordered_losses().items(), reference=PRETRAINED, worst=self._naive
        )

    def _ordered_losses(self) -> dict[str, float]:
        order = (PRETRAINED, self._naive, HARD)
        return {k: self.validation_losses[k] for k in order if k in self.validation_losses}

    def cleanup(self, end_process_group: bool = True) -> None:
        """Lets go of everything that holds the process group, and ends it once all are here."""
        torch.distributed.barrier()
        self._model = self._optimizer = self._mesh = None
        if self._is_rank_zero:
            self._metric_logger.close()
        if end_process_group:
            torch.distributed.destroy_process_group()
