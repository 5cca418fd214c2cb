"""Print the errors of gemlite's products, computed by Triton's interpreter. No GPU is needed.

    TRITON_INTERPRET=1 python tests/tensors/interpreted_gemlite.py

The interpreter runs a kernel block by block in NumPy, on tensors of the CPU. Gemlite asks for the
GPU's properties when it is imported. So this script describes an H100 to it. Triton's autotuner
takes the first configuration that gemlite allows on this GPU, without a measurement. The products
are in float16, because the interpreter computes with the bits of bfloat16 as integers.

The output is JSON: for every weight and number of rows, the name of gemlite's kernel and the
relative error beside the product with the dequantized weight in float64.
"""

import json
from types import SimpleNamespace

import torch
from test_kernels import inputs, relative_error, ternary
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, interpreter

from hestia_tune.tensors import TwoBitTensor
from hestia_tune.tensors.kernels import Gemlite

# Nine groups, as SmolLM2 has: gemlite reads scales behind the last one.
SHAPES = (64, 256, 64), (64, 288, 32), (40, 96, "channel"), (7, 64, "tensor")
ROWS = 1, 5, 70  # gemlite takes another kernel for 5 and for 64 rows


class Driver:
    """The part of a driver of Triton that gemlite and the autotuner ask."""

    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 232448})

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_benchmarker(self):
        return lambda call, quantiles: [0.0] * len(quantiles)


def mend_interpreter() -> None:
    """Mend two gaps of the interpreter of Triton 3.7. Compiled kernels do not have them."""
    convert, patch = interpreter._implicit_cvt, interpreter._patch_lang_core

    def convert_any(value):
        """Convert a bool as an int. The interpreter raises an error for a bool."""
        return convert(int(value) if isinstance(value, bool) else value)

    def patch_lang_core(lang, scope):
        """Make the index of a loop a tensor, because gemlite calls its method `to`."""
        patch(lang, scope)
        ints = lang.range
        scope.set_attr(lang, "range", lambda *ends, **options: map(convert, ints(*ends, **options)))

    interpreter._implicit_cvt, interpreter._patch_lang_core = convert_any, patch_lang_core


def main() -> None:
    driver.set_active(Driver())
    properties = SimpleNamespace(name="NVIDIA H100", multi_processor_count=132)
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device=None: properties
    mend_interpreter()
    from gemlite import core

    results = []
    rows, columns, group = SHAPES[0]
    signed = TwoBitTensor.from_hp(torch.randn(rows, columns) * 0.05, group_size=group)
    for weight in [*(ternary(*shape, torch.float16) for shape in SHAPES), signed.half()]:
        kernel = Gemlite(weight)
        for rows in ROWS:
            x, bias = inputs(weight, rows)
            error = relative_error(kernel(x, bias), x, weight, bias)
            results.append(
                (
                    core.get_matmul_type(rows, 2),
                    f"{type(weight).__name__} {tuple(weight.shape)}",
                    error,
                )
            )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
