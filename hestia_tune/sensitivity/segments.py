"""A model as a chain of segments: blocks, then the head with the loss.

Second derivatives need the graph of the gradient, several times the size of the graph of the loss.
Cut at the hidden states between blocks, only one segment's graph is alive at a time. The price is
that each segment is run again when a walk along the chain reaches it.

A decoder with ``tok_embeddings``, ``layers``, ``norm`` and ``output`` (torchtune's, or one built
like it) is cut between its blocks. Any other model is one segment: right, but with the whole graph
in memory.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True)
class CalibrationBatch:
    """Tokens and what the model is to predict after each.

    Args:
        tokens: int64 (batch, seq_len).
        labels: int64 (batch, seq_len), already shifted: entry t is the token that position t
            predicts, or -100 for none.
        model_inputs: further keyword inputs of the model (``mask``, ``input_pos``).
    """

    tokens: torch.Tensor
    labels: torch.Tensor
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
    """One part of the chain.

    Args:
        forward: hidden states (batch, seq_len, dim) to hidden states; in the last segment, to the
            scalar mean loss. The input of the first may be token ids.
        weights: the weights in here whose curvature is wanted, by fully qualified name.
    """

    forward: Callable[[torch.Tensor], torch.Tensor]
    weights: Mapping[str, nn.Parameter]


def logits_of(model: nn.Module, batch: CalibrationBatch) -> torch.Tensor:
    """Logits (batch, seq_len, vocabulary); a model's output chunks are put together."""
    logits = model(batch.tokens, **batch.model_inputs)
    return torch.cat(logits, 1) if isinstance(logits, list) else logits


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats, averaged over the positions that predict something."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)


def cut(
    model: nn.Module, weights: Mapping[str, nn.Parameter], batch: CalibrationBatch
) -> tuple[torch.Tensor, list[Segment]]:
    """(input of the first segment, the segments in order) for one batch.

    As one segment, if several would not compute the model's loss (two forwards find out, except on
    the meta device), or if a weight is used by more than one.

    Args:
        model: takes tokens and the batch's ``model_inputs``, gives logits.
        weights: fully qualified name -> weight of each layer to measure.
    """

    def whole(tokens: torch.Tensor) -> torch.Tensor:
        return mean_loss(logits_of(model, batch), batch.labels)

    def head(hidden: torch.Tensor) -> torch.Tensor:
        return mean_loss(model.output(model.norm(hidden)), batch.labels)

    names = ("tok_embeddings", "layers", "norm", "output")
    if all(getattr(model, name, None) is not None for name in names):
        users = [model.tok_embeddings, *model.layers, model.output]
        used = [{id(p) for p in u.parameters()} if isinstance(u, nn.Module) else () for u in users]
        parts = [{n: w for n, w in weights.items() if id(w) in ids} for ids in used]
        if not parts[0] and sorted(chain(*parts)) == sorted(weights):
            forwards = [*(partial(block, **batch.model_inputs) for block in model.layers), head]
            with torch.no_grad():
                first = model.tok_embeddings(batch.tokens)
                loss = functools.reduce(lambda hidden, forward: forward(hidden), forwards, first)
                same = loss.is_meta or abs(loss - whole(batch.tokens)) <= 1e-3 * loss + 1e-6
            if same:
                return first, list(map(Segment, forwards, parts[1:]))
    return batch.tokens, [Segment(whole, weights)]
