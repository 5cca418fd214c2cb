"""The kinds of `GroupTensor`: which codes, in how many bits."""

from functools import partial

import torch

from hestia_tune.methods import EvenMethod, TernaryMethod
from hestia_tune.tensors import group_operators  # noqa: F401  (which the kinds inherit)
from hestia_tune.tensors.bitpack import CODES_PER_BYTE, Scratch, ternary_masks
from hestia_tune.tensors.group_tensor import GroupTensor

_scratch = Scratch()
# Of a bfloat16 value as int16: the sign bit, and what infinity begins with.
_SIGN, _INFINITE = -(2**15), 0x7F80


class TernaryTensor(GroupTensor):
    """Codes -1, 0, 1, four to a byte: code + 1."""

    method_type = TernaryMethod
    levels, bits = 3, 2
    hard_rule = "one absolute value besides 0"

    def dequantize_for_now(self):
        dense = self.dequantize_weight(_scratch)
        return dense.t() if self.is_transposed else dense

    def dequantize_weight(self, scratch: Scratch | None = None) -> torch.Tensor:
        """On the CPU four weights at a time, without arithmetic: a code is which bits of its scale
        are taken, the sign bit being set in all scales. A compiler fuses the plain way, and what
        stands for a tensor, such as a fake one, takes it too."""
        packed = self.qdata
        plain = type(packed) is torch.Tensor and packed.device.type == "cpu" and packed.numel() > 0
        quads_are_whole = self.block_size[-1] % CODES_PER_BYTE == 0
        if torch.compiler.is_compiling() or not plain or not quads_are_whole:
            return super().dequantize_weight()
        bits = self.scale.view(torch.int16)
        lowest, highest = (value.item() for value in bits.aminmax())
        if lowest < 0 or highest >= _INFINITE:
            return super().dequantize_weight()
        out = scratch and scratch.take(packed.numel())
        masks = torch.index_select(ternary_masks(), 0, packed.int().flatten(), out=out)
        scales = (bits | _SIGN).unsqueeze(-1).expand(*bits.shape, CODES_PER_BYTE)
        blocks = masks.view(*packed.shape[:-1], bits.shape[-1], -1)
        blocks.bitwise_and_(scales.contiguous().view(torch.int64))
        return blocks.view(torch.bfloat16).flatten(-2).to(self.dtype)


class INT2Tensor(GroupTensor):
    """Codes -3, -1, 1, 3, four to a byte: (code + 3) / 2. The scale is half the distance of two
    levels."""

    method_type = partial(EvenMethod, codebook="int2")
    levels, bits = 4, 2
    hard_rule = "one absolute value and three times it"


class BinaryTensor(GroupTensor):
    """Codes -1, 1, eight to a byte: (code + 1) / 2."""

    method_type = partial(EvenMethod, codebook="binary")
    levels, bits = 2, 1
    hard_rule = "one absolute value"
