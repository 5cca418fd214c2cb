"""Test that batches equal those of torchtune's collate functions."""

import pytest
import torch
from torchtune.data import padded_collate_sft
from torchtune.modules.attention_utils import create_block_causal_mask

from hestia_tune.data.sequences import document_mask, pad_samples


@pytest.mark.parametrize("kind", [list, torch.tensor])
@pytest.mark.parametrize("lengths", [[(3, 3)], [(5, 5), (1, 1), (4, 4)], [(2, 4), (6, 1)]])
def test_padding_equals_torchtunes(lengths, kind):
    samples = [
        {"tokens": kind([*range(n)]), "labels": kind([*range(7, 7 + m)]), "other": "left out"}
        for n, m in lengths
    ]
    plain = [{k: torch.as_tensor(s[k]).tolist() for k in ("tokens", "labels")} for s in samples]
    expected = padded_collate_sft(plain, padding_idx=99, ignore_idx=-100)
    batch = pad_samples(samples, 99)
    assert batch.keys() == expected.keys()
    for key, value in expected.items():
        assert batch[key].dtype == value.dtype and torch.equal(batch[key], value)


@pytest.mark.parametrize("lengths", [[[6]], [[1, 2, 3], [3, 3], [1] * 6], [[2, 4], [6]]])
def test_the_mask_equals_torchtunes(lengths):
    rows = [torch.tensor(row) for row in lengths]
    mask = document_mask(rows)
    assert mask.dtype == torch.bool and torch.equal(mask, create_block_causal_mask(rows))
