"""Losses of predictions: the cross-entropy, and divergences from a pretrained model's predictions.

The cross-entropy and the divergences of chunks of logits equal torchtune's to the last bit, in
value and gradient, so runs with and without torchtune have the same losses.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Number of positions whose predictions are compared at once. It bounds the memory of the logits.
_LOGIT_POSITIONS = 128


def divergence(
    out: torch.Tensor,
    target: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    compiled: bool = False,
) -> torch.Tensor:
    """Return the divergence KL(pretrained || own) of the predictions, summed over positions.

    If a gradient is needed, it is computed at once, part by part. So only the logits of one part
    are in memory, and no logits are computed twice.

    Args:
        out: The own hidden states, (n, dim).
        target: The pretrained hidden states, (n, dim).
        head: Function from hidden states (n, dim) to logits (n, vocabulary).
        compiled: Whether to compute the divergence of the logits by fused kernels.

    Returns:
        The sum in nats, a scalar.
    """
    compare = torch.compile(_divergence, dynamic=True) if compiled else _divergence

    def of_part(h: torch.Tensor, h_full: torch.Tensor) -> torch.Tensor:
        return compare(head(h), head(h_full))

    total = out.new_zeros(())
    for part in zip(out.split(_LOGIT_POSITIONS), target.split(_LOGIT_POSITIONS), strict=True):
        total = total + GradientAtOnce.apply(of_part, *part)
    return total


def _divergence(logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """Return the divergence from logits (positions, vocabulary), computed in float32."""
    own, target = (x.float().log_softmax(-1) for x in (logits, target_logits))
    return F.kl_div(own, target, reduction="sum", log_target=True)


class CEWithChunkedOutputLoss(nn.Module):
    """The mean cross-entropy in nats over logits in chunks of the sequence.

    Logits of one chunk at a time are cast to float32, so that no float32 copy of all logits exists.

    Args:
        num_output_chunks: Number of chunks of the sequence that the model gives.
        ignore_index: Label of positions that predict nothing.
    """

    def __init__(self, num_output_chunks: int = 8, ignore_index: int = -100):
        super().__init__()
        self.num_output_chunks = num_output_chunks
        self.ignore_index = ignore_index

    def compute_cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the sum over the tokens of logits (tokens, vocabulary). torch.compile fits it."""
        return F.cross_entropy(
            logits.float(), labels, ignore_index=self.ignore_index, reduction="sum"
        )

    def forward(self, logits: Sequence[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        """Return the mean over the tokens that have a label.

        Args:
            logits: Chunks (batch, part of seq_len, vocabulary).
            labels: Shifted labels, int64 (batch, seq_len).
        """
        parts = labels.chunk(self.num_output_chunks, dim=1)
        total = 0.0
        for chunk, part in zip(logits, parts, strict=False):  # a short sequence has fewer chunks
            total = total + self.compute_cross_entropy(chunk.flatten(0, 1), part.flatten())
        return total / (labels != self.ignore_index).sum()


def forward_kl(
    logits: torch.Tensor, teacher_logits: torch.Tensor, labels: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    """Return the cross-entropy -Σ p log q of the model q to the teacher p, summed over tokens.

    It is KL(teacher || model) plus the teacher's entropy, which has no gradient.

    Args:
        logits: The model's logits (tokens, vocabulary).
        teacher_logits: The teacher's logits, of the same shape.
        labels: Labels (tokens,).
        ignore_index: Label of tokens that do not count.
    """
    target = teacher_logits.softmax(-1, dtype=torch.float32)
    own = logits.log_softmax(-1, dtype=torch.float32)
    products = (target * own).masked_fill(logits.isinf(), 0)  # 0 · -inf would be NaN
    return _sum_of_counted(products, labels, ignore_index)


def reverse_kl(
    logits: torch.Tensor, teacher_logits: torch.Tensor, labels: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    """Return KL(model || teacher), summed over tokens. See `forward_kl` for the arguments."""
    probabilities = logits.softmax(-1, dtype=torch.float32)
    own = logits.log_softmax(-1, dtype=torch.float32)
    target = teacher_logits.log_softmax(-1, dtype=torch.float32)
    excluded = logits.isinf() | teacher_logits.isinf()
    products = (probabilities * target).masked_fill(excluded, 0)
    products = products - (probabilities * own).masked_fill(excluded, 0)
    return _sum_of_counted(products, labels, ignore_index)


def symmetric_kl(
    logits: torch.Tensor, teacher_logits: torch.Tensor, labels: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    """Return half of `forward_kl` and half of `reverse_kl`."""
    given = logits, teacher_logits, labels, ignore_index
    return 0.5 * forward_kl(*given) + 0.5 * reverse_kl(*given)


def _sum_of_counted(
    products: torch.Tensor, labels: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    """Return minus the sum of (tokens, vocabulary) over the tokens that have a label."""
    return -(products.sum(-1) * (labels != ignore_index).int()).sum()


class GradientAtOnce(torch.autograd.Function):
    """Compute a scalar function and its gradient in the forward pass.

    Call ``GradientAtOnce.apply(function, first, *others)``. The result is ``function(first,
    *others)``. Only its gradient with respect to ``first`` is computed. The gradient is kept in the
    dtype of ``first``, and the intermediate results of the function are freed before the backward.
    """

    @staticmethod
    def forward(ctx, function: Callable[..., torch.Tensor], first: torch.Tensor, *others: Any):
        if not ctx.needs_input_grad[1]:
            return function(first, *others)
        with torch.enable_grad():
            leaf = first.detach().requires_grad_()
            value = function(leaf, *others)
            ctx.save_for_backward(*torch.autograd.grad(value, leaf))
        return value.detach()

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        others = [None] * (len(ctx.needs_input_grad) - 2)
        return None, ctx.saved_tensors[0] * grad, *others
