"""Test CUDA kernels: gemlite's layout by its own code on the CPU, and products on a GPU.

Triton's interpreter computes gemlite's products in float16 on the CPU (`interpreted_gemlite.py`).
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_kernels import inputs, layer, relative_error, ternary

from hestia_tune import use_kernel
from hestia_tune.tensors import kernels as choice
from hestia_tune.tensors.kernels import Gemlite


@pytest.fixture
def gemlite(monkeypatch):
    """Return gemlite reduced to its packing, because importing gemlite needs a GPU."""
    spec = importlib.util.find_spec("gemlite")
    if spec is None or importlib.util.find_spec("triton") is None:
        pytest.skip("needs gemlite and triton")
    package = types.ModuleType("gemlite")
    package.__path__ = spec.submodule_search_locations
    monkeypatch.setitem(sys.modules, "gemlite", package)
    for name in ("dtypes", "bitpack"):
        monkeypatch.delitem(sys.modules, f"gemlite.{name}", raising=False)
    package.DType = importlib.import_module("gemlite.dtypes").DType
    bitpack = importlib.import_module("gemlite.bitpack")

    class Linear(torch.nn.Module):
        """The documented GemLiteLinearTriton: (code - zero) times the scale of its group."""

        def __init__(self, bits, group_size, columns, rows, input_dtype, output_dtype):
            super().__init__()
            self.form, self.bits, self.group_size = (rows, columns), bits, group_size

        def pack(self, codes, scales, zeros):
            assert codes.dtype == torch.uint8 and codes.shape == self.form
            packed, _ = bitpack.pack_weights_over_cols_torch(codes, self.bits, 32, transpose=True)
            self.packed = torch.nn.Parameter(packed, requires_grad=False)
            self.scales, self.zeros = scales, zeros

        def forward(self, x):
            codes = bitpack.unpack_over_cols_torch._init_fn(
                self.packed.t(), self.bits, self.form[1], torch.uint8
            )
            blocks = codes.to(x.dtype).view(len(codes), -1, self.group_size) - self.zeros
            return F.linear(x, (blocks * self.scales[..., None]).view(self.form))

    package.GemLiteLinearTriton = Linear
    return package


@pytest.mark.parametrize("shape", [(48, 256, 128), (20, 96, 32), (7, 64, "channel")], ids=str)
def test_the_layout_of_gemlite(gemlite, shape):
    weight = ternary(*shape, torch.bfloat16)
    kernel = Gemlite(weight)
    assert kernel.num_bytes == weight.qdata.nbytes
    x, bias = inputs(weight, 3)
    assert torch.equal(kernel(x, None), F.linear(x, weight.dequantize()))
    assert torch.equal(kernel(x, bias), F.linear(x, weight.dequantize()) + bias)


def test_gemlite_refuses_other_weights():
    assert "cuda" in Gemlite.limit(ternary(8, 64, 32))
    assert "multiple of 32" in Gemlite.limit(ternary(8, 48, 16))
    for shape in ((8, 64, 16), (8, 192, 96), (8, 384, 192)):  # A block would have two scales.
        assert "groups of 32" in Gemlite.limit(ternary(*shape, torch.float16))


def test_gemlite_multiplies_in_tritons_interpreter():
    for package in ("triton", "gemlite"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    folder = Path(__file__).parent
    paths = os.pathsep.join(map(str, [folder.parents[1], folder, *sys.path]))
    command = [sys.executable, str(folder / "interpreted_gemlite.py")]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    environment.pop("HESTIA_SIMULATED_CUDA", None)
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    results = json.loads(result.stdout.splitlines()[-1])
    assert {name for name, *_ in results} == {"GEMV_REVSPLITK", "GEMM_SPLITK", "GEMM"}
    for name, shape, error in results:  # Parts of a row are added in float16.
        assert error < 1e-3, (name, shape)


@pytest.mark.gpu(real=True)
@pytest.mark.parametrize("name", ["int4pack", "gemlite"])
@pytest.mark.parametrize("shape", [(256, 512, 128), (64, 256, 64)], ids=str)
def test_products_on_a_gpu(name, shape):
    for package in choice.KERNELS[name].packages:
        pytest.importorskip(package)
    weight = ternary(*shape, torch.bfloat16).to("cuda")
    kernel = choice.make(weight, choice.KERNELS[name])
    for rows in (1, 5, 512):
        x, bias = (value.to("cuda") for value in inputs(weight, rows))
        for added in (None, bias):
            assert relative_error(kernel(x, added), x, weight, added) < 0.006
    linear = layer(weight)
    assert set(use_kernel(linear).layers.values()) <= {"dequantize", "gemlite", "int4pack"}
    assert linear(x).shape == (512, shape[0])
