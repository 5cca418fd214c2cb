"""Views of a `TernaryTensor`: rows, whole groups of columns, shards, flattening, padding.

Each is a TernaryTensor over views of the two parts, so that sharding copies nothing. A part of a
weight that would cut a byte, or groups unevenly, is an error.
"""

import itertools
import math

import torch

from hestia_tune.tensors.bitpack import CODES_PER_BYTE, packed_width
from hestia_tune.tensors.ternary_tensor import TernaryTensor

aten = torch.ops.aten
# A byte of four zero codes.
_ZERO_CODES = 0b01010101


def _cut(self: TernaryTensor, dim: int, start: int, end: int) -> TernaryTensor:
    """Rows or whole groups of columns [start, end), as views; ``start <= end`` within bounds."""
    dim %= self.dim()
    size, block = self.shape[dim], self.block_size[dim]
    per_byte = CODES_PER_BYTE if dim == self.packed_dim else 1
    if start == end:
        groups = (0, 0)
    elif start % block == 0 and end % block == 0:
        groups = (start // block, end // block)
    elif start // block == (end - 1) // block:  # within one group
        groups, block = (start // block, start // block + 1), end - start
    else:
        groups = None
    if groups is None or start % per_byte or (end % per_byte and end != size):
        raise ValueError(
            f"a slice of a TernaryTensor must start and end between groups of {block}, or lie "
            f"within one, and at multiples of {per_byte}; got [{start}:{end}] of axis {dim}, "
            f"size {size}; slice codes() or dequantize() instead"
        )
    first, last = start // per_byte, -(-end // per_byte)
    qdata = self.qdata.narrow(dim, first, last - first)
    scale = self.scale.narrow(dim, groups[0], groups[1] - groups[0])
    if start == end and per_byte == 1 and self.block_size[dim] != 1:
        scale, block = self.scale, 0  # no rows left, but their common scale is
    shape = (*self.shape[:dim], end - start, *self.shape[dim + 1 :])
    block_size = (*self.block_size[:dim], block, *self.block_size[dim + 1 :])
    return self.rebuilt(qdata, scale, block_size=block_size, shape=shape)


@TernaryTensor.operator(aten.slice.Tensor)
def slice_(self, dim=0, start=None, end=None, step=1):
    if step != 1:
        raise ValueError(f"a TernaryTensor can be sliced with step 1 only; got {step}")
    first, last, _ = slice(start, end).indices(self.shape[dim])
    return _cut(self, dim, first, max(first, last))


@TernaryTensor.operator([aten.split.Tensor, aten.split_with_sizes.default])
def split(self, sizes, dim=0):
    size = self.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, size - at) for at in range(0, max(size, 1), sizes)]
    ends = itertools.accumulate(sizes)
    return [_cut(self, dim, end - n, end) for n, end in zip(sizes, ends, strict=True)]


@TernaryTensor.operator(aten.select.int)
def select(self, dim, index):
    dim %= self.dim()
    if dim == self.packed_dim:
        raise ValueError(
            f"columns of a TernaryTensor share bytes and groups; got column {index} of axis {dim}; "
            "use dequantize() first"
        )
    index = range(self.shape[dim])[index]
    row = _cut(self, dim, index, index + 1)
    parts = (part.squeeze(dim) for part in row.parts)
    block_size, shape = ((*n[:dim], *n[dim + 1 :]) for n in (row.block_size, row.shape))
    return self.rebuilt(*parts, block_size=block_size, shape=shape)


@TernaryTensor.operator(aten.unbind.int)
def unbind(self, dim=0):
    return [select(self, dim, index) for index in range(self.shape[dim])]


@TernaryTensor.operator([aten.view.default, aten._unsafe_view.default])
def view(self, size):
    """Any shape whose last axis is whole bytes and whole groups, flat included."""
    size = list(size)
    if -1 in size:
        size[size.index(-1)] = self.numel() // max(1, -math.prod(size))
    if size == list(self.shape):
        return self.detach()
    one_scale = self.scale.numel() == 1
    flat_block = self.numel() if one_scale else self.block_size[-1]
    rows_apart = one_scale or all(block == 1 for block in self.block_size[:-1])

    def whole_bytes(shape):
        return shape[-1] % CODES_PER_BYTE == 0 or math.prod(shape[:-1]) == 1

    fits = size and math.prod(size) == self.numel() and rows_apart and not self.is_transposed
    fits = fits and whole_bytes(self.shape) and whole_bytes(size)
    if not fits or not (one_scale or size[-1] % flat_block == 0):
        raise ValueError(
            f"a TernaryTensor can be viewed with a last axis of whole groups (of {flat_block}) "
            f"and whole bytes (4 weights); got the view {size} of {self!r}; use dequantize() first"
        )
    block_size = tuple(size) if one_scale else (*[1] * (len(size) - 1), flat_block)
    # Columns cut out of a weight are flattened by a copy; everything else by a view.
    qdata = self.qdata.reshape(*size[:-1], packed_width(size[-1]))
    scale = self.scale.reshape([n // block for n, block in zip(size, block_size, strict=True)])
    return self.rebuilt(qdata, scale, block_size=block_size, shape=tuple(size))


@TernaryTensor.operator(aten.as_strided.default)
def as_strided(self, size, stride, storage_offset=None):
    """The same tensor only, which is what FSDP2 asks for."""
    if tuple(size) != tuple(self.shape) or tuple(stride) != self.stride() or storage_offset:
        raise ValueError(
            f"a TernaryTensor has no other strides; got size {tuple(size)}, stride "
            f"{tuple(stride)}, offset {storage_offset} of {self!r}; use dequantize() first"
        )
    return self.detach()


@TernaryTensor.operator(aten.new_zeros.default)
def new_zeros(self, size, *, dtype=None, device=None, **unused):
    """Zero codes with the groups of ``self`` for any number of rows, as FSDP2 pads shards."""
    if self.is_transposed or size[1:] != list(self.shape[1:]) or len(size) != self.dim():
        raise ValueError(
            f"new_zeros of a TernaryTensor keeps every axis but the first; got {tuple(size)} for "
            f"{tuple(self.shape)}; use torch.zeros for a dense tensor"
        )
    rowwise = self.block_size[0] == 1
    scale_rows = size[0] if rowwise else self.scale.shape[0]
    block_size = (1 if rowwise else size[0], *self.block_size[1:])
    device, dtype = device or self.device, dtype or self.dtype
    qdata = self.qdata.new_full((size[0], *self.qdata.shape[1:]), _ZERO_CODES, device=device)
    scale = self.scale.new_zeros((scale_rows, *self.scale.shape[1:]), device=device)
    return self.rebuilt(qdata, scale, block_size=block_size, shape=tuple(size), dtype=dtype)


@TernaryTensor.operator(aten.constant_pad_nd.default)
def pad(self, amounts, value=0):
    """Zero rows at the end, as DTensor evens out shards; they may be columns of a transpose."""
    # From the last axis to the first: numbers of entries before and after.
    full = [*amounts, *[0] * (2 * self.dim() - len(amounts))]
    if self.is_transposed:
        return pad(self.t(), [*full[2:], *full[:2]], value).t()
    *others, rows = full
    if any(others) or value or rows < 0 or self.packed_dim == 0:
        raise ValueError(
            f"a TernaryTensor can be padded with zero rows at the end only; got {amounts}"
        )
    padded = self.new_zeros((self.shape[0] + rows, *self.shape[1:]))
    padded.narrow(0, 0, self.shape[0]).copy_(self)
    return padded
