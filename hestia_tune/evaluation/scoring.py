"""Log-probabilities of continuations after contexts, with contexts shared.

The answers of one multiple-choice question share their context, which is most of the tokens. Where
the model takes a mask and positions (torchtune's do), they are laid out as one sequence

    context  answer 1  answer 2 ...

in which an answer sees the context and itself, at the positions it would have alone. That is exact
up to rounding, and spares e.g. HellaSwag more than half of its tokens. Answers that differ only in
their last token need nothing of this: it is never an input, so they are one sequence for any model.
The cost is a mask of length² bytes per sequence, so it is done only where it saves a quarter of the
tokens or more.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from hestia_tune.evaluation.batching import Batcher
from hestia_tune.evaluation.forward import ModelForward


@dataclass(frozen=True, kw_only=True)
class Request:
    """Tokens to be scored.

    Args:
        index: by which the caller knows it.
        context: token ids, at least one.
        continuation: token ids to score, at least one.
    """

    index: int
    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def branch(self) -> tuple[int, ...]:
        """The continuation's own inputs: all but its last token, which is only predicted."""
        return self.continuation[:-1]


@dataclass(frozen=True)
class Row:
    """One sequence of a batch: a context and the distinct branches that follow it."""

    context: tuple[int, ...]
    branches: dict[tuple[int, ...], list[Request]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return len(self.context) + sum(map(len, self.branches))

    @property
    def num_requests(self) -> int:
        return sum(map(len, self.branches.values()))


def fit_window(request: Request, window: int) -> Request:
    """The request with its context cut from the left, if it is longer than the window.

    The last token of the continuation is no input, so ``window + 1`` tokens fit.

    Raises:
        ValueError: if the continuation alone does not fit, or a part is empty.
    """
    room = window + 1 - len(request.continuation)
    if room < 1:
        raise ValueError(
            f"a continuation of {len(request.continuation)} tokens does not fit into a window of "
            f"{window}; use a model with a longer window or leave the task out"
        )
    if not (request.context and request.continuation):
        raise ValueError("a context and a continuation of at least one token each are needed")
    if len(request.context) <= room:
        return request
    return Request(
        index=request.index, context=request.context[-room:], continuation=request.continuation
    )


def plan_rows(requests: Sequence[Request], window: int, share_contexts: bool) -> list[Row]:
    """Requests (already fitted to the window) as sequences, longest first.

    Args:
        requests: in any order.
        window: longest sequence in tokens.
        share_contexts: lay different branches out behind one context.
    """
    by_context: dict[tuple[int, ...], dict[tuple[int, ...], list[Request]]] = {}
    for request in requests:
        branches = by_context.setdefault(request.context, {})
        branches.setdefault(request.branch, []).append(request)
    rows = []
    for context, branches in by_context.items():
        together = len(context) + sum(map(len, branches))
        apart = len(branches) * len(context) + sum(map(len, branches))
        if not share_contexts or 4 * together > 3 * apart:
            rows += [Row(context, {branch: found}) for branch, found in branches.items()]
            continue
        row = Row(context)
        for branch, found in branches.items():
            if row.branches and row.length + len(branch) > window:
                rows.append(row)
                row = Row(context)
            row.branches[branch] = found
        rows.append(row)
    return sorted(rows, key=lambda row: (-row.length, row.context))


def score_rows(
    forward: ModelForward,
    batcher: Batcher,
    rows: Sequence[Row],
    describe: Callable[[int], str] = lambda index: f"request {index}",
) -> Iterator[list[tuple[int, float, bool]]]:
    """Runs the rows and yields, batch by batch, (index, log-probability, is greedy) of requests.

    Args:
        forward: the model.
        batcher: how many rows go together.
        rows: longest first.
        describe: words for the request of an index, used in errors.

    Raises:
        FloatingPointError: naming the request whose logits are NaN.
    """

    def run(batch: Sequence[Row]) -> list[tuple[int, float, bool]]:
        layout = _lay_out(batch, forward.device)
        values, greedy = forward.log_probs(*layout.arguments)
        values = values.double().split(layout.counts)
        greedy = greedy.split(layout.counts)
        found = []
        for request, logp, is_best in zip(layout.requests, values, greedy, strict=True):
            if logp.isnan().any():
                raise FloatingPointError(
                    f"NaN in the logits of {describe(request.index)}; check the model's weights "
                    "and dtype"
                )
            found.append((request.index, logp.sum().item(), bool(is_best.all())))
        return found

    for _, result in batcher.run(rows, lambda row: row.length, run):
        yield result


@dataclass(frozen=True)
class _Layout:
    arguments: tuple[torch.Tensor | None, ...]  # of ModelForward.log_probs
    requests: list[Request]
    counts: list[int]  # scored tokens of each request


def _lay_out(batch: Sequence[Row], device: torch.device) -> _Layout:
    """The rows as tensors, padded on the right (which a causal model does not see)."""
    width = max(row.length for row in batch)
    tokens = torch.zeros(len(batch), width, dtype=torch.int64)
    positions = torch.zeros_like(tokens)
    segments = torch.full_like(tokens, -1)  # 0 the context, 1, 2, ... its branches, -1 padding
    places: list[int] = []
    targets: list[int] = []
    requests: list[Request] = []
    for index, row in enumerate(batch):
        size = len(row.context)
        tokens[index, :size] = torch.tensor(row.context)
        positions[index, :size] = torch.arange(size)
        segments[index, :size] = 0
        start = size
        for number, (branch, found) in enumerate(row.branches.items(), start=1):
            end = start + len(branch)
            tokens[index, start:end] = torch.tensor(branch, dtype=torch.int64)
            positions[index, start:end] = torch.arange(size, size + len(branch))
            segments[index, start:end] = number
            offset = index * width
            for request in found:
                places += [offset + size - 1, *range(offset + start, offset + end)]
                targets += request.continuation
                requests.append(request)
            start = end
    mask = None
    if any(len(row.branches) > 1 for row in batch):
        seen = (segments[:, None, :] == 0) | (segments[:, None, :] == segments[:, :, None])
        mask = (seen & torch.ones(width, width, dtype=torch.bool).tril()).to(device)
    arguments = (
        tokens.to(device),
        torch.tensor(places).to(device),
        torch.tensor(targets).to(device),
        mask,
        None if mask is None else positions.to(device),
    )
    return _Layout(arguments, requests, [len(request.continuation) for request in requests])
