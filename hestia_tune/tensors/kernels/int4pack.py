"""torch's own products with weights of 4 bits, on the CPU and on CUDA (tinygemm).

A ternary code is stored as code + 8, which both layouts read as code times scale, exactly. CUDA's
takes bfloat16 only, and has not been run here.
"""

import torch

from hestia_tune.tensors.kernels import Kernel

_GROUPS = (256, 128, 64, 32)


class Int4Pack(Kernel):
    """See the module; in memory 4 bits a weight, and two numbers of its dtype a group."""

    name = "int4pack"
    devices = ("cpu", "cuda")
    max_rows = 32  # measured: from here on dequantizing and a dense product are as fast
    dtypes = (torch.bfloat16, torch.float32)

    @classmethod
    def _group(cls, weight) -> int | None:
        return next((g for g in _GROUPS if weight.block_size[-1] % g == 0), None)

    @classmethod
    def limit(cls, weight):
        rows, columns = weight.shape
        if weight.is_cuda and weight.dtype != torch.bfloat16:
            return "has products in bfloat16 only on CUDA"
        if cls._group(weight) is None:
            return f"needs groups of a multiple of {_GROUPS[-1]}"
        if rows % (multiple := 8 if weight.is_cuda else 16):
            return f"needs out_features that are a multiple of {multiple}"
        return super().limit(weight)

    def __init__(self, weight):
        super().__init__(weight)
        rows, columns = weight.shape
        self._group_size = group = self._group(weight)
        codes = weight.codes() + 8
        if weight.is_cuda:
            tiles = next(tiles for tiles in (8, 4, 2) if columns % (16 * tiles) == 0)
            pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
            packed = torch.ops.aten._convert_weight_to_int4pack(pairs, tiles)
        else:
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        # (groups, out_features, 2): scale, and what is added to (code + 8 - 8) * scale
        scale = weight.scale.repeat_interleave(weight.block_size[-1] // group, 1)
        scale = scale.expand(rows, -1).t().to(weight.dtype)
        self.parts = packed, torch.stack([scale, torch.zeros_like(scale)], -1).contiguous()

    def product(self, x):
        ops = torch.ops.aten
        multiply = ops._weight_int4pack_mm if x.is_cuda else ops._weight_int4pack_mm_for_cpu
        return multiply(x, self.parts[0], self._group_size, self.parts[1])
