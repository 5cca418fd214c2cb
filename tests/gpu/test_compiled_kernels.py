"""Test how many CUDA kernels a compiled formula is, and that they compile, without a GPU.

`cuda_kernels.py` says how. It runs in a process of its own, which sees a device that is only
described. The number of kernels needs no CUDA build of torch for most methods. The binaries do:
HESTIA_CUDA_PYTHON names the Python of an environment with a CUDA build of torch (`pip install
torch` on Linux) and torchao. No GPU is needed there either.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("cuda_kernels.py")
LEARNED = "ternary, group_size=128, scale=learned"
# The launches of the effective weight and of its pull-back. The tests run on one version of torch.
FEW = {
    "ternary, group_size=128": (1, 1),
    # The second launch of the pull-back fills the gradient of the scale's start with zeros.
    f"{LEARNED}, threshold=learned, offset=learned": (1, 2),
}
ALL = FEW | {
    "ternary, group_size=channel": (1, 1),
    "ternary, group_size=tensor": (3, 3),  # Two sum the whole weight.
    LEARNED: (1, 2),
    # A straight-through gradient needs no kernel.
    "absmean, group_size=128": (1, 0),
    "twn, group_size=128, delta=0.75": (1, 0),
    "tequila, group_size=128, epsilon=0.001": (1, 0),
    "lsq, group_size=128, start=absmax": (1, 1),
    "seq, group_size=128, start=absmax, bits=ternary": (1, 1),
    "seq, group_size=128, start=absmax, bits=2": (1, 1),
    "dlt, group_size=128, start=absmax": (1, 1),
    "int2, group_size=128, start=absmax": (1, 0),
    # The least-squares scale: one sorts and sums, one tries all 129 numbers of large weights.
    "int2, group_size=128, start=least_squares": (3, 0),
    "int4, group_size=128": (1, 0),
    "even, group_size=128, codebook=binary": (1, 1),
    "even, group_size=128, codebook=int2": (3, 3),
    # Every stage sums what is left of the last one, and the four quadrants are put together.
    "fairy2i, num_stages=2, granularity=tensor": (8, 10),
    "fairy2i, num_stages=2, granularity=64": (5, 10),
}


def kernels(python: str, *arguments: str) -> dict:
    """Return what `cuda_kernels.py` prints."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [python, str(SCRIPT), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def numbers(results: dict) -> dict[str, tuple[int, int]]:
    """Return the number of launches of both formulas of every method."""
    formulas = "effective_weight", "vjp"
    return {
        key: tuple(len(result[formula]["launches"]) for formula in formulas)
        for key, result in results.items()
    }


def test_a_formula_is_one_kernel():
    assert numbers(kernels(sys.executable, "9.0", *FEW)) == FEW


@pytest.mark.slow
@pytest.mark.long  # two minutes of one core for each capability
@pytest.mark.skipif(
    "HESTIA_CUDA_PYTHON" not in os.environ,
    reason="HESTIA_CUDA_PYTHON must name a Python that has a CUDA build of torch",
)
@pytest.mark.parametrize(("capability", "target"), [("8.0", "sm_80"), ("9.0", "sm_90a")])
def test_all_kernels_of_all_methods_compile_and_one_configuration_spills_nothing(
    capability, target
):
    results = kernels(os.environ["HESTIA_CUDA_PYTHON"], "--compile", capability, *ALL)
    assert numbers(results) == ALL
    for key, result in results.items():
        for formula, found in result.items():
            assert set(found["kernels"]) == set(found["launches"]), (key, formula)
            for name, configurations in found["kernels"].items():
                assert all(each["target"] == target for each in configurations), (key, name)
                assert min(each["spilled"] for each in configurations) == 0, (key, name)
