"""Views of a `TernaryTensor`: rows, whole groups of columns, shards, transposes, flattening.

Each is a TernaryTensor over views of the two parts, so that sharding copies nothing. A part of a
weight that would cut a byte, or groups unevenly, is an error.
"""

import math

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

from hestia_tune.tensors.bitpack import CODES_PER_BYTE, packed_width
from hestia_tune.tensors.checks import packed_dim
from hestia_tune.tensors.ternary_ops import parts_of
from hestia_tune.tensors.ternary_tensor import TernaryTensor

aten = torch.ops.aten
implements = TernaryTensor.implements


@implements([aten.t.default, aten.transpose.int, aten.permute.default])
def _(func, types, args, kwargs):
    self = args[0]
    if func is aten.permute.default:
        swaps = [dim % self.dim() for dim in args[1]] != list(range(self.dim()))
    else:
        dims = args[1:] or (0, -1)
        swaps = dims[0] % self.dim() != dims[1] % self.dim()
    if swaps and self.dim() != 2:
        raise ValueError(f"only a 2-D TernaryTensor has a transpose; got {tuple(self.shape)}")
    new = _transpose(self) if swaps else _same(self)
    return return_and_correct_aliasing(func, args, kwargs, new)


def _transpose(self: TernaryTensor) -> TernaryTensor:
    parts = (part.t() for part in parts_of(self))
    return TernaryTensor(*parts, self.block_size[::-1], self.shape[::-1], self.dtype)


def _same(self: TernaryTensor) -> TernaryTensor:
    return TernaryTensor(
        self.qdata.detach(), self.scale.detach(), self.block_size, self.shape, self.dtype
    )


def _slice(self: TernaryTensor, dim: int, start: int, end: int) -> TernaryTensor:
    """Rows or whole groups of columns [start, end), as views; ``start <= end`` within bounds."""
    dim %= self.dim()
    size, block = self.shape[dim], self.block_size[dim]
    first, last, per_byte = start, end, 1
    if dim == packed_dim(self.qdata.shape, self.shape):
        per_byte = CODES_PER_BYTE
        first, last = start // per_byte, packed_width(end)
    if start == end:
        groups = (0, 0)
    elif start % block == 0 and (end % block == 0):
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
    qdata = self.qdata.narrow(dim, first, last - first)
    scale = self.scale.narrow(dim, groups[0], groups[1] - groups[0])
    if start == end and per_byte == 1 and self.block_size[dim] != 1:
        scale, block = self.scale, 0  # no rows left, but their common scale is
    shape = (*self.shape[:dim], end - start, *self.shape[dim + 1 :])
    block_size = (*self.block_size[:dim], block, *self.block_size[dim + 1 :])
    return TernaryTensor(qdata, scale, block_size, shape, self.dtype)


@implements(aten.slice.Tensor)
def _(func, types, args, kwargs):
    def slice_(self, dim=0, start=None, end=None, step=1):
        if step != 1:
            raise ValueError(f"a TernaryTensor can be sliced with step 1 only; got {step}")
        first, last, _ = slice(start, end).indices(self.shape[dim])
        return _slice(self, dim, first, max(first, last))

    return return_and_correct_aliasing(func, args, kwargs, slice_(*args, **kwargs))


@implements([aten.split.Tensor, aten.split_with_sizes.default])
def _(func, types, args, kwargs):
    def split(self, sizes, dim=0):
        size = self.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, size - at) for at in range(0, max(size, 1), sizes)]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [_slice(self, dim, e - n, e) for n, e in zip(sizes, ends, strict=True)]

    return split(*args, **kwargs)


def _select(self: TernaryTensor, dim: int, index: int) -> TernaryTensor:
    dim %= self.dim()
    if self.dim() == 1 or dim == packed_dim(self.qdata.shape, self.shape):
        raise ValueError(
            f"columns of a TernaryTensor share bytes and groups; got column {index} of axis {dim}; "
            "use dequantize() first"
        )
    index = range(self.shape[dim])[index]
    row = _slice(self, dim, index, index + 1)
    parts = (part.squeeze(dim) for part in parts_of(row))
    others = [axis for axis in range(self.dim()) if axis != dim]
    block_size, shape = ([sizes[axis] for axis in others] for sizes in (row.block_size, row.shape))
    return TernaryTensor(*parts, block_size, shape, self.dtype)


@implements(aten.select.int)
def _(func, types, args, kwargs):
    return return_and_correct_aliasing(func, args, kwargs, _select(*args))


@implements(aten.unbind.int)
def _(func, types, args, kwargs):
    def unbind(self, dim=0):
        return [_select(self, dim, index) for index in range(self.shape[dim])]

    return unbind(*args, **kwargs)


@implements([aten.view.default, aten._unsafe_view.default])
def _(func, types, args, kwargs):
    """Any shape whose last axis is whole bytes and whole groups, flat included."""
    self, size = args[0], list(args[1])
    if -1 in size:
        size[size.index(-1)] = self.numel() // max(1, -math.prod(size))
    size = tuple(size)
    new = _same(self) if size == tuple(self.shape) else _reshape(self, size)
    return return_and_correct_aliasing(func, args, kwargs, new)


def _reshape(self: TernaryTensor, size: tuple[int, ...]) -> TernaryTensor:
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
    block_size = size if one_scale else (*[1] * (len(size) - 1), flat_block)
    scale_size = [n // block for n, block in zip(size, block_size, strict=True)]
    # Columns cut out of a weight are flattened by a copy; everything else by a view.
    qdata = self.qdata.reshape(*size[:-1], packed_width(size[-1]))
    return TernaryTensor(qdata, self.scale.reshape(scale_size), block_size, size, self.dtype)


@implements(aten.as_strided.default)
def _(func, types, args, kwargs):
    """The same tensor only, which is what FSDP2 asks for."""

    def as_strided(self, size, stride, storage_offset=None):
        if tuple(size) != tuple(self.shape) or tuple(stride) != self.stride() or storage_offset:
            raise ValueError(
                f"a TernaryTensor has no other strides; got size {tuple(size)}, stride "
                f"{tuple(stride)}, offset {storage_offset} of {self!r}; use dequantize() first"
            )
        return _same(self)

    return return_and_correct_aliasing(func, args, kwargs, as_strided(*args, **kwargs))
