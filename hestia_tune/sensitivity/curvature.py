"""Curvature of the loss in single weights, measured segment by segment.

A model is cut into a chain of segments: its blocks (`hestia_tune.blocks` finds them), then the
head with the loss. Second derivatives need the graph of the gradient, several times the size of
the graph of the loss. With the cut, only the graph of one segment is alive at a time. The price:
each segment is run again when a walk along the chain reaches it. A model without blocks, or
whose blocks do not make a chain, is one segment. This is right, but needs memory for all graphs.

**Hessian**, by double backward. Take a weight in segment s and a direction v. Let a be the
derivative of the hidden states along v, and delta the gradient of the loss by the hidden states.
Differentiating <gradient of the weight, v> by the incoming delta gives a behind segment s. Take
<delta in front of segment l, a> next. Its derivative by the incoming delta is a behind l. Its
derivative by the hidden states is c_l, the curvature that l adds. So one walk upwards gives this
for all directions of all weights:

    v^T H v = v·(d<gradient, v>/dW inside s) + sum over l > s of c_l·a_l

Every segment is run once, from the lowest segment that has a direction. The product H v also takes
a walk down. In memory are the hidden states and deltas between segments, the graph of one segment,
and one hidden state per direction.

**Fisher** (Gauss-Newton), by plain backward passes. The loss is the mean over n tokens of -log
p(label), with labels drawn from the model's own predictions. The gradient of each token then has
mean 0. So the squared norm of the gradient of the mean is 1/n of the mean squared norm.
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
    """Tokens, and the label that the model must predict at each position.

    Args:
        tokens: int64 (batch, seq_len).
        labels: The token that follows each position (already shifted), or -100 where nothing is
            predicted: int64 (batch, seq_len).
        model_inputs: Further keyword inputs of the model, such as ``mask`` and ``input_pos``.
        is_real: True for tokens, False for padding: bool (batch, seq_len). None: no padding.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    model_inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    is_real: torch.Tensor | None = None

    @property
    def has_successor(self) -> torch.Tensor:
        """Positions whose next token is real, with or without a label: bool (batch, seq_len)."""
        real = torch.ones_like(self.tokens, dtype=torch.bool)
        real = real if self.is_real is None else self.is_real
        return torch.hstack((real[:, 1:], torch.zeros_like(real[:, :1])))

    @property
    def num_predicted(self) -> int:
        """Number of positions that count in the loss."""
        return int((self.labels != IGNORE_INDEX).sum())

    def to(self, device: torch.device | str) -> "CalibrationBatch":
        """Return the same batch on another device."""
        inputs = {key: value.to(device) for key, value in self.model_inputs.items()}
        return dataclasses.replace(
            self,
            tokens=self.tokens.to(device),
            labels=self.labels.to(device),
            model_inputs=inputs,
            is_real=None if self.is_real is None else self.is_real.to(device),
        )


class Segment(NamedTuple):
    """A part of the chain."""

    # Function from hidden states to hidden states, both (batch, seq_len, dim). The last segment
    # returns the scalar mean loss. The input of the first segment may be token ids.
    forward: Callable[[torch.Tensor], torch.Tensor]
    weights: Mapping[str, nn.Parameter]  # Fully qualified name -> weight to measure.


def logits_of(model: nn.Module, batch: CalibrationBatch) -> torch.Tensor:
    """Return the logits of a model on a batch, (batch, seq_len, vocabulary)."""
    return as_one(model(batch.tokens, **batch.model_inputs))


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy in nats, averaged over the positions that have a label."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)


def cut(
    model: nn.Module, weights: Mapping[str, nn.Parameter], batch: CalibrationBatch
) -> tuple[torch.Tensor, list[Segment]]:
    """Cut a model into segments for one batch.

    The model stays one segment, with a warning, in two cases: if the segments would not compute the
    logits of the model, or if several segments use the same weight. Two forwards check the logits,
    except on the meta device.

    Args:
        model: The model. It takes tokens and the batch's ``model_inputs``, and returns logits.
        weights: Fully qualified name -> weight of each layer to measure.
        batch: The calibration samples of the batch.

    Returns:
        The input of the first segment, and the segments in order.
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
        before = ()
        if chain.hidden.requires_grad:  # The embedding may be tied to a measured weight.
            embedded = chain.hidden.sum()
            before = torch.autograd.grad(embedded, [*weights.values()], allow_unused=True)
        if any(grad is not None for grad in before) or sum(map(len, parts)) > len(weights):
            raise InputError("a measured weight is used in more than one place")
        with torch.no_grad():  # Otherwise the whole graph would be in memory.
            chain.check(logits_of(model, batch))
    except ValueError as error:
        warn_once(f"the model is measured as one segment, which takes more memory: {error}")
        return batch.tokens, [Segment(whole, weights)]
    runs = [partial(chain.run, index) for index in range(len(used))]
    return chain.hidden.detach(), [*map(Segment, [*runs, head], parts)]


# Directions that share a run of every segment, and are recorded together. The run costs 3 units of
# work, and each direction some 4.
DIRECTIONS_PER_WALK = 32
Vector = Callable[[], torch.Tensor]  # Makes a vector, as large as a weight, when it is needed.
_HIDDEN = ""  # Name of the hidden states among the inputs of a segment. The others are weights.


def _product_with_jacobian(
    output: torch.Tensor, vector: torch.Tensor, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return d<output, vector>/d input for every input. The vector is shaped like the output."""
    return torch.autograd.grad(output, inputs, vector, retain_graph=True, materialize_grads=True)


def double_backward_attention():
    """Return a context without fused attention kernels, which cannot be differentiated twice."""
    return sdpa_kernel(SDPBackend.MATH)


class _Run:
    """A run of a segment, forward and (by `gradients`) backward; both can be differentiated."""

    def __init__(self, segment: Segment, hidden: torch.Tensor, delta: torch.Tensor | None = None):
        self.hidden = hidden.detach().requires_grad_(hidden.is_floating_point())
        with double_backward_attention():
            self.out = segment.forward(self.hidden)
        delta = torch.ones_like(self.out) if delta is None else delta
        self.delta = delta.detach().requires_grad_()
        self.inputs = {_HIDDEN: self.hidden, **segment.weights}

    def gradients(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the gradients of the loss by the named inputs: weights, or the hidden states."""
        inputs = {name: self.inputs[name] for name in names}
        grads = torch.autograd.grad(self.out, list(inputs.values()), self.delta, create_graph=True)
        return dict(zip(inputs, grads, strict=True))


class HessianBatch:
    """Multiply by the diagonal blocks of the Hessian of the mean loss of one batch.

    The blocks are given by products with directions. The start costs two forwards of everything but
    the head, and one backward.

    Args:
        hidden: Input of the first segment.
        segments: The chain, in float32 or float64, because bfloat16 has too few digits for a second
            derivative. The measured weights must require gradients. No other parameter should.
    """

    def __init__(self, hidden: torch.Tensor, segments: Sequence[Segment]):
        self._segments = segments
        self._place = {name: k for k, s in enumerate(segments) for name in s.weights}
        self._hidden = [hidden.detach()]  # Input of each segment.
        with torch.no_grad(), double_backward_attention():
            for segment in segments[:-1]:
                self._hidden.append(segment.forward(self._hidden[-1]))
        # The delta behind each segment. Behind the last segment it is d loss/d loss = 1 (None).
        self._deltas: list[torch.Tensor | None] = [None] * len(segments)
        for index in range(len(segments) - 1, 0, -1):
            run = self._run(index)
            (self._deltas[index - 1],) = torch.autograd.grad(run.out, run.hidden, run.delta)

    def quadratic_forms(self, directions: Sequence[tuple[str, Vector]]) -> list[float]:
        """Return v^T H v for each direction, in one walk.

        Args:
            directions: Pairs (name of a weight, direction v with as many entries as the weight).
        """
        forms = [0.0] * len(directions)
        for k, _, x, y in self._walk_up(directions):
            forms[k] += float((x * y).sum(dtype=torch.float64))
        return forms

    def products(self, name: str, directions: Sequence[Vector]) -> list[torch.Tensor]:
        """Return the products H v for directions in one weight.

        Args:
            name: Name of the weight.
            directions: The directions v, with as many entries as the weight.

        Returns:
            The products, shaped like the weight.
        """
        parts = [[] for _ in self._segments]  # For each segment, x of each direction.
        for _, index, x, _ in self._walk_up([(name, direction) for direction in directions]):
            parts[index].append(x)
        # The derivative of <gradient, v> by the hidden states before a segment, and finally by W.
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
        """Carry all directions from their own segments up to the loss.

        Yields:
            (number of the direction, index of the segment, x, y) for each segment from the
            direction's own segment upwards. v^T H v is the sum of all x·y. In the own segment, x is
            d<gradient, v>/dW and y is v, both shaped like the weight. In the segments above, x is c
            and y is a, both shaped like the hidden states.
        """
        places = [self._place[name] for name, _ in directions]
        carried: dict[int, torch.Tensor] = {}  # Number of a direction -> a: (batch, seq_len, dim).
        for index in range(min(places), len(self._segments)):
            own = [k for k, place in enumerate(places) if place == index]
            run = self._run(index)
            gradients = run.gradients([_HIDDEN] * bool(carried) + [directions[k][0] for k in own])
            inputs = [run.hidden, run.delta]
            for k, a in [*carried.items()]:
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
    """Return random signs, (like.numel(),), in the dtype and on the device of ``like``."""
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
    """Return the Hutch++ estimate of the trace of a symmetric matrix H, (dim, dim).

    h = Tr(Q^T H Q) + Tr(G^T (I - Q Q^T) H (I - Q Q^T) G)/num_probes (Eq. 12). h is the
    estimate. Q, (dim, rank), is an orthonormal basis of H times random signs (the sketch). G, (dim,
    num_probes), holds random signs (the probes).

    The sketch catches the large eigenvalues of H, so their part of the trace is exact. The probes
    estimate the rest. The estimate is always unbiased. It is exact if ``rank`` covers the rank of
    H. It costs 2·rank + num_probes products, and memory for Q.

    Args:
        products: Function from vectors v, (dim,), to the products H v, with dim entries each. The
            vectors are given as functions that make them.
        quadratic_forms: Function from such vectors to the numbers v^T H v. They may be cheaper than
            the products.
        like: A tensor with dim entries, and with the dtype and the device of the vectors.
        rank: Number of columns of the sketch; at most dim are used.
        num_probes: Number of probes, at least 2 (for a standard error).
        generator: Source of the sketch and the probes.

    Returns:
        The estimate, its standard error, and the number of products.
    """
    rank = min(rank, like.numel())
    basis = like.new_empty(like.numel(), rank)
    exact = 0.0
    if rank:
        for k, product in enumerate(products([lambda: rademacher(like, generator)] * rank)):
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
    """Yield, for each generator, one unbiased estimate of the trace of every layer.

    Args:
        model: The model. It takes tokens and the batch's ``model_inputs``, and returns logits.
        weights: Fully qualified name -> weight of each layer. The weights must require gradients.
        batch: The calibration samples. Labels of -100 do not count. Sampled labels replace the
            others.
        generators: Sources of the sampled labels, on the device of the batch.

    Yields:
        Layer name -> estimate. All estimates are NaN if the logits are not finite.
    """
    logits = logits_of(model, batch)
    has_label = batch.labels >= 0
    probabilities = logits.detach()[has_label].softmax(-1, dtype=torch.float32)  # (n, vocabulary)
    if not probabilities.isfinite().all():  # No labels can be sampled.
        yield from (dict.fromkeys(weights, math.nan) for _ in generators)
        return
    for generator in generators:
        labels = batch.labels.clone()
        labels[has_label] = torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
        loss = mean_loss(logits, labels)
        gradients = torch.autograd.grad(loss, [*weights.values()], retain_graph=True)
        yield {
            name: batch.num_predicted * float(g.square().sum(dtype=torch.float64))
            for name, g in zip(weights, gradients, strict=True)
        }
