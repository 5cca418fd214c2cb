"""Test that no part of a step mixes devices, without a GPU or a compiler: tensors without memory.

Under FakeTensorMode a tensor has a shape, a dtype and a device, but no memory. An operator raises,
like CUDA, if it gets tensors on two devices. Autograd needs more of a device, so the gradients here
are zeros. The tests in tests/gpu run whole recipes.
"""

import ctypes
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hestia_tune
from hestia_tune import quantized_linears
from hestia_tune.annealing import AnnealingSchedule
from hestia_tune.qat.buckets import LatentRows
from hestia_tune.qat.schedule import ScheduleDriver

COMPONENTS = {
    "hestia": lambda: hestia_tune.HestiaQATQuantizer(group_size=4),
    "hestia, tensor": lambda: hestia_tune.HestiaQATQuantizer(group_size="tensor"),
    "hestia, learned": lambda: hestia_tune.HestiaQATQuantizer(
        group_size=4, scale="learned", scale_lr=1e-3
    ),
    "binary": lambda: hestia_tune.HestiaQATQuantizer(group_size=4, codebook="binary"),
    "fairy2i": lambda: hestia_tune.Fairy2iQATQuantizer(),
    "absmean": lambda: hestia_tune.AbsMean(group_size=4),
    "twn": lambda: hestia_tune.TWN(group_size="channel"),
    "int2": lambda: hestia_tune.INT2(group_size=4),
    "lsq": lambda: hestia_tune.LSQ(group_size=4, scale_lr=1e-3),
    "seq": lambda: hestia_tune.SEQ(group_size=4, bits=2),
    "two bits": lambda: hestia_tune.TwoBit(group_size=4),
    "dlt": lambda: hestia_tune.DLT(group_size=4),
    "tequila": lambda: hestia_tune.Tequila(group_size=4, epsilon=0.1),
}


def make_model() -> nn.Module:
    block = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
    return nn.ModuleDict({"layers": nn.ModuleList([block])})


@pytest.fixture
def fake():
    """Enter FakeTensorMode. A CPU build gets the meta device's guard for CUDA: it does nothing."""
    path = Path(torch.__file__).parent / "lib" / "libc10.so"
    if not path.exists():
        pytest.skip("needs Linux")
    library = ctypes.CDLL(str(path))
    name = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry
    guards = (ctypes.c_void_p * 15).in_dll(library, name)
    before = guards[1]
    guards[1] = before or guards[14]  # DeviceType::CUDA, DeviceType::Meta
    try:
        with FakeTensorMode(), torch.no_grad():
            yield
    finally:
        guards[1] = before


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_step_stays_on_the_device(fake, name):
    with torch.device("cuda"):
        model = COMPONENTS[name]().prepare(make_model())
        layers = quantized_linears(model)
        driver = ScheduleDriver(AnnealingSchedule(4), layers)
        driver.set_step(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x = model["layers"][0](torch.zeros(3, 8))
    for layer in layers.values():
        rows = LatentRows(layer)
        for is_hard in (False, True):
            effective = rows.quantize(torch.bfloat16, is_hard=is_hard)
        grads = {key: torch.zeros_like(value).float() for key, value in effective.items()}
        weight, *others = rows.pull_back(grads)
        for parameter, grad in zip(layer.latents(), (weight, *others), strict=True):
            assert grad.device == parameter.device
            parameter.grad = grad
        codes, scales = layer.method.codes(*layer.whole_latents())
        assert {x.device, codes.device, scales.device} == {torch.device("cuda:0")}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert norm.device == x.device


def test_mixed_devices_raise(fake):
    with pytest.raises(RuntimeError, match="device"):
        torch.zeros(3, 4, device="cuda") + torch.zeros(3, 4)
