"""gemlite's Triton kernels on CUDA: weights of 2 bits, dequantized in the product.

Its layout is made by gemlite itself from codes + 1, scales and the zero point 1, and has been held
against gemlite's own unpacking on a CPU; the products have not been run here.
"""

import torch

from hestia_tune.tensors.kernels import Kernel


class Gemlite(Kernel):
    """See the module; in memory as much as the packed weight."""

    name = "gemlite"
    packages, extra = ("gemlite",), "cuda"
    devices = ("cuda",)
    dtypes = (torch.bfloat16, torch.float16)

    @classmethod
    def limit(cls, weight):
        if weight.shape[1] % 32 or weight.block_size[-1] < 16:
            return "needs in_features that are a multiple of 32, and groups of 16 or more"
        return super().limit(weight)

    def __init__(self, weight):
        super().__init__(weight)
        import gemlite

        rows, columns = weight.shape
        kind = gemlite.DType.BF16 if weight.dtype == torch.bfloat16 else gemlite.DType.FP16
        self._linear = gemlite.GemLiteLinearTriton(
            2, weight.block_size[-1], columns, rows, input_dtype=kind, output_dtype=kind
        )
        scale = weight.scale.expand(rows, -1).contiguous().to(weight.dtype)
        self._linear.pack((weight.codes() + 1).to(torch.uint8), scale, 1)
        self.parts = list(self._linear.parameters())

    def product(self, x):
        return self._linear(x)
