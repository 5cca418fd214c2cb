"""Test that the losses and divergences equal torchtune's, to the last bit, with their gradients."""

import pytest
import torch
from torchtune.modules import loss as theirs

from hestia_tune import losses


def draw(seed, dtype, has_infinity):
    """Return logits, other logits and labels of 3 sequences, with ignored and excluded tokens."""
    generator = torch.Generator().manual_seed(seed)
    own, other = (torch.randn(3, 21, 37, generator=generator).mul(4).to(dtype) for _ in range(2))
    labels = torch.randint(4, 37, (3, 21), generator=generator)
    labels[torch.rand(3, 21, generator=generator) < 0.3] = -100
    if has_infinity:
        own[0, :, 3], other[1, :, 2] = -torch.inf, -torch.inf
    return own, other, labels


def with_gradient(function, logits, *others):
    leaf = logits.clone().requires_grad_()
    value = function(leaf, *others)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def require_equal(first, second):
    for one, other in zip(first, second, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


CASES = [
    (s, d, i) for s in range(4) for d in (torch.float32, torch.bfloat16) for i in (False, True)
]


@pytest.mark.parametrize("chunks", [1, 4, 8, 30])
@pytest.mark.parametrize("case", CASES)
def test_the_cross_entropy(case, chunks):
    logits, _, labels = draw(*case)

    def of(kind):
        return with_gradient(lambda x: kind(chunks)(list(x.chunk(chunks, 1)), labels), logits)

    results = of(losses.CEWithChunkedOutputLoss), of(theirs.CEWithChunkedOutputLoss)
    require_equal(*results)
    if not case[2]:
        mean = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        assert results[0][0].item() == pytest.approx(mean.item(), rel=1e-6)


def test_the_cross_entropy_of_another_ignored_label():
    logits, _, labels = draw(0, torch.float32, False)
    chunks = list(logits.chunk(8, 1))
    results = [
        kind(8, ignore_index=5)(chunks, labels.where(labels >= 0, 5))
        for kind in (losses.CEWithChunkedOutputLoss, theirs.CEWithChunkedOutputLoss)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("ours", "kind"),
    [
        (losses.forward_kl, theirs.ForwardKLLoss),
        (losses.reverse_kl, theirs.ReverseKLLoss),
        (losses.symmetric_kl, theirs.SymmetricKLLoss),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_the_divergences(ours, kind, case):
    logits, other, labels = (value.flatten(0, 1) for value in draw(*case))
    expected = with_gradient(lambda x: kind()(x, other, labels, normalize=False), logits)
    require_equal(with_gradient(ours, logits, other, labels, -100), expected)
