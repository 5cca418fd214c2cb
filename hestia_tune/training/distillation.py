"""Distillation: the loss against a teacher's predictions, and the teacher.

The teacher is the pretrained model (or one of its shape) in the compute dtype, sharded like the
model, without gradients. It costs a forward per micro-batch, 2 bytes a weight over the ranks, and
its logits beside the model's. Both give their logits in chunks of the sequence, and the divergence
(torchtune's) is taken chunk by chunk, so that its float32 probabilities exist for one at a time.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtune.modules import loss

from hestia_tune.config import DistillationConfig
from hestia_tune.config.run import RunConfig
from hestia_tune.distributed import on_first_rank
from hestia_tune.models import build
from hestia_tune.models.checkpoints import check_shapes, read_weights
from hestia_tune.models.folder import SafetensorsFolder
from hestia_tune.reconstruction.losses import GradientAtOnce
from hestia_tune.training import sharding

_LOSSES = {
    "kl": loss.ForwardKLLoss,
    "kl_reverse": loss.ReverseKLLoss,
    "mixed": loss.SymmetricKLLoss,  # half of both
}

Logits = torch.Tensor | list[torch.Tensor]


def as_chunks(logits: Logits) -> list[torch.Tensor]:
    """Logits as a list of chunks (batch, part of seq_len, vocabulary)."""
    return logits if isinstance(logits, list) else [logits]


def distillation_loss_sum(
    logits: Logits,
    teacher_logits: Logits,
    labels: torch.Tensor,
    settings: DistillationConfig,
    ignore_index: int,
    compiled: bool = False,
) -> torch.Tensor:
    """T^2 · sum of the divergence over the predicted tokens, in nats.

    Args:
        logits, teacher_logits: (batch, seq_len, vocabulary), or as many chunks of it.
        labels: (batch, seq_len), shifted; ``ignore_index`` where nothing is predicted.
        settings: loss and temperature T.
        compiled: as fused kernels, with fewer float32 copies of the logits.
    """
    total = torch.zeros((), device=labels.device)
    chunks = as_chunks(logits)
    divergence = _divergence(settings.loss, settings.temperature, ignore_index, compiled)
    parts = labels.split([chunk.shape[1] for chunk in chunks], dim=1)
    for chunk in zip(chunks, as_chunks(teacher_logits), parts, strict=True):
        total = total + GradientAtOnce.apply(divergence, *chunk)
    return total * settings.temperature**2


@cache
def _divergence(
    kind: str, temperature: float, ignore_index: int, compiled: bool
) -> Callable[..., torch.Tensor]:
    divergence, scale = _LOSSES[kind](ignore_index=ignore_index), 1.0 / temperature

    def of_chunk(own: torch.Tensor, other: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        flat = own.flatten(0, 1) * scale, other.flatten(0, 1) * scale  # (tokens, vocabulary)
        return divergence(*flat, part.flatten(), normalize=False)

    return torch.compile(of_chunk, dynamic=True) if compiled else of_chunk


def make_teacher(
    config: RunConfig,
    pretrained: dict[str, torch.Tensor],
    mesh: DeviceMesh,
    dtype: torch.dtype,
    device: torch.device,
) -> nn.Module:
    """Return the model to distil from, frozen and sharded like the model. Collective.

    Args:
        config: The run's config; ``distillation.teacher`` names the model.
        pretrained: The pretrained state dict on the first rank.
        mesh: The ranks that share the model.
        dtype: Dtype of weights and products.
        device: Device of this rank.

    Raises:
        InputError: If a folder holds no model of this shape.
    """
    teacher = build.plain_on_meta(config.model).requires_grad_(False).eval()
    if config.distillation.teacher != "pretrained":
        read = partial(_read_teacher, config, build.shapes_of(teacher))
        pretrained = on_first_rank(read, share=False) or {}
    if config.compile:
        sharding.compile_blocks(teacher)
    sharding.shard(teacher, mesh, dtype, config)
    offload = config.fsdp_cpu_offload
    sharding.materialize(teacher.to(dtype), pretrained, device, offload, dtype=dtype)
    return teacher


def _read_teacher(config: RunConfig, shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    folder = Path(config.distillation.teacher)
    state = dict(read_weights(config.model_type, SafetensorsFolder(folder)))
    check_shapes(shapes, {name: value.shape for name, value in state.items()}, str(folder))
    return state
