"""Makes batches of samples, as torchtune's collate functions do."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F


def pad_samples(
    samples: Sequence[dict[str, Any]], pad_id: int, ignore_index: int
) -> dict[str, torch.Tensor]:
    """Return the tokens and labels of samples, int64 (batch, longest), padded at their ends.

    Args:
        samples: Samples with ``tokens`` and ``labels``. Other keys are left out.
        pad_id: Token of the padding.
        ignore_index: Label of the padding.
    """
    ends = {"tokens": pad_id, "labels": ignore_index}
    rows = {key: [torch.as_tensor(sample[key]).long() for sample in samples] for key in ends}
    length = max(len(row) for both in rows.values() for row in both)
    return {
        key: torch.stack([F.pad(row, (0, length - len(row)), value=end) for row in rows[key]])
        for key, end in ends.items()
    }


def document_mask(lengths: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return which tokens each token attends to: itself, and earlier ones of its own document.

    Args:
        lengths: For each sample, the lengths of its documents, int64. Their sum is seq_len.

    Returns:
        The mask, bool (batch, seq_len, seq_len).
    """
    documents = torch.stack(
        [torch.arange(len(row)).repeat_interleave(torch.as_tensor(row)) for row in lengths]
    )  # (batch, seq_len)
    return (documents.unsqueeze(2) == documents.unsqueeze(1)).tril()
