"""The part of the recipe that changes no weight: losses, validation, logging and checkpoints.

**Distillation.** The teacher is the pretrained model (or a model of the same shape) in the
compute dtype, sharded like the model, without gradients. It costs a forward per micro-batch, 2
bytes per weight, shared by the ranks, and memory for its logits. Both models give their logits in
chunks of the sequence. torchtune's divergence is computed chunk by chunk, so its float32
probabilities exist for one chunk at a time.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torchtune import utils
from torchtune.modules import loss as losses

from hestia_tune.config import DistillationConfig
from hestia_tune.data import DataStreamError
from hestia_tune.distributed import on_first_rank
from hestia_tune.errors import NotFiniteError, one_line
from hestia_tune.evaluation import metrics_of
from hestia_tune.losses import GradientAtOnce
from hestia_tune.training import checkpoint, monitoring, outputs
from hestia_tune.training.data import shifted_labels
from hestia_tune.training.setup import RecipeSetup

log = logging.getLogger(__name__)

_LOSSES = {
    "kl": losses.ForwardKLLoss,
    "kl_reverse": losses.ReverseKLLoss,
    "mixed": losses.SymmetricKLLoss,  # half of each
}

Logits = torch.Tensor | list[torch.Tensor]


def as_chunks(logits: Logits) -> list[torch.Tensor]:
    """Return logits as a list of chunks (batch, part of seq_len, vocabulary)."""
    return logits if isinstance(logits, list) else [logits]


def distillation_loss_sum(
    logits: Logits,
    teacher_logits: Logits,
    labels: torch.Tensor,
    settings: DistillationConfig,
    ignore_index: int,
    compiled: bool = False,
) -> torch.Tensor:
    """Return T² · (sum of the divergence over the predicted tokens), in nats.

    Args:
        logits: The model's logits (batch, seq_len, vocabulary), or chunks of them along seq_len.
        teacher_logits: The teacher's logits, in the same form.
        labels: Shifted labels (batch, seq_len).
        settings: The kind of divergence and the temperature T.
        ignore_index: Label of positions that predict nothing.
        compiled: Whether to compute with fused kernels, which make fewer float32 copies of the
            logits.
    """
    total = torch.zeros((), device=labels.device)
    chunks = as_chunks(logits)
    divergence = _divergence(settings.loss, settings.temperature, ignore_index, compiled)
    parts = labels.split([chunk.shape[1] for chunk in chunks], dim=1)
    for chunk in zip(chunks, as_chunks(teacher_logits), parts, strict=True):
        total = total + GradientAtOnce.apply(divergence, *chunk)
    return total * settings.temperature**2


@cache
def _divergence(
    kind: str, temperature: float, ignore_index: int, compiled: bool
) -> Callable[..., torch.Tensor]:
    """Return a function of (logits, teacher's logits, labels) of one chunk: the divergence."""
    divergence, scale = _LOSSES[kind](ignore_index=ignore_index), 1.0 / temperature

    def of_chunk(own: torch.Tensor, other: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        flat = own.flatten(0, 1) * scale, other.flatten(0, 1) * scale  # (tokens, vocabulary)
        return divergence(*flat, part.flatten(), normalize=False)

    return torch.compile(of_chunk, dynamic=True) if compiled else of_chunk


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
        utils.batch_to_device(batch, self._device)
        ignore = self._loss_fn.ignore_index
        labels = shifted_labels(batch.pop("labels"), ignore)
        count = (labels != ignore).sum()
        teacher_logits = None if teacher is None else teacher(**batch)
        with self.activations_handling_ctx:
            logits = self._model(**batch)
        settings, weight = self.config.distillation, 0.0
        total = torch.zeros_like(count, dtype=torch.float32)
        if teacher_logits is not None:
            weight = settings.weight
            total = weight * distillation_loss_sum(
                logits, teacher_logits, labels, settings, ignore, self._compile
            )
        if weight == 1:
            return total, count
        # Without a token to predict, the mean would be NaN. Any label works, because count is 0.
        labels = torch.where(count > 0, labels, torch.zeros_like(labels))
        if not isinstance(logits, list):
            labels, logits = labels.reshape(-1), logits.reshape(-1, logits.size(-1))
        return total + (1 - weight) * self._loss_fn(logits, labels) * count, count

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
