"""Moving a `TernaryTensor` between ranks packed: what DTensor needs to shard, replicate and gather.

Each collective runs on both parts. A scale that covers all rows is the same on every rank and stays
as it is. FSDP2's own all-gather goes through the hooks of the tensor instead.
"""

import torch
import torch.distributed.tensor  # registers the functional collectives

from hestia_tune.tensors.bitpack import CODES_PER_BYTE
from hestia_tune.tensors.checks import packed_dim
from hestia_tune.tensors.ternary_ops import parts_of
from hestia_tune.tensors.ternary_tensor import TernaryTensor

aten, c10d, functional = torch.ops.aten, torch.ops.c10d, torch.ops._c10d_functional
implements = TernaryTensor.implements


@implements(c10d.scatter_.default)
def _(func, types, args, kwargs):
    outputs, inputs, *options = args
    work = None
    for name in TernaryTensor.tensor_data_names:
        if work is not None:
            work.wait()
        _, work = func(
            [getattr(output, name) for output in outputs],
            [[getattr(shard, name) for shard in shards] for shards in inputs],
            *options,
        )
    return outputs, work


@implements(c10d.broadcast_.default)
def _(func, types, args, kwargs):
    tensors, *options = args
    work = None
    for name in TernaryTensor.tensor_data_names:
        if work is not None:
            work.wait()
        _, work = func([getattr(tensor, name) for tensor in tensors], *options)
    return tensors, work


@implements(functional.all_gather_into_tensor.default)
def _(func, types, args, kwargs):
    """The shards of all ranks one below the other."""
    self, group_size, group_name = args

    def gather(part):
        return func(part.contiguous(), group_size, group_name)

    block, scale_covers_all_rows = self.block_size[0], self.block_size[0] != 1
    if packed_dim(self.qdata.shape, self.shape) == 0:
        _check_whole_bytes([self] * group_size, 0)
        scale_covers_all_rows = False
    if scale_covers_all_rows:
        scale, block = self.scale.clone(), block * group_size
    else:
        scale = gather(self.scale)
    shape = (self.shape[0] * group_size, *self.shape[1:])
    return TernaryTensor(
        gather(self.qdata), scale, (block, *self.block_size[1:]), shape, self.dtype
    )


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


@implements(_WAITS)
def _(func, types, args, kwargs):
    return args[0]._apply_fn_to_data(functional.wait_tensor.default)


@implements(aten.constant_pad_nd.default)
def _(func, types, args, kwargs):
    """Zero rows at the end, as DTensor evens out shards; they may be columns of a transpose."""
    self, pad, *value = args
    # From the last axis to the first: numbers of entries before and after.
    pad = [*pad, *[0] * (2 * self.dim() - len(pad))]
    if self.is_transposed:
        return func(self.t(), [*pad[2:], *pad[:2]], *value).t()
    *others, rows = pad
    if any(others) or any(value) or rows < 0 or packed_dim(self.qdata.shape, self.shape) == 0:
        raise ValueError(
            f"a TernaryTensor can be padded with zero rows at the end only; got {args[1]}"
        )
    padded = self.new_zeros((self.shape[0] + rows, *self.shape[1:]))
    padded.narrow(0, 0, self.shape[0]).copy_(self)
    return padded


@implements(aten.cat.default)
def _(func, types, args, kwargs):
    """Pieces with equal groups, end to end; scales over all rows become one scale a row."""

    def cat(tensors, dim=0):
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
        layouts = {(t.block_size, t.dtype, t.is_transposed) for t in pieces}
        if len(layouts) > 1:
            raise ValueError(
                f"TernaryTensors can be joined if groups and dtypes are equal; got {tensors}; join "
                "what dequantize() gives"
            )
        shape = list(first.shape)
        shape[dim] = sum(t.shape[dim] for t in pieces)
        joined = [func(list(part), dim) for part in zip(*map(parts_of, pieces), strict=True)]
        return TernaryTensor(*joined, pieces[0].block_size, shape, first.dtype)

    return cat(*args, **kwargs)


def _scale_per_row(self: TernaryTensor, dim: int) -> TernaryTensor:
    if self.block_size[dim] == 1:
        return self
    scale_shape, block_size = list(self.scale.shape), list(self.block_size)
    scale_shape[dim], block_size[dim] = self.shape[dim], 1
    scale = self.scale.expand(scale_shape).contiguous()
    return TernaryTensor(self.qdata, scale, block_size, self.shape, self.dtype)
