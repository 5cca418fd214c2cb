"""Moving a `TernaryTensor` between ranks packed: what DTensor needs to shard, replicate and gather.

Each collective runs on both parts. A scale that covers all rows is the same on every rank and stays
as it is. FSDP2's own all-gather goes through the hooks of the tensor instead.
"""

import torch
import torch.distributed.tensor  # registers the functional collectives
from torch.utils._pytree import tree_map_only

from hestia_tune.tensors.bitpack import CODES_PER_BYTE
from hestia_tune.tensors.ternary_tensor import TernaryTensor

aten, c10d, functional = torch.ops.aten, torch.ops.c10d, torch.ops._c10d_functional


@TernaryTensor.implements([c10d.scatter_.default, c10d.broadcast_.default])
def _(func, types, args, kwargs):
    """Part by part, the second once the first has arrived."""
    work = None
    for index in range(2):
        if work is not None:
            work.wait()
        of_part = tree_map_only(TernaryTensor, lambda tensor, i=index: tensor.parts[i], args)
        _, work = func(*of_part)
    return args[0], work


@TernaryTensor.operator(functional.all_gather_into_tensor.default)
def all_gather(self, group_size, group_name):
    """The shards of all ranks one below the other."""

    def gather(part):
        return functional.all_gather_into_tensor(part.contiguous(), group_size, group_name)

    rows, *others = self.block_size
    if self.packed_dim == 0:
        _check_whole_bytes([self] * group_size, 0)
    if self.packed_dim == 0 or rows == 1:
        scale = gather(self.scale)
    else:
        scale, rows = self.scale.clone(), rows * group_size
    shape = (self.shape[0] * group_size, *self.shape[1:])
    return self.rebuilt(gather(self.qdata), scale, block_size=(rows, *others), shape=shape)


def _check_whole_bytes(pieces: list[TernaryTensor], dim: int) -> None:
    """All but the last piece must end with a byte, for codes to go on in the next."""
    if any(piece.shape[dim] % CODES_PER_BYTE for piece in pieces[:-1]):
        raise ValueError(
            "TernaryTensors can be joined along packed columns if those are multiples of 4; got "
            f"{pieces}; join what dequantize() gives"
        )


# Newer versions of torch put a tensor that waits when it is used around what a collective returns;
# here the wait is at once.
_WAITS = [functional.wait_tensor.default]
if hasattr(functional, "_wrap_tensor_autograd"):
    _WAITS.append(functional._wrap_tensor_autograd.default)


@TernaryTensor.implements(_WAITS)
def _(func, types, args, kwargs):
    return args[0]._apply_fn_to_data(functional.wait_tensor.default)


@TernaryTensor.operator(aten.cat.default)
def cat(tensors, dim=0):
    """Pieces with equal groups, end to end; scales over all rows become one scale a row."""
    first, dim = tensors[0], dim % tensors[0].dim()
    if not all(isinstance(t, TernaryTensor) for t in tensors):
        raise ValueError("TernaryTensors can be joined with TernaryTensors only")
    if all(t.is_transposed for t in tensors):
        return cat([t.t() for t in tensors], 1 - dim).t()
    if dim == first.dim() - 1:
        _check_whole_bytes(tensors, dim)
        pieces = tensors
    else:
        pieces = [_scale_per_row(t, dim) for t in tensors]
    if len({(t.block_size, t.dtype, t.is_transposed) for t in pieces}) > 1:
        raise ValueError(
            f"TernaryTensors can be joined if groups and dtypes are equal; got {tensors}; join "
            "what dequantize() gives"
        )
    shape = list(first.shape)
    shape[dim] = sum(t.shape[dim] for t in pieces)
    joined = (torch.cat(parts, dim) for parts in zip(*(t.parts for t in pieces), strict=True))
    return pieces[0].rebuilt(*joined, shape=tuple(shape))


def _scale_per_row(self: TernaryTensor, dim: int) -> TernaryTensor:
    if self.block_size[dim] == 1:
        return self
    scale_shape, block_size = list(self.scale.shape), list(self.block_size)
    scale_shape[dim], block_size[dim] = self.shape[dim], 1
    scale = self.scale.expand(scale_shape).contiguous()
    return self.rebuilt(self.qdata, scale, block_size=tuple(block_size))
