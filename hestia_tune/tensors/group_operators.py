"""Parts of a `GroupTensor`, and moving it between ranks packed.

What FSDP2, DTensor and torch's tensor parallelism call, and what slices a matrix: rows, whole
groups of columns, a flat view, padding, joining, and collectives. Views are GroupTensors over
views of the two parts, so that sharding copies nothing. A part of a weight that would cut a byte,
or groups unevenly, is an error. FSDP2's own all-gather goes through the hooks of the tensor.
"""

import torch
import torch.distributed.tensor  # registers the functional collectives
from torch.utils._pytree import tree_map_only

from hestia_tune.tensors.bitpack import ZERO_CODES
from hestia_tune.tensors.group_tensor import GroupTensor

aten, c10d, functional = torch.ops.aten, torch.ops.c10d, torch.ops._c10d_functional


@GroupTensor.operator(aten.slice.Tensor)
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
        per_byte, group = 8 // self.bits, self.block_size[-1]
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


@GroupTensor.operator(aten.split.Tensor)
def split(self, size, dim=0):
    starts = range(0, max(self.shape[dim], 1), size)
    return [slice_(self, dim, start, start + size) for start in starts]


@GroupTensor.operator([aten.view.default, aten._unsafe_view.default])
def view(self, size):
    """The same shape, or all weights in one row: (n,) as FSDP2 keeps shards, (1, n)."""
    size, n = list(size), self.numel()
    if size == list(self.shape):
        return self.detach()
    whole_bytes = self.shape[-1] % (8 // self.bits) == 0 or self.shape[-1] == n
    whole_groups = self.scale.numel() == 1 or self.has_scale_per_row
    in_order = whole_bytes and whole_groups and not self.is_transposed
    if size not in ([-1], [n], [1, n]) or not in_order:
        raise ValueError(
            f"a {type(self).__name__} whose rows are whole bytes ({8 // self.bits} weights) and "
            f"groups can be viewed as one row; got the view {size} of {self!r}; use dequantize() "
            "first"
        )
    lead = [1] * (len(size) - 1)
    # Columns cut out of a weight are flattened by a copy; everything else by a view.
    return self.rebuilt(
        *(part.reshape([*lead, part.numel()]) for part in self.parts), shape=[*lead, n]
    )


@GroupTensor.operator(aten.as_strided.default)
def as_strided(self, size, stride, storage_offset=None):
    """The same tensor only, which is what FSDP2 asks for."""
    if (tuple(size), tuple(stride), storage_offset or 0) != (self.shape, self.stride(), 0):
        raise ValueError(
            f"a {type(self).__name__} has no strides but its own; got {size}, {stride}"
        )
    return self.detach()


@GroupTensor.operator(aten.new_zeros.default)
def new_zeros(self, size, *, dtype=None, device=None, **unused):
    """Zero codes with the groups of ``self`` for any number of rows, as FSDP2 pads shards."""
    if self.is_transposed or size[1:] != list(self.shape[1:]) or len(size) != self.dim():
        raise ValueError(
            f"new_zeros of {self!r} keeps every axis but the first; got {size}; use torch.zeros"
        )
    # Of ternary ones; of others the scale 0 does.
    qdata = self.qdata.new_full((size[0], *self.qdata.shape[1:]), ZERO_CODES)
    scale = self.scale.clone()
    if self.has_scale_per_row:
        scale = scale.new_zeros((size[0], *scale.shape[1:]))
    zeros = self.rebuilt(qdata, scale, shape=size)
    return zeros.to(device=device or self.device, dtype=dtype or self.dtype)


@GroupTensor.operator(aten.constant_pad_nd.default)
def pad(self, amounts, value=0):
    """Zero rows at the end, as DTensor evens out shards; they may be columns of a transpose."""
    # From the last axis to the first: numbers of entries before and after.
    *others, rows = full = [*amounts, *[0] * (2 * self.dim() - len(amounts))]
    if self.is_transposed:
        return pad(self.t(), [*full[2:], *full[:2]], value).t()
    if any(others) or value or rows < 0:
        raise ValueError(
            f"a {type(self).__name__} is padded with zero rows at the end only; got {amounts}"
        )
    padded = new_zeros(self, [self.shape[0] + rows, *self.shape[1:]])
    padded.narrow(0, 0, self.shape[0]).copy_(self)
    return padded


@GroupTensor.operator(aten.cat.default)
def cat(tensors, dim=0):
    """Pieces with equal groups, end to end; scales over all rows become one scale a row."""
    first, dim = tensors[0], dim % tensors[0].dim()
    if all(isinstance(t, GroupTensor) and t.is_transposed for t in tensors):
        return cat([t.t() for t in tensors], 1 - dim).t()
    kinds = {(type(t), t.dtype, getattr(t, "block_size", [0])[-1]) for t in tensors}
    if len(kinds) > 1 or any(t.is_transposed for t in tensors):
        name = type(first).__name__
        raise ValueError(
            f"{name}s can be joined with {name}s of equal groups and dtypes; got {kinds}; join "
            "what dequantize() gives"
        )
    is_packed = dim == first.dim() - 1
    if is_packed:
        _check_whole_bytes(tensors, dim)
    scales = [t.scale if is_packed else t.scale.expand(t.shape[0], -1) for t in tensors]
    shape = list(first.shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    qdata = torch.cat([t.qdata for t in tensors], dim)
    return first.rebuilt(qdata, torch.cat(scales, dim), shape=shape)


def _check_whole_bytes(pieces: list[GroupTensor], dim: int) -> None:
    """All but the last piece must end with a byte, for codes to go on in the next."""
    per_byte = 8 // pieces[0].bits
    if any(piece.shape[dim] % per_byte for piece in pieces[:-1]):
        raise ValueError(f"packed columns are joined if multiples of {per_byte}; got {pieces}")


@GroupTensor.implements([c10d.scatter_.default, c10d.broadcast_.default])
def _(func, types, args, kwargs):
    """Part by part, the second once the first has arrived."""
    _, work = func(*tree_map_only(GroupTensor, lambda tensor: tensor.qdata, args))
    work.wait()
    _, work = func(*tree_map_only(GroupTensor, lambda tensor: tensor.scale, args))
    return args[0], work


@GroupTensor.operator(functional.all_gather_into_tensor.default)
def all_gather(self, group_size, group_name):
    """The shards of all ranks one below the other; a scale that covers all rows stays."""

    def gather(part):
        part = part.t() if self.is_transposed else part
        pending = functional.all_gather_into_tensor(part.contiguous(), group_size, group_name)
        whole = functional.wait_tensor(pending)
        return whole.t() if self.is_transposed else whole

    if self.is_transposed:
        _check_whole_bytes([self] * group_size, 0)
    has_parts = self.is_transposed or self.has_scale_per_row
    scale = gather(self.scale) if has_parts else self.scale.clone()
    shape = [self.shape[0] * group_size, *self.shape[1:]]
    return self.rebuilt(gather(self.qdata), scale, shape=shape)


_WAITS = [functional.wait_tensor.default]
if hasattr(functional, "_wrap_tensor_autograd"):  # newer torch puts a tensor that waits around it
    _WAITS.append(functional._wrap_tensor_autograd.default)


@GroupTensor.implements(_WAITS)
def _(func, types, args, kwargs):
    return args[0]  # `all_gather` has waited
