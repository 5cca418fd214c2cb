"""ONNX Runtime's `MatMulNBits` on the CPU: weights of 2 bits, activations rounded to 8 bits.

`TernaryTensor` has the operator's own layout (codes 0 to 2 four to a byte, little end first, zero
point 1), so ONNX Runtime reads the codes where they are and lays them out once for its own use.
Activations are rounded by blocks of 32 to 128 columns, an error of 0.5 to 0.7% of the product for
Gaussian ones. The library has such products with AVX2, AVX512 and on ARM; elsewhere, and in blocks
of other sizes, it dequantizes by scalar code, which `auto` finds slow and leaves.

Threads. One thread needs no pool. The first kernel that is made for several makes ONNX Runtime's
global pool, of torch's number of threads at that time, which all others share; a process can have
only one, of one size. From then on other sessions of the process must use it too
(``SessionOptions.use_per_session_threads = False``). Its threads and torch's are in each other's
way: on two cores a model is slower with it than on one, so `auto` takes it for one thread only.
"""

import logging

import numpy as np
import torch

from hestia_tune.tensors.bitpack import CODES_PER_BYTE, ZERO_CODES
from hestia_tune.tensors.kernels import Kernel

log = logging.getLogger(__name__)
BLOCKS = (128, 64, 32)
_pool_size = 0


class OnnxRuntime(Kernel):
    """See the module; in memory 2.8 bits a weight at blocks of 128."""

    name = "onnxruntime"
    packages, extra = ("onnx", "onnxruntime"), "cpu"
    devices = ("cpu",)
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    has_threads = True

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
        import onnxruntime
        from onnx import TensorProto, helper

        (rows, columns), block = weight.shape, self._block(weight)
        blocks = -(-columns // block)
        missing = blocks * block // CODES_PER_BYTE - weight.qdata.shape[1]
        codes = weight.qdata.contiguous()
        codes = torch.nn.functional.pad(codes, (0, missing), value=ZERO_CODES) if missing else codes
        scale = weight.scale.float().repeat_interleave(-(-weight.block_size[-1] // block), 1)
        zeros = weight.qdata.new_full((rows, -(-blocks // CODES_PER_BYTE)), ZERO_CODES)
        arrays = {
            "codes": codes.view(rows, blocks, -1).numpy(),
            "scale": scale.expand(rows, -1).contiguous().numpy(),
            "zeros": zeros.numpy(),
        }
        node = helper.make_node(
            "MatMulNBits",
            ["x", *arrays],
            ["y"],
            domain="com.microsoft",
            K=columns,
            N=rows,
            bits=2,
            block_size=block,
            accuracy_level=4,  # activations of 8 bits
        )
        sides = [
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", width])]
            for name, width in (("x", columns), ("y", rows))
        ]
        graph = helper.make_graph(
            [node], "product", *sides, [_external(*a) for a in arrays.items()]
        )
        versions = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=versions, ir_version=10)
        options = _session_options(onnxruntime)
        # In place, and for as long as the session lives: the runtime may read them at any time.
        self._values = [onnxruntime.OrtValue.ortvalue_from_numpy(a) for a in arrays.values()]
        options.add_external_initializers(list(arrays), self._values)
        self._session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        # The runtime's copy (codes, scales, sums of the blocks' zero points) and what it was given,
        # but for the weight's own codes.
        given = sum(array.nbytes for array in arrays.values())
        self.num_bytes = codes.nbytes + 2 * arrays["scale"].nbytes + given
        if codes.data_ptr() == weight.qdata.data_ptr():
            self.num_bytes -= codes.nbytes

    def product(self, x):
        feed = x.detach().float().numpy()  # shares the memory of a float32 x
        return torch.from_numpy(self._session.run(None, {"x": feed})[0])


def _external(name: str, array: np.ndarray):
    """An initializer whose memory the session is given."""
    from onnx import TensorProto

    kind = TensorProto.UINT8 if array.dtype == np.uint8 else TensorProto.FLOAT
    tensor = TensorProto(name=name, data_type=kind, dims=array.shape)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="memory")
    return tensor


def _session_options(onnxruntime):
    """On torch's number of threads; see the module."""
    global _pool_size
    threads = torch.get_num_threads()
    if threads > 1 and not _pool_size:
        onnxruntime.set_global_thread_pool_sizes(threads, 1)
        _pool_size = threads
    elif _pool_size not in (0, threads):
        log.warning("onnxruntime keeps its %d threads; torch now has %d", _pool_size, threads)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    options.use_per_session_threads = not _pool_size
    options.intra_op_num_threads = 1  # without the pool
    return options
