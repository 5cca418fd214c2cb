"""The loss of a training step: the cross-entropy, and divergences from a pretrained model.

The cross-entropy and the divergences of chunks of logits equal torchtune's to the last bit, in
value and gradient, so runs with and without torchtune have the same losses. `training_loss` mixes
the config's loss with the distillation loss.

**Distillation.** The teacher is the pretrained model (or a model of the same shape) in the
compute dtype, sharded like the model, without gradients. It costs a forward per micro-batch and 2
bytes per weight, shared by the ranks.

**Memory of the logits.** Both models give their logits in chunks of the sequence. Small logits of
a micro-batch are kept for the backward pass, in the compute dtype. Without FSDP2, beyond 64 MiB,
the forward pass computes the gradients of a chunk's hidden states and of the head at once, as fused
linear cross-entropy kernels do, so that only one chunk of logits exists at a time. Under FSDP2, the
gradient of the head belongs to a gathered weight: beyond 1 GiB, the logits of a chunk are dropped,
and computed a second time in the backward pass. The loss and the gradients are the same.
`TrainingRun.drops_logits` chooses.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hestia_tune.config import DistillationConfig
from hestia_tune.config.run_config import RunConfig
from hestia_tune.models.decoder import Decoder

# Number of positions whose predictions are compared at once. It bounds the memory of the logits.
_LOGIT_POSITIONS = 128


def divergence(
    out: torch.Tensor,
    target: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    compiled: bool = False,
) -> torch.Tensor:
    """Return the divergence KL(pretrained || own) of the predictions, summed over positions.

    If a gradient is needed, it is computed at once, part by part. So only the logits of one part
    are in memory, and no logits are computed twice.

    Args:
        out: The own hidden states, (n, dim).
        target: The pretrained hidden states, (n, dim).
        head: Function from hidden states (n, dim) to logits (n, vocabulary).
        compiled: Whether to compute the divergence of the logits by fused kernels.

    Returns:
        The sum in nats, a scalar.
    """
    compare = torch.compile(_divergence, dynamic=True) if compiled else _divergence

    def of_part(h: torch.Tensor, h_full: torch.Tensor) -> torch.Tensor:
        return compare(head(h), head(h_full))

    total = out.new_zeros(())
    for part in zip(out.split(_LOGIT_POSITIONS), target.split(_LOGIT_POSITIONS), strict=True):
        total = total + GradientAtOnce.apply(of_part, *part)
    return total


def _divergence(logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """Return the divergence from logits (positions, vocabulary), computed in float32."""
    own, target = (x.float().log_softmax(-1) for x in (logits, target_logits))
    return F.kl_div(own, target, reduction="sum", log_target=True)


class CEWithChunkedOutputLoss(nn.Module):
    """The mean cross-entropy in nats over logits in chunks of the sequence.

    Logits of one chunk at a time are cast to float32, so that no float32 copy of all logits exists.

    Args:
        num_output_chunks: Number of chunks of the sequence that the model gives.
        ignore_index: Label of positions that predict nothing.
    """

    def __init__(self, num_output_chunks: int = 8, ignore_index: int = -100):
        super().__init__()
        self.num_output_chunks = num_output_chunks
        self.ignore_index = ignore_index

    def compute_cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the sum over the tokens of logits (tokens, vocabulary). torch.compile fits it."""
        return F.cross_entropy(
            logits.float(), labels, ignore_index=self.ignore_index, reduction="sum"
        )

    def forward(self, logits: Sequence[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        """Return the mean over the tokens that have a label.

        Args:
            logits: Chunks (batch, part of seq_len, vocabulary).
            labels: Shifted labels, int64 (batch, seq_len).
        """
        parts = labels.chunk(self.num_output_chunks, dim=1)
        total = 0.0
        for chunk, part in zip(logits, parts, strict=False):  # a short sequence has fewer chunks
            total = total + self.compute_cross_entropy(chunk.flatten(0, 1), part.flatten())
        return total / (labels != self.ignore_index).sum()


def forward_kl(
    logits: torch.Tensor, teacher_logits: torch.Tensor, labels: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    """Return the cross-entropy -Σ p log q of the model q to the teacher p, summed over tokens.

    It is KL(teacher || model) plus the teacher's entropy, which has no gradient.

    Args:
        logits: The model's logits (tokens, vocabulary).
        teacher_logits: The teacher's logits, of the same shape.
        labels: Labels (tokens,).
        ignore_index: Label of tokens that do not count.
    """
    target = teacher_logits.softmax(-1, dtype=torch.float32)
    own = logits.log_softmax(-1, dtype=torch.float32)
    products = (target * own).masked_fill(logits.isinf(), 0)  # 0 · -inf would be NaN
    return _sum_of_counted(products, labels, ignore_index)


def reverse_kl(
    logits: torch.Tensor, teacher_logits: torch.Tensor, labels: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    """Return KL(model || teacher), summed over tokens. See `forward_kl` for the arguments."""
    probabilities = logits.softmax(-1, dtype=torch.float32)
    own = logits.log_softmax(-1, dtype=torch.float32)
    target = teacher_logits.log_softmax(-1, dtype=torch.float32)
    excluded = logits.isinf() | teacher_logits.isinf()
    products = (probabilities * target).masked_fill(excluded, 0)
    products = products - (probabilities * own).masked_fill(excluded, 0)
    return _sum_of_counted(products, labels, ignore_index)


def symmetric_kl(
    logits: torch.Tensor, teacher_logits: torch.Tensor, labels: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    """Return half of `forward_kl` and half of `reverse_kl`."""
    given = logits, teacher_logits, labels, ignore_index
    return 0.5 * forward_kl(*given) + 0.5 * reverse_kl(*given)


def _sum_of_counted(
    products: torch.Tensor, labels: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    """Return minus the sum of (tokens, vocabulary) over the tokens that have a label."""
    return -(products.sum(-1) * (labels != ignore_index).int()).sum()


class GradientAtOnce(torch.autograd.Function):
    """Compute a scalar function and its gradient in the forward pass.

    Call ``GradientAtOnce.apply(function, first, *others)``. The result is ``function(first,
    *others)``. Only its gradient with respect to ``first`` is computed. The gradient is kept in the
    dtype of ``first``, and the intermediate results of the function are freed before the backward.
    """

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


class _ChunksAtOnce(torch.autograd.Function):
    """Sum a function over chunks of hidden states, and compute its gradients in the forward pass.

    Call ``_ChunksAtOnce.apply(function, others, hidden, *leaves)``. The result is the sum of
    ``function(chunk, *other)``, a scalar, over the chunks of ``hidden`` (batch, seq_len, dim) that
    fit ``others``, a list of (labels (batch, chunk), anything else). ``leaves`` are the tensors
    that the function reads from elsewhere and that need a gradient. Only one chunk's intermediate
    results exist at a time. The backward pass can run once.
    """

    @staticmethod
    def forward(ctx, function: Callable[..., torch.Tensor], others: list[tuple], *inputs: Any):
        hidden, *leaves = inputs
        lengths = [labels.shape[1] for labels, *_ in others]
        grads: list[Any] = [torch.empty_like(hidden), *(None for _ in leaves)]
        values = []
        slots = zip(hidden.split(lengths, 1), grads[0].split(lengths, 1), others, strict=True)
        for chunk, slot, other in reversed([*slots]):  # the order of autograd, for the same sums
            chunk = chunk.detach().requires_grad_()
            # An offloading context of the caller must not see what is dropped at once.
            with torch.enable_grad(), saved_tensors_hooks(_unchanged, _unchanged):
                values.append(function(chunk, *other))
                own, *found = torch.autograd.grad(values[-1], (chunk, *leaves))
            slot.copy_(own)
            grads[1:] = [
                new if old is None else old.add_(new)
                for old, new in zip(grads[1:], found, strict=True)
            ]
            del own, found  # as large as the head, and the next chunk's would lie beside them
        ctx.grads = grads
        return sum(value.detach() for value in reversed(values))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        grads, ctx.grads = ctx.grads, None
        return None, None, *(value.mul_(grad) for value in grads)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _leaves_of(output: torch.Tensor) -> list[torch.Tensor]:
    """Return the leaves that need a gradient and that a tensor was computed from."""
    leaves, seen, open_nodes = [], set(), [output.grad_fn]
    while open_nodes:
        node: Any = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # an AccumulateGrad
            leaves.append(node.variable)
        open_nodes += [parent for parent, _ in node.next_functions]
    return leaves


_LOSSES = {
    "kl": forward_kl,
    "kl_reverse": reverse_kl,
    "mixed": symmetric_kl,  # half of each
}

Logits = torch.Tensor | list[torch.Tensor]


def output_chunks(loss: Any) -> int:
    """Return how many chunks of logits a loss component takes. 0: it takes them in one piece."""
    return getattr(loss, "num_output_chunks", 0)


def as_chunks(logits: Logits) -> list[torch.Tensor]:
    """Return logits as a list of chunks (batch, part of seq_len, vocabulary)."""
    return logits if isinstance(logits, list) else [logits]


def distillation_loss_sum(
    logits: Logits,
    teacher_logits: Logits,
    labels: torch.Tensor,
    settings: DistillationConfig,
    ignore_index: int,
    compiled: bool = False,
    at_once: bool = True,
) -> torch.Tensor:
    """Return the sum of the divergence over the predicted tokens, in nats.

    Args:
        logits: The model's logits (batch, seq_len, vocabulary), or chunks of them along seq_len.
        teacher_logits: The teacher's logits, in the same form.
        labels: Shifted labels (batch, seq_len).
        settings: The kind of divergence.
        ignore_index: Label of positions that predict nothing.
        compiled: Whether to compute with fused kernels, which make fewer float32 copies of the
            logits.
        at_once: Whether to compute the gradient with respect to the logits in the forward pass, so
            that no float32 copy of the logits is kept.
    """
    total = torch.zeros((), device=labels.device)
    chunks = as_chunks(logits)
    divergence = _chunk_divergence(settings.loss, ignore_index, compiled)
    parts = labels.split([chunk.shape[1] for chunk in chunks], dim=1)
    for chunk in zip(chunks, as_chunks(teacher_logits), parts, strict=True):
        result = GradientAtOnce.apply(divergence, *chunk) if at_once else divergence(*chunk)
        total = total + result
    return total


@cache
def _chunk_divergence(kind: str, ignore_index: int, compiled: bool) -> Callable[..., torch.Tensor]:
    """Return a function of (logits, teacher's logits, labels) of one chunk: the divergence."""
    divergence = _LOSSES[kind]

    def of_chunk(own: torch.Tensor, other: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        flat = own.flatten(0, 1), other.flatten(0, 1)  # (tokens, vocabulary)
        return divergence(*flat, part.flatten(), ignore_index)

    return torch.compile(of_chunk, dynamic=True) if compiled else of_chunk


def mixed_loss(
    logits: Logits,
    teacher_logits: Logits | None,
    labels: torch.Tensor,
    loss: Any,
    config: RunConfig,
    compiled: bool = False,
    at_once: bool = True,
) -> torch.Tensor:
    """Return the sum of a run's training loss over the predicted tokens, in nats.

    Args:
        logits: See `distillation_loss_sum`, also for ``compiled`` and ``at_once``.
        teacher_logits: The teacher's logits. None takes the loss component alone.
        labels: Shifted labels (batch, seq_len).
        loss: The loss component.
        config: The run's config.
        compiled: Whether to compute the divergence by fused kernels.
        at_once: See `distillation_loss_sum`.
    """
    count = (labels != loss.ignore_index).sum()
    total, weight = torch.zeros_like(count, dtype=torch.float32), 0.0
    if teacher_logits is not None:
        weight = config.distillation.weight
        total = weight * distillation_loss_sum(
            logits,
            teacher_logits,
            labels,
            config.distillation,
            loss.ignore_index,
            compiled,
            at_once,
        )
    if weight == 1:
        return total
    # Without a token to predict, the mean would be NaN. Any label works, because count is 0.
    labels = torch.where(count > 0, labels, torch.zeros_like(labels))
    if not isinstance(logits, list):
        labels, logits = labels.reshape(-1), logits.reshape(-1, logits.size(-1))
    return total + (1 - weight) * loss(logits, labels) * count


def training_loss(
    model: Any,
    teacher: nn.Module | None,
    batch: Mapping[str, torch.Tensor],
    labels: torch.Tensor,
    loss: Any,
    config: RunConfig,
    *,
    compiled: bool = False,
    drop: Literal["recompute", "at_once"] | None = None,
    context: AbstractContextManager[Any] | None = None,
) -> torch.Tensor:
    """Return the sum of a run's training loss over the predicted tokens of a batch, in nats.

    Args:
        model: The model.
        teacher: The model to distil from. None takes the loss component alone.
        batch: The inputs of both models.
        labels: Shifted labels (batch, seq_len).
        loss: The loss component.
        config: The run's config.
        compiled: Whether to compute the divergence by fused kernels.
        drop: How to hold the logits of one chunk at a time: "at_once" computes their gradients in
            the forward pass, "recompute" the logits again in the backward pass. The models must
            give chunks. The head runs inside of the model's forward, where FSDP has gathered its
            weight; there, only "recompute" is possible, and the root of a sharded teacher must keep
            its gathered weights after its forward. None: all logits are kept.
        context: A context for the model's forward, such as torchtune's activation offloading.
    """
    context = context or nullcontext()
    if drop is None:
        targets = None
        if teacher is not None:
            with torch.no_grad():
                targets = teacher(**batch)
        with context:
            logits = model(**batch)
        return mixed_loss(logits, targets, labels, loss, config, compiled)
    count = model.num_output_chunks
    one = copy.copy(loss)  # the same loss for one chunk
    one.num_output_chunks = 1
    targets: Any = [None] * count
    if teacher is not None:
        chunked = _output(teacher, lambda hidden: list(hidden.chunk(count, dim=1)))
        with chunked, torch.no_grad():
            targets = teacher(**batch)

    def of_chunk(
        hidden: torch.Tensor, part: torch.Tensor, target: torch.Tensor | None
    ) -> torch.Tensor:
        own, other = [_head(model, hidden)], None
        if target is not None:
            with torch.no_grad():
                other = [_head(teacher, target)]
        return mixed_loss(own, other, part, one, config, compiled, at_once=False)

    def of_chunks(hidden: torch.Tensor) -> list[torch.Tensor]:
        chunks = hidden.chunk(count, dim=1)
        parts = labels.split([chunk.shape[1] for chunk in chunks], dim=1)
        others = [*zip(parts, targets, strict=False)]  # a short sequence has fewer chunks
        if drop == "at_once" and hidden.requires_grad:
            leaves = _leaves_of(_head(model, hidden[:, :0].detach()))  # of no position
            return [_ChunksAtOnce.apply(of_chunk, others, hidden, *leaves)]
        options: Any = {"use_reentrant": False, "preserve_rng_state": False}
        given = zip(chunks, others, strict=True)
        return [checkpoint(of_chunk, chunk, *other, **options) for chunk, other in given]

    with _output(model, of_chunks), context:
        return torch.stack(model(**batch)).sum()


def _head(model: Any, hidden: torch.Tensor) -> Any:
    """Return the logits of hidden states (batch, chunk, dim)."""
    return model.head(hidden) if isinstance(model, Decoder) else model.output(hidden)


@contextmanager
def _output(model: nn.Module, function: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """Make a decoder return a function of its last hidden states instead of its logits."""
    model.chunked_output = function
    try:
        yield
    finally:
        del model.chunked_output
