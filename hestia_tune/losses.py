"""Losses against a pretrained model: hidden states h against h*, and predictions."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

# Positions whose predictions are compared at once: what bounds the memory of logits.
_LOGIT_POSITIONS = 128


def squared_error(out: torch.Tensor, target: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """sum (h - h*)^2 / N of every token, N being the norms, |h*|^2 or less."""
    return (out - target).square().sum(-1) / norms


def divergence(
    out: torch.Tensor,
    target: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    compiled: bool = False,
) -> torch.Tensor:
    """KL(pretrained || own) of the predictions from hidden states (n, dim), a sum in nats.

    Its gradient, where one is asked for, is taken at once, part by part, so that the logits of one
    part stand at a time and none are computed twice.

    Args:
        head: hidden states (n, dim) to logits.
        compiled: the divergence of logits as fused kernels.
    """
    of_logits = torch.compile(_of_logits, dynamic=True) if compiled else _of_logits

    def of_part(h: torch.Tensor, h_full: torch.Tensor) -> torch.Tensor:
        return of_logits(head(h), head(h_full))

    total = out.new_zeros(())
    for part in zip(out.split(_LOGIT_POSITIONS), target.split(_LOGIT_POSITIONS), strict=True):
        total = total + GradientAtOnce.apply(of_part, *part)
    return total


def _of_logits(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    # (positions, vocabulary)
    found, wanted = found.float().log_softmax(-1), wanted.float().log_softmax(-1)
    return F.kl_div(found, wanted, reduction="sum", log_target=True)


class GradientAtOnce(torch.autograd.Function):
    """``apply(function, first, *others)``: a scalar, whose gradient by ``first`` is taken at once
    and kept in its dtype, so that what the function computes does not wait for the backward."""

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
