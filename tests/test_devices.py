"""Test the choice of the device and of the dtype."""

import pytest
import torch

from hestia_tune import devices
from hestia_tune.errors import InputError


def test_the_cpu():
    assert devices.get_device("cpu") == torch.device("cpu")
    assert devices.get_dtype("bf16", torch.device("cpu")) == torch.bfloat16
    assert devices.get_dtype("fp32", torch.device("cpu")) == torch.float32


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine that seems to have two GPUs. Returns the list of those that were made current."""
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch, "empty", lambda *_, device: None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return current


def test_each_process_has_its_own_gpu(two_gpus, monkeypatch):
    assert devices.get_device("cuda") == torch.device("cuda", 0)
    assert devices.get_device("cuda:1") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert devices.get_device("cuda") == torch.device("cuda", 1)
    assert two_gpus == [torch.device("cuda", n) for n in (0, 1, 1)]
    with pytest.raises(InputError, match="torchrun gives each process its own GPU"):
        devices.get_device("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(InputError, match="there are 2; start at most 2 processes per node"):
        devices.get_device("cuda")
    assert len(two_gpus) == 3


def test_devices_that_are_not_here(monkeypatch):
    with pytest.raises(InputError, match="device gpu: torch knows no such device"):
        devices.get_device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="device cuda: torch finds no GPU here; set device=auto"):
        devices.get_device("cuda")


def test_dtypes(monkeypatch):
    with pytest.raises(InputError, match="dtype must be one of bf16, fp32; got fp16"):
        devices.get_dtype("fp16", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    with pytest.raises(InputError, match="this GPU has no bfloat16; set dtype=fp32"):
        devices.get_dtype("bf16", torch.device("cuda", 0))


def test_the_default_dtype_is_restored_after_an_error():
    with pytest.raises(RuntimeError), devices.default_dtype(torch.float64):
        assert torch.zeros(1).dtype == torch.float64
        raise RuntimeError
    assert torch.zeros(1).dtype == torch.float32


def test_a_batch_moves_with_its_nested_tensors():
    batch = {"a": torch.ones(2), "inner": {"b": torch.ones(3)}}
    devices.move_batch(batch, torch.device("meta"))
    assert batch["a"].is_meta and batch["inner"]["b"].is_meta
