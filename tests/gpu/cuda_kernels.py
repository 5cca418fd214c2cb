"""Print the CUDA kernels of the methods' formulas. No GPU is needed.

    python tests/gpu/cuda_kernels.py 9.0 "ternary, group_size=128" "lsq, group_size=128"
    python tests/gpu/cuda_kernels.py --compile 8.0 "ternary, group_size=128"

The arguments are a compute capability and keys of methods. The output is JSON: for every key and
formula, the launches in order, and with ``--compile`` the kernels. For each kernel it has the
registers, the bytes of shared memory and the bytes of spilled registers of every configuration that
Inductor would try on a GPU.

`fused` traces a formula on fake CUDA tensors. Inductor reads a described device, writes its code,
and is stopped there. This needs neither the CUDA build of torch nor Triton, but in the CPU build
some operators fail on fake CUDA tensors. ``--compile`` needs both: Triton and its ptxas then make
PTX and a cubin of every kernel.

Nothing is launched. So this shows neither results nor times.
"""

import argparse
import contextlib
import json
import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch._inductor.config
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import compile_fx, graph
from torch._inductor.codecache import PyCodeCache
from torch._inductor.fx_passes import joint_graph
from torch._inductor.runtime import triton_helpers
from torch._subclasses import FakeTensorMode

from hestia_tune.methods import Method
from hestia_tune.methods.method import fused

MULTIPROCESSORS = {(8, 0): 108, (9, 0): 132}  # of an A100 and an H100
SHAPE = 4096, 14336  # A hint only, because shapes are symbols.


class StopError(BaseException):
    """Inductor has written its code. No handler of an Exception may hold this."""


def describe(capability: tuple[int, int]) -> None:
    """Let Inductor see a device of this compute capability. Dynamo and AOTAutograd see none."""
    device = SimpleNamespace(
        name="described",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=MULTIPROCESSORS[capability],
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
    )
    answers = {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_properties": lambda device_id=None: device,
        "get_device_capability": lambda device_id=None: capability,
        "is_available": lambda: True,
        "get_compute_capability": lambda device_id=None: 10 * capability[0] + capability[1],
    }
    lower = compile_fx.fx_codegen_and_compile

    def lower_for_device(*args, **kwargs):
        with contextlib.ExitStack() as stack:
            for name, answer in answers.items():
                stack.enter_context(
                    mock.patch.object(CudaInterface, name, staticmethod(answer), create=True)
                )
                if hasattr(torch.cuda, name) and name != "is_available":
                    stack.enter_context(mock.patch.object(torch.cuda, name, answer))
            return lower(*args, **kwargs)

    compile_fx.fx_codegen_and_compile = lower_for_device
    torch._inductor.scheduler.has_triton = lambda: True
    torch.utils._triton.triton_hash_with_backend = lambda: "described"
    triton_helpers.set_driver_to_gpu = lambda: None
    # Patterns of other operators would allocate on the device.
    joint_graph.lazy_init = lambda *_: None
    # Folding would too. With it, the numbers of kernels are the same.
    torch._inductor.config.joint_graph_constant_folding = False
    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.use_static_triton_launcher = False  # It keeps neither PTX nor cubin.


def code_of(method: Method, formula: str) -> str:
    """Return the code that Inductor writes for a formula, empty if there is nothing to compute."""
    code = []

    def stop(self):
        code.append(self.codegen()[0].value)
        raise StopError

    torch._dynamo.reset()
    with FakeTensorMode(), mock.patch.object(graph.GraphLowering, "compile_to_module", stop):
        weight, grad = (torch.empty(SHAPE, device="cuda") for _ in range(2))
        tau, pressure = (torch.empty((), device="cuda") for _ in range(2))
        parameters = method.initial_parameters(weight)
        tensors = [grad, weight] if formula == "vjp" else [weight]
        with contextlib.suppress(StopError):
            fused(method.key(), formula)(*tensors, tau, pressure, parameters)
    return "".join(code)


def launches(code: str) -> list[str]:
    """Return the names of the launched kernels, and of operators that are not fused, in order."""
    return re.findall(
        r"^ +(?:\w+ = )?(\w+(?=\.run\()|(?:torch\.ops|extern_kernels)\.[\w.]+(?=\())", code, re.M
    )


def compiled(name: str, source: str) -> list[dict[str, int]]:
    """Return registers, shared memory and spills of all configurations of a kernel."""
    import triton

    ptxas, results = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas", []
    tuner = getattr(PyCodeCache.load(source), name)
    for config in tuner.configs:
        kernel = tuner._precompile_config(config).kernel
        assert kernel.asm["cubin"]
        target = re.search(r"^\.target (\w+)", kernel.asm["ptx"], re.M)[1]
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            print(kernel.asm["ptx"], file=file, flush=True)
            command = [ptxas, "-v", f"--gpu-name={target}", file.name, "-o", "/dev/null"]
            report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        results.append(
            {
                "target": target,
                "registers": int(re.search(r"Used (\d+) registers", report)[1]),
                "shared": kernel.metadata.shared,
                "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
            }
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("capability")
    parser.add_argument("keys", nargs="+")
    options = parser.parse_args()
    describe(tuple(map(int, options.capability.split("."))))
    results = {}
    for key in options.keys:
        for formula in ("effective_weight", "vjp"):
            code = code_of(Method.from_key(key), formula)
            result = results.setdefault(key, {})[formula] = {"launches": launches(code)}
            if options.compile:
                sources = re.findall(
                    r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)'''", code, re.S | re.M
                )
                result["kernels"] = {name: compiled(name, source) for name, source in sources}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
