"""Test how long a rank waits for another rank."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hestia_tune.distributed import ensure_process_group
from hestia_tune.errors import InputError

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("end_process_group")


@pytest.mark.parametrize(
    ("minutes", "expected"), [(None, timedelta(days=1)), ("0.5", timedelta(seconds=30))]
)
def test_the_limit_reaches_all_groups(monkeypatch, minutes, expected):
    monkeypatch.delenv("HESTIA_TIMEOUT_MINUTES", raising=False)
    if minutes:
        monkeypatch.setenv("HESTIA_TIMEOUT_MINUTES", minutes)
    ensure_process_group(CPU)
    for group in (dist.group.WORLD, init_device_mesh("cpu", (1,)).get_group()):
        assert group._get_backend(CPU).options._timeout == expected


@pytest.mark.parametrize("minutes", ["0", "-1", "soon", "nan", "inf", ""])
def test_a_wrong_limit_is_refused(monkeypatch, minutes):
    monkeypatch.setenv("HESTIA_TIMEOUT_MINUTES", minutes)
    with pytest.raises(InputError, match="must be a number of minutes above 0"):
        ensure_process_group(CPU)
    assert not dist.is_initialized()
