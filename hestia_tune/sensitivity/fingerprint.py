"""Digests that say whether an artifact belongs to a model, and a journal to its samples."""

import hashlib
from collections.abc import Mapping, Sequence

import torch

from hestia_tune.sensitivity.segments import CalibrationBatch


def model_fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """A digest of the names, shapes and weights (as bfloat16) of the quantized layers.

    The same for a model stored in bfloat16 and in float32; another for other weights.

    Args:
        weights: fully qualified name of each quantized linear -> its pretrained weight.
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        weight = weights[name].detach().to(torch.bfloat16).cpu().contiguous()
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(weight.view(torch.int16).numpy())
    return f"sha256:{digest.hexdigest()}"


def samples_digest(batches: Sequence[CalibrationBatch]) -> str:
    """A digest of the calibration tokens, their labels, and how they are batched."""
    digest = hashlib.sha256()
    for batch in batches:
        for value in (batch.tokens, batch.labels, *batch.model_inputs.values()):
            digest.update(f"{tuple(value.shape)}".encode())
            digest.update(value.cpu().contiguous().numpy())
    return f"sha256:{digest.hexdigest()}"
