"""Curvature of the loss in single weights, measured segment by segment.

A model is cut into a chain of segments: its blocks (`hestia_tune.blocks` finds them), then the
head with the loss. Second derivatives need the graph of the gradient, several times the size of
the graph of the loss. With the cut, only the graph of one segment is alive at a time. The price:
each segment is run again when a walk along the chain reaches it. A model without blocks, or
whose blocks do not make a chain, is one segment. The result is right, but the whole graph is in
memory.

**Hessian**, by double backward. For a weight in segment s and a direction v, let a be the
derivative of the hidden states along v, and delta the gradient of the loss by the hidden states.
Differentiating <gradient of the weight, v> by the incoming delta gives a behind segment s.
Differentiating <delta in front of segment l, a> by the incoming delta gives a behind l, and by
the hidden states c_l, the curvature that l adds. So one walk upwards gives

    v^T H v = v·(d<gradient, v>/dW inside s) + sum over l > s of c_l·a_l

for all directions of all weights. Every segment is run once, from the lowest segment that has a
direction. The product H v also takes a walk down. In memory are the hidden states and deltas
between segments, the graph of one segment, and one hidden state per direction.

**Fisher** (Gauss-Newton), by plain backward passes. The loss is the mean over n tokens of -log
p(label), with labels drawn from the model's own predictions. The gradient of each token then has
mean 0, so the squared norm of the gradient of the mean is 1/n of the mean squared norm.
Therefore n·||g||^2 is an unbiased estimate of the trace, for all layers at once, and it is never
negative. For softmax cross-entropy this is the Hessian without the terms in second derivatives
of the network. It costs one forward per batch and one backward per pass, in the memory of plain
training.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hestia_tune.blocks import as_one, record_blocks
from hestia_tune.errors import InputError, warn_once

IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True)
class CalibrationBatch:
    """Tokens and what the model is to predict after each."""

    tokens: torch.Tensor  # int64 (batch, seq_len)
    labels: torch.Tensor  # the same, shifted: what each position predicts, or -100 for none
    # Further keyword inputs of the model (``mask``, ``input_pos``).
    model_inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def num_predicted(self) -> int:
        """Positions that count in the loss."""
        return int((self.labels != IGNORE_INDEX).sum())

    def to(self, device: torch.device | str) -> "CalibrationBatch":
        """The same batch on another device."""
        inputs = {key: value.to(device) for key, value in self.model_inputs.items()}
        moved = {"tokens": self.tokens.to(device), "labels": self.labels.to(device)}
        return dataclasses.replace(self, model_inputs=inputs, **moved)


class Segment(NamedTuple):
    """One part of the chain."""

    # Hidden states (batch, seq_len, dim) to hidden states; in the last segment, to the scalar mean
    # loss. The input of the first may be token ids.
    forward: Callable[[torch.Tensor], torch.Tensor]
    weights: Mapping[str, nn.Parameter]  # whose curvature is wanted, by fully qualified name


def logits_of(model: nn.Module, batch: CalibrationBatch) -> torch.Tensor:
    """Logits (batch, seq_len, vocabulary)."""
    return as_one(model(batch.tokens, **batch.model_inputs))


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats, averaged over the positions that predict something."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)


def cut(
    model: nn.Module, weights: Mapping[str, nn.Parameter], batch: CalibrationBatch
) -> tuple[torch.Tensor, list[Segment]]:
    """(input of the first segment, the segments in order) for one batch.

    As one segment, with a warning, if several would not compute the model's logits (two forwards
    find out, except on the meta device), or if a weight is used by more than one.

    Args:
        model: takes tokens and the batch's ``model_inputs``, gives logits.
        weights: fully qualified name -> weight of each layer to measure.
    """

    def whole(tokens: torch.Tensor) -> torch.Tensor:
        return mean_loss(logits_of(model, batch), batch.labels)

    def head(hidden: torch.Tensor) -> torch.Tensor:
        return mean_loss(chain.logits(hidden), batch.labels)

    try:
        chain = record_blocks(model, batch.tokens, batch.model_inputs)
        used = [{id(p) for p in block.parameters()} for block in chain.blocks]
        parts = [{n: w for n, w in weights.items() if id(w) in ids} for ids in used]
        parts.append({n: w for n, w in weights.items() if not any(id(w) in ids for ids in used)})
        before = [None]
        if chain.hidden.requires_grad:  # it is of an embedding, which may be tied
            start, measured = chain.hidden.sum(), list(weights.values())
            before = torch.autograd.grad(start, measured, allow_unused=True)
        if any(grad is not None for grad in before) or sum(map(len, parts)) > len(weights):
            raise InputError("a weight that is measured is used in more than one place")
        with torch.no_grad():  # or the whole graph would be there, which the cut avoids
            chain.check(logits_of(model, batch))
    except ValueError as error:
        warn_once(f"one segment, with the whole graph in memory: {error}")
        return batch.tokens, [Segment(whole, weights)]
    runs = [partial(chain.run, index) for index in range(len(used))]
    return chain.hidden.detach(), list(map(Segment, [*runs, head], parts))


# They share one run of every segment (3 units of work, against some 4 for each of them), and are
# recorded together.
DIRECTIONS_PER_WALK = 32
Vector = Callable[[], torch.Tensor]  # makes a vector when it is needed: as large as the weights
_HIDDEN = ""  # among the inputs of a segment, which otherwise are named as weights


def _product_with_jacobian(
    output: torch.Tensor, vector: torch.Tensor, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """d<output, vector>/d input of every input; the vector is shaped like the output."""
    return torch.autograd.grad(output, inputs, vector, retain_graph=True, materialize_grads=True)


def double_backward_attention():
    """Context in which attention can be differentiated twice; the fused kernels cannot."""
    return sdpa_kernel(SDPBackend.MATH)


class _Run:
    """A segment run forward and, by `gradients`, backward; both can be differentiated again."""

    def __init__(self, segment: Segment, hidden: torch.Tensor, delta: torch.Tensor | None = None):
        self.hidden = hidden.detach().requires_grad_(hidden.is_floating_point())
        with double_backward_attention():
            self.out = segment.forward(self.hidden)
        delta = torch.ones_like(self.out) if delta is None else delta
        self.delta = delta.detach().requires_grad_()
        self.inputs = {_HIDDEN: self.hidden, **segment.weights}

    def gradients(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Of the loss by inputs: weights, or the hidden states (then it is the delta in front)."""
        inputs = {name: self.inputs[name] for name in names}
        found = torch.autograd.grad(self.out, list(inputs.values()), self.delta, create_graph=True)
        return dict(zip(inputs, found, strict=True))


class HessianBatch:
    """The diagonal blocks of the Hessian of one batch's mean loss, as products with directions.

    Costs two forwards of all but the head and one backward at the start.

    Args:
        hidden: input of the first segment.
        segments: the chain, in float32 or float64 (bfloat16 has too few digits for a second
            derivative). Its weights must require gradients; no other parameter should.
    """

    def __init__(self, hidden: torch.Tensor, segments: Sequence[Segment]):
        self._segments = segments
        self._place = {name: k for k, s in enumerate(segments) for name in s.weights}
        self._hidden = [hidden.detach()]
        with torch.no_grad(), double_backward_attention():
            for segment in segments[:-1]:
                self._hidden.append(segment.forward(self._hidden[-1]))
        # The delta behind each segment; that of the last is d loss/d loss, 1.
        self._deltas: list[torch.Tensor | None] = [None] * len(segments)
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
        parts = [[] for _ in self._segments]  # of each segment, x of each direction
        for _, index, x, _ in self._walk_up([(name, direction) for direction in directions]):
            parts[index].append(x)
        # The derivative of <gradient, v> by the hidden states before a segment; at last, by W.
        carried, start = parts[-1], self._place[name]
        for index in range(len(parts) - 2, start - 1, -1):
            run = self._run(index)
            by = run.inputs[name if index == start else _HIDDEN]
            carried = [
                x + _product_with_jacobian(run.out, vector, [by])[0]
                for x, vector in zip(parts[index], carried, strict=True)
            ]
        return carried

    def _walk_up(
        self, directions: Sequence[tuple[str, Vector]]
    ) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """Carries all directions from their segments up to the loss.

        Yields:
            (number of the direction, index of the segment, x, y) for each segment from its own
            upwards; v^T H v is the sum of all x·y. In its own, x is d<gradient, v>/dW and y is v,
            like the weight; above, x is c and y is a, like the hidden states.
        """
        places = [self._place[name] for name, _ in directions]
        carried: dict[int, torch.Tensor] = {}  # number of a direction -> a: (batch, seq_len, dim)
        for index in range(min(places), len(self._segments)):
            own = [k for k, place in enumerate(places) if place == index]
            run = self._run(index)
            wanted = [_HIDDEN] * bool(carried) + [directions[k][0] for k in own]
            gradients = run.gradients(wanted)
            for k, a in list(carried.items()):
                inputs = [run.hidden, run.delta]
                c, carried[k] = _product_with_jacobian(gradients[_HIDDEN], a, inputs)
                yield k, index, c, a
            for k in own:
                name, direction = directions[k]
                v = direction().view_as(run.inputs[name])
                inputs = [run.inputs[name], run.delta]
                second, carried[k] = _product_with_jacobian(gradients[name], v, inputs)
                yield k, index, second, v

    def _run(self, index: int) -> _Run:
        return _Run(self._segments[index], self._hidden[index], self._deltas[index])


def rademacher(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A vector of random signs from the generator, (like.numel(),), dtype and device of ``like``"""
    signs = torch.empty(like.numel(), dtype=like.dtype, device=generator.device)
    return signs.bernoulli_(0.5, generator=generator).mul_(2).sub_(1).to(like.device)


def hutchpp(
    products: Callable[[Sequence[Vector]], Iterable[torch.Tensor]],
    quadratic_forms: Callable[[Sequence[Vector]], list[float]],
    like: torch.Tensor,
    *,
    rank: int,
    num_probes: int,
    generator: torch.Generator,
) -> tuple[float, float, int]:
    """(h, its standard error, the products behind it), where
    h = Tr(Q^T H Q) + Tr(G^T (I - Q Q^T) H (I - Q Q^T) G)/num_probes (Eq. 10).

    A sketch catches the large eigenvalues of the symmetric (dim, dim) matrix H, whose part of the
    trace is then exact; random probes estimate the rest. Unbiased always, and exact when ``rank``
    covers the rank of H. Costs 2·rank + num_probes products and, in memory, (dim, rank).

    Args:
        products: functions that make vectors (dim,) -> H v of each, dim numbers, in order.
        quadratic_forms: the same -> v^T H v of each, which may be cheaper than a product.
        like: a tensor with dim entries, and the dtype and the device of the vectors.
        rank: columns of the sketch; capped at dim.
        num_probes: Rademacher probes G for the rest, at least 2 (for a standard error).
        generator: source of the sketch and the probes.
    """
    rank = min(rank, like.numel())
    basis = like.new_empty(like.numel(), rank)
    exact = 0.0
    if rank:
        random = [lambda: rademacher(like, generator)] * rank
        for k, product in enumerate(products(random)):
            basis[:, k] = product.flatten()
        basis = torch.linalg.qr(basis)[0]  # (dim, rank)
        exact = sum(quadratic_forms([lambda k=k: basis[:, k] for k in range(rank)]))

    def deflated() -> torch.Tensor:
        probe = rademacher(like, generator)
        return probe - basis @ (basis.t() @ probe)  # (I - Q Q^T) g: (dim,)

    rest = torch.tensor(quadratic_forms([deflated] * num_probes), dtype=torch.float64)
    error = rest.std().item() / num_probes**0.5
    return exact + rest.mean().item(), error, 2 * rank + num_probes


def fisher_traces(
    model: nn.Module,
    weights: Mapping[str, nn.Parameter],
    batch: CalibrationBatch,
    generators: Iterator[torch.Generator],
) -> Iterator[dict[str, float]]:
    """For each generator (on the batch's device), one unbiased estimate of every layer's trace;
    NaN for all if the logits are not finite.

    Args:
        model: takes tokens and the batch's ``model_inputs``, gives logits.
        weights: fully qualified name -> weight; these must require gradients.
        batch: labels of -100 do not count; the others are replaced by sampled ones.
    """
    logits = logits_of(model, batch)
    counted = batch.labels >= 0
    probabilities = logits.detach()[counted].softmax(-1, dtype=torch.float32)  # (n, vocabulary)
    if not probabilities.isfinite().all():  # nothing can be sampled from them
        yield from (dict.fromkeys(weights, math.nan) for _ in generators)
        return
    for generator in generators:
        labels = batch.labels.clone()
        labels[counted] = torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
        loss, measured = mean_loss(logits, labels), list(weights.values())
        gradients = torch.autograd.grad(loss, measured, retain_graph=True)
        yield {
            name: batch.num_predicted * float(g.square().sum(dtype=torch.float64))
            for name, g in zip(weights, gradients, strict=True)
        }
