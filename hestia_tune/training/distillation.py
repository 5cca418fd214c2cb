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

from hestia_tune.distributed import on_first_rank
from hestia_tune.export.folder import SafetensorsFolder
from hestia_tune.models import build
from hestia_tune.models.checkpoints import read_weights
from hestia_tune.reconstruction.losses import GradientAtOnce
from hestia_tune.sections import DistillationConfig
from hestia_tune.training import sharding
from hestia_tune.training.options import Run

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
    run: Run,
    pretrained: dict[str, torch.Tensor],
    mesh: DeviceMesh,
    dtype: torch.dtype,
    device: torch.device,
) -> nn.Module:
    """The model to distil from, frozen and sharded like the model. Collective.

    Args:
        run: its ``distillation.teacher`` names the model.
        pretrained: the pretrained state dict, on the first rank.
        mesh, dtype, device: of the run.

    Raises:
        FileNotFoundError, ValueError: if a folder holds no model of this shape.
    """
    cfg = run.cfg
    teacher = build.plain_on_meta(cfg.model).requires_grad_(False).eval()
    if run.options.distillation.teacher != "pretrained":
        pretrained = on_first_rank(partial(_read_teacher, run, teacher), share=False) or {}
    if cfg.compile:
        sharding.compile_blocks(teacher)
    sharding.shard(teacher, mesh, dtype, run.options)
    sharding.materialize(teacher.to(dtype), pretrained, device, cfg.fsdp_cpu_offload, dtype=dtype)
    return teacher


def teacher_folder(run: Run) -> Path:
    """The folder of ``distillation.teacher``; FileNotFoundError if it holds no model."""
    folder = Path(run.options.distillation.teacher)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f'distillation.teacher {folder} has no config.json; give "pretrained" or a Hugging '
            "Face folder"
        )
    return folder


def _read_teacher(run: Run, teacher: nn.Module) -> dict[str, torch.Tensor]:
    folder = teacher_folder(run)
    state = dict(read_weights(run.cfg.checkpointer.model_type, SafetensorsFolder(folder)))
    build.check_state_dict(teacher, state, str(folder))
    return state
