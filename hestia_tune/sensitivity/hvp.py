"""Curvature of the loss along directions in one weight, by double backward, segment by segment.

For a weight in segment s and a direction v, let a be the derivative of the hidden states along v
and delta the gradient of the loss by the hidden states. Differentiating <gradient of the weight, v>
by the delta that comes in gives a behind segment s; differentiating <delta in front of segment l,
a> by the delta that comes in gives a behind l, and by the hidden states c_l, the curvature that l
adds. So, in one walk upwards,

    v^T H v = v·(d<gradient, v>/dW inside s) + sum over l > s of c_l·a_l,

for all directions of all weights at once: every segment is run once, and only from the lowest one
that has a direction. `HessianBatch.products`, for H v itself, walks down again. Memory: the hidden
states and deltas between segments, one segment's graph, one hidden state per direction carried.

The attention kernel must be twice differentiable, which fused scaled-dot-product attention is not:
segments run inside `double_backward_attention`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hestia_tune.sensitivity.segments import Segment

# Makes the direction when it is needed, shaped like its weight: they are as large as the weights.
Direction = Callable[[], torch.Tensor]


def double_backward_attention():
    """Context in which scaled-dot-product attention can be differentiated twice."""
    return sdpa_kernel(SDPBackend.MATH)


@dataclass
class Link:
    """One segment run forward and, after `differentiate`, backward; both can be differentiated."""

    hidden: torch.Tensor
    incoming: torch.Tensor  # the delta behind the segment
    out: torch.Tensor
    weights: dict[str, nn.Parameter]
    delta: torch.Tensor | None = None  # the delta before the segment
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def run(
        cls, segment: Segment, hidden: torch.Tensor, incoming: torch.Tensor, names: Sequence[str]
    ) -> "Link":
        """Runs ``segment`` from ``hidden``; ``names`` are the weights to differentiate by."""
        hidden = hidden.detach()
        if hidden.is_floating_point():
            hidden.requires_grad_()
        with double_backward_attention():
            out = segment.forward(hidden)
        incoming = incoming.detach().requires_grad_()
        return cls(hidden, incoming, out, {name: segment.weights[name] for name in names})

    def differentiate(self, with_hidden: bool) -> None:
        """Makes the gradients by the weights and, if asked, the delta before the segment."""
        inputs = [self.hidden] if with_hidden else []
        results = torch.autograd.grad(
            self.out, [*inputs, *self.weights.values()], self.incoming, create_graph=True
        )
        if with_hidden:
            self.delta = results[0]
        self.gradients = dict(zip(self.weights, results[len(inputs) :], strict=True))


class HessianBatch:
    """The diagonal blocks of the Hessian of one batch's mean loss, as products with directions.

    Costs two forwards and one backward at the start.

    Args:
        hidden: input of the first segment.
        segments: the chain. Its weights must require gradients; no other parameter should.
            Float32 or float64: bfloat16 has too few digits for a second derivative.
        vectors_at_once: directions that go through a segment together (vmap), at as many times
            the memory; 1 is fastest on CPUs.
        on_progress: told after each direction through a segment.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        segments: Sequence[Segment],
        *,
        vectors_at_once: int = 1,
        on_progress: Callable[[int], None] = lambda count: None,
    ):
        self._segments = segments
        self.vectors_at_once = vectors_at_once
        self._on_progress = on_progress
        self._place = {name: k for k, s in enumerate(segments) for name in s.weights}
        self._hidden = [hidden.detach()]
        with torch.no_grad(), double_backward_attention():
            for segment in segments[:-1]:
                self._hidden.append(segment.forward(self._hidden[-1]))
            loss = segments[-1].forward(self._hidden[-1])
        # The delta behind each segment; that of the last is d loss/d loss.
        self._deltas = [torch.ones_like(loss)] * len(segments)
        for index in range(len(segments) - 1, 0, -1):
            link = self._run(index)
            (self._deltas[index - 1],) = torch.autograd.grad(link.out, link.hidden, link.incoming)

    def quadratic_forms(self, directions: Sequence[tuple[str, Direction]]) -> list[float]:
        """v^T H v for each (name of a weight, direction v), in one walk."""
        return self._walk_up(directions)

    def products(self, name: str, directions: Sequence[Direction]) -> Iterator[torch.Tensor]:
        """H v, shaped like the weight, for each direction in the weight ``name``."""
        start, top = self._place[name], len(self._segments) - 1
        starts: list[torch.Tensor] = []
        curvatures: dict[int, list[torch.Tensor]] = {}
        self._walk_up([(name, direction) for direction in directions], starts, curvatures)
        if start == top:
            yield from starts
            return
        # From here on: the derivative of <gradient, v> by the hidden states before a segment.
        carried = curvatures.pop(top)
        for index in range(top - 1, start, -1):
            link = self._run(index)
            below = self._vjp(link.out, carried, [link.hidden])
            carried = [c + b for c, (b,) in zip(curvatures.pop(index), below, strict=True)]
        link = self._run(start, [name])
        for first, vector in zip(starts, carried, strict=True):
            ((second,),) = self._vjp(link.out, [vector], [link.weights[name]])
            yield first + second

    def _walk_up(
        self,
        directions: Sequence[tuple[str, Direction]],
        starts: list[torch.Tensor] | None = None,
        curvatures: dict[int, list[torch.Tensor]] | None = None,
    ) -> list[float]:
        """v^T H v of all directions. Also collects, if given (and the directions are of one
        weight), the derivatives inside the first segment and c_l by segment."""
        places = [self._place[name] for name, _ in directions]
        forms = [0.0] * len(directions)
        carried: dict[int, torch.Tensor] = {}
        for index in range(min(places), len(self._segments)):
            own = [k for k, place in enumerate(places) if place == index]
            link = self._run(index, list(dict.fromkeys(directions[k][0] for k in own)))
            link.differentiate(with_hidden=bool(carried))
            inputs = [link.hidden, link.incoming]
            results = self._vjp(link.delta, list(carried.values()), inputs) if carried else []
            for k, (c, a) in zip(list(carried), results, strict=True):
                forms[k] += _dot(c, carried[k])
                carried[k] = a
                if curvatures is not None:
                    curvatures.setdefault(index, []).append(c)
            for k in own:
                name, direction = directions[k]
                weight = link.weights[name]
                v = direction().view_as(weight)
                ((h, a),) = self._vjp(link.gradients[name], [v], [weight, link.incoming])
                forms[k] += _dot(h, v)
                carried[k] = a
                if starts is not None:
                    starts.append(h)
        return forms

    def _run(self, index: int, names: Sequence[str] = ()) -> Link:
        return Link.run(self._segments[index], self._hidden[index], self._deltas[index], names)

    def _vjp(
        self, output: torch.Tensor, vectors: Sequence[torch.Tensor], inputs: list[torch.Tensor]
    ) -> list[tuple[torch.Tensor, ...]]:
        """For each vector, the derivatives of <output, vector> by the inputs."""
        results = []
        size = self.vectors_at_once
        for start in range(0, len(vectors), size):
            chunk = list(vectors[start : start + size])
            batched = len(chunk) > 1
            found = torch.autograd.grad(
                output,
                inputs,
                torch.stack(chunk) if batched else chunk[0],
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=batched,
            )
            for k in range(len(chunk)):
                results.append(
                    tuple(
                        torch.zeros_like(value) if got is None else got[k] if batched else got
                        for got, value in zip(found, inputs, strict=True)
                    )
                )
            self._on_progress(len(chunk))
        return results


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a * b).sum(dtype=torch.float64))
