"""A model as a chain of segments: blocks, then the head with the loss.

Second derivatives need the graph of the gradient, several times the size of the graph of the loss.
Cut at the hidden states between blocks, only one segment's graph is alive at a time; what the
others hand over is one hidden state per product. The price is that each segment is run again when
a walk along the chain reaches it, once for all products together.

A decoder with ``tok_embeddings``, ``layers``, ``norm`` and ``output`` (torchtune's, or one built
like it) is cut between its blocks. Any other model is one segment: right, but with the whole graph
in memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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
        return CalibrationBatch(
            tokens=self.tokens.to(device),
            labels=self.labels.to(device),
            model_inputs={key: value.to(device) for key, value in self.model_inputs.items()},
        )


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One link of the chain.

    Args:
        forward: hidden states (batch, seq_len, dim) to hidden states; in the last link, to the
            scalar mean loss. The input of the first link may be token ids.
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
    model: nn.Module,
    weights: Mapping[str, nn.Parameter],
    batch: CalibrationBatch,
    *,
    whole: bool = False,
) -> tuple[torch.Tensor, list[Segment]]:
    """(input of the first segment, the segments in order) for one batch.

    Args:
        model: takes tokens and the batch's ``model_inputs``, gives logits.
        weights: fully qualified name -> weight of each layer to measure.
        whole: as one segment, whatever the model looks like.
    """
    places = {} if whole else _places(model)
    if any(id(weight) not in places for weight in weights.values()):

        def forward(tokens: torch.Tensor) -> torch.Tensor:
            return mean_loss(logits_of(model, batch), batch.labels)

        return batch.tokens, [Segment(forward=forward, weights=weights)]

    def block(index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda hidden: model.layers[index](hidden, **batch.model_inputs)

    def head(hidden: torch.Tensor) -> torch.Tensor:
        return mean_loss(model.output(model.norm(hidden)), batch.labels)

    forwards = [block(index) for index in range(len(model.layers))] + [head]
    segments = [
        Segment(
            forward=forward,
            weights={name: w for name, w in weights.items() if places[id(w)] == index},
        )
        for index, forward in enumerate(forwards)
    ]
    with torch.no_grad():
        hidden = model.tok_embeddings(batch.tokens)
    return hidden, segments


def _places(model: nn.Module) -> dict[int, int]:
    """Parameter id -> index of the only segment that uses it; empty if the model is no chain."""
    blocks = getattr(model, "layers", None)
    others = ("tok_embeddings", "norm", "output")
    if not isinstance(blocks, nn.ModuleList) or not all(hasattr(model, name) for name in others):
        return {}
    owners = [*blocks, model.output]
    places: dict[int, int] = {}
    shared = {id(p) for p in model.tok_embeddings.parameters()}
    for index, owner in enumerate(owners):
        for parameter in owner.parameters() if isinstance(owner, nn.Module) else ():
            if places.setdefault(id(parameter), index) != index:
                shared.add(id(parameter))
    return {key: index for key, index in places.items() if key not in shared}
