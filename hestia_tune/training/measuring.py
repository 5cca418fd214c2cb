"""The part of the recipe that changes no weight: losses, validation, logging and checkpoints."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchtune import utils

from hestia_tune.data import DataStreamError
from hestia_tune.distributed import on_first_rank
from hestia_tune.errors import NotFiniteError, one_line
from hestia_tune.evaluation import metrics_of
from hestia_tune.training import checkpoint, monitoring, outputs
from hestia_tune.training.data import shifted_labels
from hestia_tune.training.loss import training_loss
from hestia_tune.training.setup import RecipeSetup

log = logging.getLogger(__name__)


def _move_to_device(batch: dict[str, Any], device: torch.device) -> None:
    """Move a batch to the device in place. The host does not wait for the copies to a GPU."""
    if device.type == "cuda":
        for key, value in batch.items():
            if isinstance(value, torch.Tensor) and not value.is_cuda:
                batch[key] = value.pin_memory().to(device, non_blocking=True)
    utils.batch_to_device(batch, device)  # everything else


class MeasuringRecipe(RecipeSetup):
    """A recipe that computes losses, validates, evaluates, logs and saves."""

    def loss_sum(
        self, batch: dict[str, Any], teacher: torch.nn.Module | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the loss over the predicted tokens of a batch, and their number.

        Args:
            batch: The batch. Its labels are removed.
            teacher: The model to distil from. The loss is then the config's loss mixed with the
                distillation loss. None takes the config's loss alone.
        """
        _move_to_device(batch, self._device)
        ignore = self._loss_fn.ignore_index
        labels = shifted_labels(batch.pop("labels"), ignore)
        count = (labels != ignore).sum()
        total = training_loss(
            self._model,
            teacher,
            batch,
            labels,
            self._loss_fn,
            self.config,
            compiled=self._compile,
            recompute=self.plan.recomputes_logits,
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
        hard = f"naive {self.plan.component.method.name}"  # quantized without training
        if self.config.reconstruction is None:
            with self.driver.latent(self._hard_start):
                self.validation_losses[self.config.init] = self.evaluate()
        else:  # the reconstruction has measured the pretrained and the naive model
            hard = outputs.RECONSTRUCTED
        with self.driver.hard():
            self.validation_losses[hard] = self.evaluate()
        for label, loss in self.validation_losses.items():
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
            result = self.plan.evaluator.evaluate("hard", self._model, {}, self._device)
        self._log(metrics_of(result))

    def _is_due(self, every: int | None) -> bool:
        """Return whether something is due now that happens every so many steps (None: never)."""
        return bool(every) and self.global_step % every == 0

    def _measure(self) -> None:
        """Validate and evaluate tasks if they are due after this step and not logged yet."""
        at_end, options = self.global_step == self.total_steps, self.config
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
                "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
                "random": checkpoint.random_state(self._device),
            },
            meta={
                "identity": self._identity,
                # Without the loss of the hard model, which `_measure` reads from the history.
                "validation_losses": {
                    k: v for k, v in self.validation_losses.items() if k != outputs.HARD
                },
                "tokens_seen": self.tokens_seen,
            },
            keep_last=self.config.keep_last_checkpoints,
        )
