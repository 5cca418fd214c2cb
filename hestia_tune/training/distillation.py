"""Distillation: the loss against a teacher's predictions, and the teacher.

The teacher is the pretrained model (or one of its shape) in the compute dtype, sharded like the
model, without gradients. It costs a forward per micro-batch, 2 bytes a weight over the ranks, and
its logits beside the model's. Both give their logits in chunks of the sequence, and the divergence
(torchtune's) is taken chunk by chunk, so that its float32 probabilities exist for one at a time.
"""

import torch
from torchtune.modules import loss

from hestia_tune.sections import DistillationConfig

_LOSSES = {
    "kl": loss.ForwardKLLoss,
    "kl_reverse": loss.ReverseKLLoss,
    "mixed": loss.SymmetricKLLoss,  # half of both
}

Logits = torch.Tensor | list[torch.Tensor]


def as_chunks(logits: Logits) -> list[torch.Tensor]:
    """Logits as a list of chunks (batch, part of seq_len, vocabulary)."""
    return logits if isinstance(logits, list) else [logits]


def distillation_loss_sum(
    logits: Logits,
    teacher_logits: Logits,
    labels: torch.Tensor,
    settings: DistillationConfig,
    ignore_index: int,
) -> torch.Tensor:
    """T^2 · sum of the divergence over the predicted tokens, in nats.

    Args:
        logits, teacher_logits: (batch, seq_len, vocabulary), or as many chunks of it.
        labels: (batch, seq_len), shifted; ``ignore_index`` where nothing is predicted.
        settings: loss and temperature T.
        ignore_index: see ``labels``.
    """
    divergence = _LOSSES[settings.loss](ignore_index=ignore_index)
    total, scale = 0.0, 1.0 / settings.temperature
    chunks = as_chunks(logits)
    parts = labels.split([chunk.shape[1] for chunk in chunks], dim=1)
    for own, other, part in zip(chunks, as_chunks(teacher_logits), parts, strict=True):
        flat = own.flatten(0, 1) * scale, other.flatten(0, 1) * scale  # (tokens, vocabulary)
        total = total + divergence(*flat, part.flatten(), normalize=False)
    return total * settings.temperature**2
