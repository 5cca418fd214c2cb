"""Curvature of the loss in single weights: forms and products of Hessian blocks; Fisher traces.

**Hessian**, by double backward, segment by segment. For a weight in segment s and a direction v,
let a be the derivative of the hidden states along v and delta the gradient of the loss by the
hidden states. Differentiating <gradient of the weight, v> by the delta that comes in gives a behind
segment s; differentiating <delta in front of segment l, a> by the delta that comes in gives a
behind l, and by the hidden states c_l, the curvature that l adds. So, in one walk upwards,

    v^T H v = v·(d<gradient, v>/dW inside s) + sum over l > s of c_l·a_l,

for all directions of all weights at once: every segment is run once, and only from the lowest one
that has a direction. `HessianBatch.products`, for H v itself, walks down again. Memory: the hidden
states and deltas between segments, one segment's graph, one hidden state per direction carried.
The attention kernel must be twice differentiable, which fused scaled-dot-product attention is not:
segments run inside `double_backward_attention`.

**Fisher** (Gauss-Newton), by plain backward passes. For a loss that is the mean over n tokens of
-log p(label), with labels drawn from the model's own predictions, each token's gradient has mean 0,
so the squared norm of the gradient of the mean is 1/n of the mean squared norm: n·||g||^2 is
unbiased for the trace, for all layers at once, and is never negative. For softmax cross-entropy it
is the Hessian without the terms in second derivatives of the network. Costs one forward per batch
and one backward per pass, in the memory of plain training.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hestia_tune.sensitivity.hutchpp import Vector
from hestia_tune.sensitivity.segments import (
    IGNORE_INDEX,
    CalibrationBatch,
    Segment,
    logits_of,
    mean_loss,
)


def double_backward_attention():
    """Context in which scaled-dot-product attention can be differentiated twice."""
    return sdpa_kernel(SDPBackend.MATH)


class SegmentRun:
    """A segment run forward and, by `differentiate`, backward; both can be differentiated again.

    Args:
        segment: what to run.
        hidden: its input, (batch, seq_len, dim), or token ids.
        delta: gradient of the loss by its output, shaped like that.
        names: the weights to differentiate by.
    """

    def __init__(
        self, segment: Segment, hidden: torch.Tensor, delta: torch.Tensor, names: Iterable[str] = ()
    ):
        self.hidden = hidden.detach().requires_grad_(hidden.is_floating_point())
        self.delta = delta.detach().requires_grad_()
        self.weights = {name: segment.weights[name] for name in names}
        with double_backward_attention():
            self.out = segment.forward(self.hidden)

    def differentiate(self, with_hidden: bool) -> None:
        """Sets ``gradients`` by the weights and, if asked, ``delta_before``, by the input."""
        inputs = ([self.hidden] if with_hidden else []) + list(self.weights.values())
        found = torch.autograd.grad(self.out, inputs, self.delta, create_graph=True)
        if with_hidden:
            self.delta_before, *found = found
        self.gradients = dict(zip(self.weights, found, strict=True))


class HessianBatch:
    """The diagonal blocks of the Hessian of one batch's mean loss, as products with directions.

    Costs two forwards and one backward at the start.

    Args:
        hidden: input of the first segment.
        segments: the chain. Its weights must require gradients; no other parameter should.
            Float32 or float64: bfloat16 has too few digits for a second derivative.
        vectors_at_once: directions that go through a segment together (vmap), at as many times
            the memory; 1 is fastest on CPUs.
    """

    def __init__(
        self, hidden: torch.Tensor, segments: Sequence[Segment], *, vectors_at_once: int = 1
    ):
        self._segments = segments
        self._vectors_at_once = vectors_at_once
        self._place = {name: k for k, s in enumerate(segments) for name in s.weights}
        self._hidden = [hidden.detach()]
        with torch.no_grad(), double_backward_attention():
            for segment in segments[:-1]:
                self._hidden.append(segment.forward(self._hidden[-1]))
            loss = segments[-1].forward(self._hidden[-1])
        # The delta behind each segment; that of the last is d loss/d loss.
        self._deltas = [torch.ones_like(loss)] * len(segments)
        for index in range(len(segments) - 1, 0, -1):
            run = self._run(index)
            (self._deltas[index - 1],) = torch.autograd.grad(run.out, run.hidden, run.delta)

    def quadratic_forms(self, directions: Sequence[tuple[str, Vector]]) -> list[float]:
        """v^T H v for each (name of a weight, direction v as large as it), in one walk."""
        forms = [0.0] * len(directions)
        for k, _, x, y in self._walk_up(directions):
            forms[k] += float((x * y).sum(dtype=torch.float64))
        return forms

    def products(self, name: str, directions: Sequence[Vector]) -> list[torch.Tensor]:
        """H v, shaped like the weight, for each direction in the weight ``name``."""
        parts: dict[int, list[torch.Tensor]] = defaultdict(
            list
        )  # by segment: one of each direction
        for _, index, x, _ in self._walk_up([(name, direction) for direction in directions]):
            parts[index].append(x)
        start, top = self._place[name], len(self._segments) - 1
        # The derivative of <gradient, v> by the hidden states before a segment; at last, by W.
        carried = parts[top]
        for index in range(top - 1, start - 1, -1):
            run = self._run(index, [name] if index == start else [])
            by = run.weights[name] if index == start else run.hidden
            below = self._products_with_jacobian(run.out, carried, [by])
            carried = [parts[index].pop(0) + vector for (vector,) in below]
        return carried

    def _walk_up(
        self, directions: Sequence[tuple[str, Vector]]
    ) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """Carries all directions from their segments up to the loss.

        Yields:
            (number of the direction, index of the segment, x, y), for each direction in each
            segment from its own upwards; v^T H v is the sum of all x·y. In its own segment x is
            d<gradient, v>/dW and y is v, like the weight; above, x is c and y is a, like the
            hidden states.
        """
        places = [self._place[name] for name, _ in directions]
        carried: dict[int, torch.Tensor] = {}  # number of a direction -> a: (batch, seq_len, dim)
        for index in range(min(places), len(self._segments)):
            own = [k for k, place in enumerate(places) if place == index]
            run = self._run(index, dict.fromkeys(directions[k][0] for k in own))
            run.differentiate(with_hidden=bool(carried))
            if carried:
                pairs = self._products_with_jacobian(
                    run.delta_before, list(carried.values()), [run.hidden, run.delta]
                )
                for k, (c, a) in zip(list(carried), pairs, strict=True):
                    yield k, index, c, carried[k]
                    carried[k] = a
            for k in own:
                name, direction = directions[k]
                weight = run.weights[name]
                v = direction().view_as(weight)
                ((second, carried[k]),) = self._products_with_jacobian(
                    run.gradients[name], [v], [weight, run.delta]
                )
                yield k, index, second, v

    def _run(self, index: int, names: Iterable[str] = ()) -> SegmentRun:
        return SegmentRun(self._segments[index], self._hidden[index], self._deltas[index], names)

    def _products_with_jacobian(
        self, output: torch.Tensor, vectors: Sequence[torch.Tensor], inputs: list[torch.Tensor]
    ) -> Iterator[list[torch.Tensor]]:
        """For each vector (shaped like the output), d<output, vector>/d input of every input."""
        for start in range(0, len(vectors), self._vectors_at_once):
            chunk = vectors[start : start + self._vectors_at_once]
            batched = len(chunk) > 1
            found = torch.autograd.grad(
                output,
                inputs,
                torch.stack(list(chunk)) if batched else chunk[0],
                retain_graph=True,
                is_grads_batched=batched,
                materialize_grads=True,
            )
            for k in range(len(chunk)):  # zeros of what is not used have no axis of vectors
                pairs = zip(found, inputs, strict=True)
                yield [got[k] if got.dim() > value.dim() else got for got, value in pairs]


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
    probabilities = logits.detach()[counted].softmax(-1, dtype=torch.float32)  # (n, vocabulary)
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
