"""ONNX Runtime's `MatMulNBits` on the CPU: weights of 2 or 8 bits, activations rounded to 8 bits.

`TernaryTensor` has the operator's own layout (codes 0 to 2 four to a byte, little end first, zero
point 1), so ONNX Runtime reads the codes where they are and lays them out once for its own use.
Activations are rounded by blocks of 32 to 128 columns, an error of 0.5 to 0.7% of the product for
Gaussian ones. The library has such products with AVX2, AVX512 and on ARM; elsewhere, and in blocks
of other sizes, it dequantizes by scalar code, which `auto` finds slow and leaves.

Threads. Those of ONNX Runtime wait for work without giving up their cores, as torch's do: beside
each other both are slow. So its sessions have none: a weight is cut into as many parts as torch has
threads at the time, of a million weights at least, each a session that works on the thread that
calls it. Long products hand the parts to one pool of Python threads, which all
kernels share, after GNU's OpenMP has ended torch's threads (its next parallel operator starts new
ones); the others take them in turn, and all do once torch has one thread only.
"""

import ctypes
import functools
import itertools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F

from hestia_tune.tensors.bitpack import CODES_PER_BYTE, ZERO_CODES
from hestia_tune.tensors.kernels import Kernel

BLOCKS = (128, 64, 32)
_MIN_PART = 2**20  # weights: fewer are not worth a call of their own
# Weights times rows, 0.7 ms: what ending torch's threads and handing a part over is worth.
_MIN_LONG = 2**26
_ROWS_AT_ONCE = 4096  # of a dense weight that is rounded
_PROCESS = os.getpid()
_SESSION_BYTES = 85_000  # measured: what a session has besides its weights


class OnnxRuntime(Kernel):
    """See the module; in memory 2.8 bits a weight at blocks of 128."""

    name = "onnxruntime"
    packages, extra = ("onnx", "onnxruntime"), "cpu"
    devices = ("cpu",)
    dtypes = (torch.bfloat16, torch.float32, torch.float16)

    @classmethod
    def _block(cls, weight) -> int | None:
        group, width = weight.block_size[-1], weight.shape[1]
        fits = (block for block in BLOCKS if group % block == 0)
        return next(fits, BLOCKS[-1] if group == width else None)  # the last block is filled up

    @classmethod
    def limit(cls, weight):
        if cls._block(weight) is None:
            return f"needs groups of a multiple of {BLOCKS[-1]}, or of whole rows"
        return super().limit(weight)

    def __init__(self, weight):
        super().__init__(weight)
        (rows, columns), block = weight.shape, self._block(weight)
        blocks = -(-columns // block)
        missing = blocks * block // CODES_PER_BYTE - weight.qdata.shape[1]
        codes = weight.qdata.contiguous()
        codes = F.pad(codes, (0, missing), value=ZERO_CODES) if missing else codes
        scale = weight.scale.float().repeat_interleave(-(-weight.block_size[-1] // block), 1)
        zeros = weight.qdata.new_full((rows, -(-blocks // CODES_PER_BYTE)), ZERO_CODES)
        arrays = {
            "codes": codes.view(rows, blocks, -1).numpy(),
            "scale": scale.expand(rows, -1).contiguous().numpy(),
            "zeros": zeros.numpy(),
        }
        self._sessions = Sessions(arrays, columns, block, bits=2)
        self.num_bytes = self._sessions.num_bytes
        if codes.data_ptr() == weight.qdata.data_ptr():
            self.num_bytes -= codes.nbytes

    def product(self, x):
        return self._sessions(x)


class Sessions:
    """A weight (out_features, in_features) in sessions of its rows.

    Args:
        arrays: the operator's weight, cut by the first axis: ``codes`` uint8 (out_features, blocks,
            bytes), ``scale`` float32 (out_features, blocks), and what else it takes.
        columns: in_features; those that the last block has more are not read.
        block: columns that share a scale, of the weight and of the activations.
        bits: of a code, 2 or 8.

    Attributes:
        num_bytes: memory of all of it, ``arrays`` included, which are read in place.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], columns: int, block: int, *, bits: int):
        rows = len(arrays["codes"])
        self._size = rows * columns
        parts = max(1, min(torch.get_num_threads(), rows, self._size // _MIN_PART))
        cuts = itertools.pairwise(rows * part // parts for part in range(parts + 1))
        self._runs = [
            _session({n: array[start:end] for n, array in arrays.items()}, columns, block, bits).run
            for start, end in cuts
        ]
        # The runtime's copy (codes, scales, sums of the blocks' zero points) and what it was given.
        own = arrays["codes"].nbytes + 2 * arrays["scale"].nbytes + parts * _SESSION_BYTES
        self.num_bytes = own + sum(array.nbytes for array in arrays.values())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (rows, in_features) -> float32 (rows, out_features), without gradients."""
        feed = {"x": x.detach().float().numpy()}  # shares the memory of a float32 x
        own, *others = self._runs
        is_long = len(x) * self._size >= _MIN_LONG
        if not (others and is_long and torch.get_num_threads() > 1):
            found = [run(None, feed)[0] for run in self._runs]
        else:
            _release_openmp_threads()
            waiting = [_workers().submit(run, None, feed) for run in others]
            found = [own(None, feed)[0], *(part.result()[0] for part in waiting)]
        y = torch.from_numpy(np.concatenate(found, 1) if others else found[0])
        if not np.isfinite(feed["x"].sum()):  # rounded activations make numbers of NaN
            y[~x.isfinite().all(1)] = torch.nan
        return y


@functools.cache
def _openmp() -> Callable[[int], int] | None:
    """OpenMP 5.0's omp_pause_resource_all, of the library that torch has loaded for all."""
    try:
        return ctypes.CDLL(None).omp_pause_resource_all
    except (AttributeError, TypeError, OSError):  # an older library, or none that is shared
        return None


def _release_openmp_threads() -> None:
    """Ends those that wait for the calling thread, which would keep their cores for milliseconds;
    its settings stay (omp_pause_soft). LLVM's and Intel's OpenMP leave them. In a forked process
    OpenMP believes in threads that do not exist there, and must not be asked."""
    if os.getpid() == _PROCESS and (pause := _openmp()):
        pause(1)


@functools.cache
def _workers() -> ThreadPoolExecutor:
    """All kernels'. It starts threads as they are needed, and waiting ones take no time."""
    return ThreadPoolExecutor(os.cpu_count(), "onnxruntime")


os.register_at_fork(after_in_child=_workers.cache_clear)  # where its threads do not exist


def rounded(weight: torch.Tensor) -> Sessions:
    """A dense weight (out_features, in_features) on the CPU, rounded to the nearest of 255 levels
    of each block of its columns, the largest number of the block at the last."""
    rows, columns = weight.shape
    block = next((block for block in BLOCKS if columns % block == 0), BLOCKS[-1])
    blocks = -(-columns // block)
    codes, scale = np.empty((rows, blocks, block), np.uint8), np.empty((rows, blocks), np.float32)
    for start in range(0, rows, _ROWS_AT_ONCE):
        part = weight.detach()[start : start + _ROWS_AT_ONCE].float()
        part = F.pad(part, (0, blocks * block - columns)).unflatten(1, (blocks, block))
        level = part.abs().amax(-1, keepdim=True) / 127
        at = slice(start, start + len(part))
        scale[at] = level.squeeze(-1).numpy()
        codes[at] = (part / level.where(level > 0, 1.0)).round().add(128).byte().numpy()
    return Sessions({"codes": codes, "scale": scale}, columns, block, bits=8)


def _session(arrays: dict[str, np.ndarray], columns: int, block: int, bits: int):
    """x (rows, columns) -> y (rows, out_features), on the thread that runs it."""
    import onnxruntime
    from onnx import TensorProto, helper

    def external(name: str, array: np.ndarray):
        """An initializer whose memory the session is given."""
        kind = TensorProto.UINT8 if array.dtype == np.uint8 else TensorProto.FLOAT
        tensor = TensorProto(name=name, data_type=kind, dims=array.shape)
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="memory")
        return tensor

    node = helper.make_node(
        "MatMulNBits",
        ["x", *arrays],
        ["y"],
        domain="com.microsoft",
        K=columns,
        N=len(arrays["codes"]),
        bits=bits,
        block_size=block,
        accuracy_level=4,  # activations of 8 bits
    )
    sides = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", width])]
        for name, width in (("x", columns), ("y", len(arrays["codes"])))
    ]
    graph = helper.make_graph([node], "product", *sides, [external(*a) for a in arrays.items()])
    versions = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    options.intra_op_num_threads = 1
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in arrays.values()]
    options.add_external_initializers(list(arrays), values)
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers)
    session.values = values  # read in place, at any time
    return session
