"""The trace of the Gauss-Newton (Fisher) matrix of every layer from plain backward passes.

For a loss that is the mean over n tokens of -log p(label), with labels drawn from the model's own
predictions, each token's gradient has mean 0, so the squared norm of the gradient of the mean is
1/n of the mean squared norm: n·||g||^2 is unbiased for the trace, for all layers at once, and is
never negative. For softmax cross-entropy it is the Hessian without the terms in second derivatives
of the network.

Costs one forward per batch and one backward per pass, in the memory of plain training.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from hestia_tune.sensitivity.segments import (
    IGNORE_INDEX,
    CalibrationBatch,
    logits_of,
    mean_loss,
)


def fisher_traces(
    model: nn.Module,
    weights: Mapping[str, nn.Parameter],
    batch: CalibrationBatch,
    generators: Iterator[torch.Generator],
) -> Iterator[dict[str, float]]:
    """For each generator (on the batch's device), one unbiased estimate of every layer's trace.

    Args:
        model: takes tokens and the batch's ``model_inputs``, gives logits.
        weights: fully qualified name -> weight; these must require gradients.
        batch: labels of -100 do not count; the others are replaced by sampled ones.

    Yields:
        Name -> estimate; NaN for all if the logits are not finite.
    """
    logits = logits_of(model, batch)
    counted = batch.labels != IGNORE_INDEX
    probabilities = logits.detach()[counted].softmax(-1, dtype=torch.float32)
    if not probabilities.isfinite().all():  # nothing can be sampled from them
        yield from (dict.fromkeys(weights, math.nan) for _ in generators)
        return
    for generator in generators:
        labels = batch.labels.clone()
        labels[counted] = torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
        gradients = torch.autograd.grad(
            mean_loss(logits, labels), list(weights.values()), retain_graph=True
        )
        yield {
            name: batch.num_predicted * float(g.square().sum(dtype=torch.float64))
            for name, g in zip(weights, gradients, strict=True)
        }
