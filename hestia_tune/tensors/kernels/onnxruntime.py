"""ONNX Runtime's `MatMulNBits` on the CPU: weights of 2 bits, activations rounded to 8 bits.

One row is multiplied on the calling thread, 5 to 10 times as fast as by a dense weight. More rows
are dequantized. `TernaryTensor` has the operator's layout, so ONNX Runtime reads the codes in place
and keeps one copy in its own layout. Activations are rounded in blocks of 32 to 128 columns, an
error of 0.5 to 0.7% of the product for Gaussian ones. AVX2, AVX512 and ARM have fast code for this.
"""

import torch
import torch.nn.functional as F

from hestia_tune.tensors.bitpack import packed_width
from hestia_tune.tensors.kernels import Kernel

BLOCKS = (128, 64, 32)
_ZERO_POINTS = 0b01010101  # four zero points 1
_SESSION_BYTES = 85_000  # measured: what a session has besides its weights
_WEIGHTS = ["codes", "scale", "zeros"]
# One product. Activations are rounded to 8 bits (accuracy level 4), weights given as memory.
_MODEL = """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
product (float[rows, {columns}] x) => (float[rows, {rows}] y)
<uint8 {codes} codes = ["location": "memory"], float {scale} scale = ["location": "memory"],
 uint8 {zeros} zeros = ["location": "memory"]>
{{ y = com.microsoft.MatMulNBits <K={columns}, N={rows}, bits=2, block_size={block},
                                  accuracy_level=4> (x, codes, scale, zeros) }}"""


class OnnxRuntime(Kernel):
    """See the module. The kernel takes 2.8 bits a weight at blocks of 128."""

    name = "onnxruntime"
    packages, extra = ("onnx", "onnxruntime"), "cpu"
    devices = ("cpu",)
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    max_rows = 1

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
        import onnx.parser
        import onnxruntime as ort

        (rows, columns), block = weight.shape, self._block(weight)
        blocks = -(-columns // block)
        missing = packed_width(blocks * block) - weight.qdata.shape[1]
        codes = F.pad(weight.qdata, (0, missing)) if missing else weight.qdata.contiguous()
        scale = weight.scale.float().repeat_interleave(-(-weight.block_size[-1] // block), 1)
        scale = scale.expand(rows, -1).contiguous()
        zeros = codes.new_full((rows, packed_width(blocks)), _ZERO_POINTS)
        self.parts = codes.view(rows, blocks, -1), scale, zeros
        given = [part for part in self.parts if part.data_ptr() != weight.qdata.data_ptr()]
        copies = codes.nbytes + 2 * scale.nbytes + _SESSION_BYTES
        self.num_bytes = copies + sum(part.nbytes for part in given)

        shapes = {n: list(p.shape) for n, p in zip(_WEIGHTS, self.parts, strict=True)}
        model = _MODEL.format(rows=rows, columns=columns, block=block, **shapes)
        options = ort.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 4, 1
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        self._values = [ort.OrtValue.ortvalue_from_numpy(part.numpy()) for part in self.parts]
        options.add_external_initializers(_WEIGHTS, self._values)
        model = onnx.parser.parse_model(model).SerializeToString()
        self._session = ort.InferenceSession(model, options, ["CPUExecutionProvider"])

    def product(self, x):
        y = torch.from_numpy(self._session.run(None, {"x": x.detach().float().numpy()})[0])
        # Rounded activations make numbers of NaN and infinity.
        return y.masked_fill_(~x.isfinite().all(1, keepdim=True), torch.nan)
