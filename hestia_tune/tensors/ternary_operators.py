"""Parts of a `TernaryTensor`, and moving it between ranks packed.

What FSDP2, DTensor and torch's tensor parallelism call, and what slices a matrix: rows, whole
groups of columns, a flat view, joining, and collectives. Views are TernaryTensors over views of the
two parts, so that sharding copies nothing. A part of a weight that would cut a byte, groups or
shards unevenly, is an error. FSDP2's own all-gather goes through the hooks of the tensor.
"""

import torch
import torch.distributed.tensor  # registers the functional collectives
from torch.utils._pytree import tree_map_only

from hestia_tune.tensors.bitpack import CODES_PER_BYTE
from hestia_tune.tensors.ternary_tensor import TernaryTensor

aten, c10d, functional = torch.ops.aten, torch.ops.c10d, torch.ops._c10d_functional
# A byte of four zero codes.
_ZERO_CODES = 0b01010101


@TernaryTensor.operator(aten.slice.Tensor)
def slice_(self, dim=0, start=None, end=None, step=1):
    """Rows, whole groups of columns, or columns within one group."""
    dim, size = dim % self.dim(), self.shape[dim]
    start, end, _ = slice(start, end).indices(size)
    end = max(start, end)
    if (start, end, step) == (0, size, 1):
        return self.detach()
    if self.is_transposed:
        return slice_(self.t(), 1 - dim, start, end, step).t()
    shape = [*self.shape[:dim], end - start, *self.shape[dim + 1 :]]
    if dim == 0 and self.dim() == 2:
        per_byte, group = 1, 1
        scale = self.scale[start:end] if self.has_scale_per_row else self.scale
    else:
        per_byte, group = CODES_PER_BYTE, self.block_size[-1]
        first, last = start // group, -(-end // group)
        if last - first == 1:  # columns within one group
            group = 1
        scale = self.scale[..., first:last]
    if any(at % n and at != size for at in (start, end) for n in (per_byte, group)) or step != 1:
        raise ValueError(
            f"a slice of {self!r} must start and end between groups, or lie within one, at "
            f"multiples of {per_byte} and with step 1; got [{start}:{end}:{step}] of axis {dim}; "
            "slice codes() or dequantize() instead"
        )
    first, last = start // per_byte, -(-end // per_byte)
    return self.rebuilt(self.qdata.narrow(dim, first, last - first), scale, shape=shape)


@TernaryTensor.operator(aten.split.Tensor)
def split(self, size, dim=0):
    starts = range(0, max(self.shape[dim], 1), size)
    return [slice_(self, dim, start, start + size) for start in starts]


@TernaryTensor.operator([aten.view.default, aten._unsafe_view.default])
def view(self, size):
    """The same shape, or all weights in one row: (n,) as FSDP2 keeps shards, (1, n)."""
    size, n = list(size), self.numel()
    if size == list(self.shape):
        return self.detach()
    whole_bytes = self.shape[-1] % CODES_PER_BYTE == 0 or self.shape[-1] == n
    whole_groups = self.scale.numel() == 1 or self.has_scale_per_row
    in_order = whole_bytes and whole_groups and not self.is_transposed
    if size not in ([-1], [n], [1, n]) or not in_order:
        raise ValueError(
            "a TernaryTensor whose rows are whole bytes (4 weights) and groups can be viewed as "
            f"one row; got the view {size} of {self!r}; use dequantize() first"
        )
    lead = [1] * (len(size) - 1)
    # Columns cut out of a weight are flattened by a copy; everything else by a view.
    return self.rebuilt(
        *(part.reshape([*lead, part.numel()]) for part in self.parts), shape=[*lead, n]
    )


@TernaryTensor.operator(aten.as_strided.default)
def as_strided(self, size, stride, storage_offset=None):
    """The same tensor only, which is what FSDP2 asks for."""
    if (tuple(size), tuple(stride), storage_offset or 0) != (self.shape, self.stride(), 0):
        raise ValueError(f"a TernaryTensor has no strides but its own; got {size}, {stride}")
    return self.detach()


@TernaryTensor.operator(aten.new_zeros.default)
def new_zeros(self, size, *, dtype=None, device=None, **unused):
    """Zero codes with the groups of ``self`` for any number of rows, as FSDP2 pads shards."""
    if self.is_transposed or size[1:] != list(self.shape[1:]) or len(size) != self.dim():
        raise ValueError(
            f"new_zeros of {self!r} keeps every axis but the first; got {size}; use torch.zeros"
        )
    qdata = self.qdata.new_full((size[0], *self.qdata.shape[1:]), _ZERO_CODES)
    scale = self.scale.clone()
    if self.has_scale_per_row:
        scale = scale.new_zeros((size[0], *scale.shape[1:]))
    zeros = self.rebuilt(qdata, scale, shape=size)
    return zeros.to(device=device or self.device, dtype=dtype or self.dtype)


@TernaryTensor.operator(aten.cat.default)
def cat(tensors, dim=0):
    """Pieces with equal groups, end to end; scales over all rows become one scale a row."""
    first, dim = tensors[0], dim % tensors[0].dim()
    kinds = {(type(t), t.dtype, getattr(t, "block_size", [0])[-1]) for t in tensors}
    if len(kinds) > 1 or any(t.is_transposed for t in tensors):
        raise ValueError(
            "TernaryTensors can be joined with TernaryTensors of equal groups and dtypes, but no "
            f"transposes; got {kinds}; join what dequantize() gives"
        )
    is_packed = dim == first.dim() - 1
    if is_packed and any(t.shape[dim] % CODES_PER_BYTE for t in tensors[:-1]):
        raise ValueError(f"packed columns are joined if multiples of 4; got {tensors}")
    scales = [t.scale if is_packed else t.scale.expand(t.shape[0], -1) for t in tensors]
    shape = list(first.shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    qdata = torch.cat([t.qdata for t in tensors], dim)
    return first.rebuilt(qdata, torch.cat(scales, dim), shape=shape)


@TernaryTensor.implements([c10d.scatter_.default, c10d.broadcast_.default])
def _(func, types, args, kwargs):
    """Part by part, the second once the first has arrived."""
    _, work = func(*tree_map_only(TernaryTensor, lambda tensor: tensor.qdata, args))
    work.wait()
    _, work = func(*tree_map_only(TernaryTensor, lambda tensor: tensor.scale, args))
    return args[0], work


@TernaryTensor.operator(functional.all_gather_into_tensor.default)
def all_gather(self, group_size, group_name):
    """The shards of all ranks one below the other; a scale that covers all rows stays."""
    if self.is_transposed:
        raise ValueError(f"the shards of a weight are gathered, not of its transpose; got {self!r}")

    def gather(part):
        pending = functional.all_gather_into_tensor(part.contiguous(), group_size, group_name)
        return functional.wait_tensor(pending)

    scale = gather(self.scale) if self.has_scale_per_row else self.scale.clone()
    shape = [self.shape[0] * group_size, *self.shape[1:]]
    return self.rebuilt(gather(self.qdata), scale, shape=shape)


_WAITS = [functional.wait_tensor.default]
if hasattr(functional, "_wrap_tensor_autograd"):  # newer torch puts a tensor that waits around it
    _WAITS.append(functional._wrap_tensor_autograd.default)


@TernaryTensor.implements(_WAITS)
def _(func, types, args, kwargs):
    return args[0]  # `all_gather` has waited
