"""Test warmup-stable-decay against a table."""

import pytest
import torch

from hestia_tune.qat.schedule import get_wsd_schedule


def wsd_factor(step, total, warmup_ratio, decay_ratio, **options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_wsd_schedule(optimizer, total, warmup_ratio, decay_ratio, **options)
    return schedule.lr_lambdas[0](step)


def test_table():
    # T = 10: 2 steps of warmup, 4 of decay.
    table = [wsd_factor(step, 10, 0.2, 0.4) for step in range(11)]
    assert table == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])


@pytest.mark.parametrize(
    ("total", "warmup", "decay", "expected"),
    [
        (1, 0.0, 0.0, [1]),
        (1, 0.01, 0.2, [1 / 2]),
        (2, 0.0, 1.0, [1, 0.5]),
        (3, 0.0, 0.0, [1, 1, 1]),
        (4, 1.0, 0.0, [0.2, 0.4, 0.6, 0.8]),
    ],
)
def test_boundaries(total, warmup, decay, expected):
    assert [wsd_factor(t, total, warmup, decay) for t in range(total)] == pytest.approx(expected)


def test_floor():
    assert wsd_factor(9, 10, 0.0, 0.5, min_lr_ratio=0.1) == pytest.approx(0.1 + 0.9 / 5)
    assert wsd_factor(12, 10, 0.0, 0.5, min_lr_ratio=0.1) == pytest.approx(0.1)


def test_component_drives_an_optimizer():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=2.0)
    scheduler = get_wsd_schedule(optimizer, 10, warmup_ratio=0.2, decay_ratio=0.4)
    seen = []
    for _ in range(10):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert seen == pytest.approx([2 * wsd_factor(t, 10, 0.2, 0.4) for t in range(10)])


@pytest.mark.parametrize(
    "ratios",
    [{"warmup_ratio": -0.1}, {"decay_ratio": 1.1}, {"warmup_ratio": 0.6, "decay_ratio": 0.6}],
)
def test_ratios_out_of_range(ratios):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match="ratio"):
        get_wsd_schedule(optimizer, 10, **ratios)
