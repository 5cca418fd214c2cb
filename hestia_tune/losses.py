"""Compute the divergence from the predictions of a pretrained model with little memory."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

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
