"""A model as a chain of segments: blocks, then the head with the loss.

Second derivatives need the graph of the gradient, several times the size of the graph of the loss.
Cut at the hidden states between blocks, only one segment's graph is alive at a time. The price is
that each segment is run again when a walk along the chain reaches it.

A model is cut between its blocks (`hestia_tune.blocks` finds them). One without blocks, or whose
blocks do not make a chain, is one segment: right, but with the whole graph in memory.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

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
