"""What a `TernaryTensor` does under torch's operators.

Products dequantize and call the dense operator, all from `ternary_linear`, the one place where a
kernel that reads packed codes would go. What cannot be kept packed exactly is an error and never a
silent dense copy. Views are in `ternary_views`.
"""

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import return_and_correct_aliasing

from hestia_tune.tensors.ternary_tensor import TernaryTensor

aten = torch.ops.aten
implements = TernaryTensor.implements
implements_torch_function = TernaryTensor.implements_torch_function

# A byte of four zero codes.
_ZERO_CODES = 0b01010101


def ternary_linear(
    x: torch.Tensor, weight: TernaryTensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``F.linear(x, weight.dequantize(), bias)``: every product with a packed weight comes here.

    Args:
        x: (..., in_features), in the presented dtype of ``weight`` (autocast aside).
        weight: (out_features, in_features), packed along either axis (`is_transposed`).
        bias: (out_features,) or None.
    """
    return F.linear(x, weight.dequantize(), bias)


def parts_of(self: TernaryTensor) -> tuple[torch.Tensor, torch.Tensor]:
    return self.qdata, self.scale


def _dense(value):
    return value.dequantize() if isinstance(value, TernaryTensor) else value


@implements(aten.linear.default)
@implements_torch_function(F.linear)
def _(func, types, args, kwargs):
    def linear(input, weight, bias=None):
        if isinstance(weight, TernaryTensor):
            return ternary_linear(_dense(input), weight, bias)
        return F.linear(_dense(input), weight, bias)

    return linear(*args, **kwargs)


def _is_linear_weight(value) -> bool:
    """Whether this is a weight as a decomposed linear passes it: transposed."""
    return isinstance(value, TernaryTensor) and value.is_transposed


@implements(aten.mm.default)
def _(func, types, args, kwargs):
    x, weight = args
    if _is_linear_weight(weight):
        return ternary_linear(_dense(x), weight.t())
    return func(_dense(x), _dense(weight))


@implements(aten.addmm.default)
def _(func, types, args, kwargs):
    bias, x, weight = args
    if _is_linear_weight(weight) and bias.dim() == 1 and not kwargs:
        return ternary_linear(_dense(x), weight.t(), bias)
    return func(_dense(bias), _dense(x), _dense(weight), **kwargs)


@implements([aten._to_copy.default, aten.to.dtype_layout])
def _(func, types, args, kwargs):
    """Moves both parts; another dtype is another presented dtype."""
    self = args[0]
    device, non_blocking = kwargs.get("device"), kwargs.get("non_blocking", False)
    parts = (part.to(device or self.device, non_blocking=non_blocking) for part in parts_of(self))
    dtype = kwargs.get("dtype") or self.dtype
    new = TernaryTensor(*parts, self.block_size, self.shape, dtype)
    return return_and_correct_aliasing(func, args, kwargs, new)


@implements(aten.copy_.default)
def _(func, types, args, kwargs):
    """Between equal shapes and groups; into a dense tensor it copies the dequantized values."""
    target, source = args[:2]
    if not isinstance(target, TernaryTensor):
        return target.copy_(source.dequantize())
    layouts = [
        (tuple(t.shape), t.block_size, t.qdata.shape) if isinstance(t, TernaryTensor) else None
        for t in (target, source)
    ]
    if layouts[0] != layouts[1]:
        raise ValueError(
            "only a TernaryTensor of the same shape and groups can be copied into "
            f"{target!r}; got {source if layouts[1] else type(source).__name__}; build it with "
            "from_hard or from_hp, or load it with assign=True"
        )
    for part, new in zip(parts_of(target), parts_of(source), strict=True):
        part.copy_(new)
    return target


@implements(aten.empty_like.default)
def _(func, types, args, kwargs):
    """Uninitialised memory of the same layout, as `nn.Module.to_empty` asks for."""
    self = args[0]
    device = kwargs.get("device") or self.device
    parts = (torch.empty_like(part, device=device) for part in parts_of(self))
    return TernaryTensor(*parts, self.block_size, self.shape, kwargs.get("dtype") or self.dtype)


@implements(aten.new_zeros.default)
def _(func, types, args, kwargs):
    """Zero codes with the groups of ``self`` for any number of rows, as FSDP2 pads shards."""
    self, size = args[0], tuple(args[1])
    if self.is_transposed or size[1:] != self.shape[1:] or len(size) != self.dim():
        raise ValueError(
            f"new_zeros of a TernaryTensor keeps every axis but the first; got {size} for "
            f"{tuple(self.shape)}; use torch.zeros for a dense tensor"
        )
    rowwise = self.block_size[0] == 1
    scale_rows = size[0] if rowwise else self.scale.shape[0]
    device = kwargs.get("device") or self.device
    qdata = self.qdata.new_full((size[0], *self.qdata.shape[1:]), _ZERO_CODES, device=device)
    scale = self.scale.new_zeros((scale_rows, *self.scale.shape[1:]), device=device)
    block_size = (1 if rowwise else size[0], *self.block_size[1:])
    return TernaryTensor(qdata, scale, block_size, size, kwargs.get("dtype") or self.dtype)
